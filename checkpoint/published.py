"""What we read of other projects' JSON files, key by key. They are checked before anything else is done."""
from __future__ import annotations

from common.schema import Either, Flag, List, Map, Null, Number, Record, Text, Whole, maybe
from common.sizes import IDS, LAYERS, MANY, WIDTH
from model import LENGTH
from tokens.files import ADDED

TOKEN = Either(Null(), Whole(-1, IDS.high), List(Whole(-1, IDS.high), most=4096))  # -1: none
LAYER_IDS = maybe(List(Whole(-1, LAYERS.high), most=1000))


def _all(kind, *names: str) -> dict:
    """These keys may hold this kind, or null."""
    return dict.fromkeys(names, maybe(kind))


# config.json of a target (transformers) or of a head. Each key may be null, which is as if it was absent.
CONFIG_KEYS = {
    **_all(List(maybe(Text())), "architectures", "layer_types"),
    **_all(Text(), "model_type", "hidden_act", "speculators_model_type", "markov_head_type", "_name_or_path"),
    **_all(IDS, "vocab_size", "draft_vocab_size"),
    **_all(WIDTH, "hidden_size", "intermediate_size", "moe_intermediate_size", "target_hidden_size"),
    **_all(LAYERS, "num_hidden_layers", "num_target_layers"),
    **_all(MANY, "num_attention_heads", "num_key_value_heads", "head_dim"),
    **_all(Number(above=0, high=1), "rms_norm_eps"), **_all(Number(above=1, high=1e15), "rope_theta"),
    **_all(Map(Either(Record(), Text(), Number(), Flag(), Null(), List(Number()))),
           "rope_scaling", "rope_parameters"),
    **_all(Whole(1), "max_position_embeddings"), **_all(LENGTH, "original_max_position_embeddings"),
    **_all(Number(0, 1), "partial_rotary_factor"),
    **_all(Flag(), "tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias",
           "norm_topk_prob", "use_aux_hidden_state", "norm_before_residual", "norm_output", "fc_norm",
           "norm_before_fc", "causal", "causal_head", "sample_from_anchor", "confidence_head_with_markov"),
    **_all(Whole(), "sliding_window", "decoder_sparse_step", "block_size", "mask_token_id", "num_draft_steps",
           "k_train"),
    **_all(Whole(0, 10_000), "num_experts", "num_local_experts", "num_experts_per_tok"),
    **_all(List(Whole()), "mlp_only_layers"),
    "pard_token": TOKEN, "ptd_token_id": TOKEN, "eos_token_id": TOKEN, "bos_token_id": TOKEN,
    "eagle_aux_hidden_state_layer_ids": LAYER_IDS, "target_layer_ids": LAYER_IDS,
    "aux_hidden_state_layer_ids": LAYER_IDS,
}
NESTED = maybe(Record(optional=CONFIG_KEYS))
PUBLISHED = Record(optional=CONFIG_KEYS | dict.fromkeys(
    ("eagle_config", "dflash_config", "transformer_layer_config", "model"), NESTED
))
GENERATION = Record(optional={"eos_token_id": TOKEN, "bos_token_id": TOKEN})
TOKENIZER = Record(optional={
    "added_tokens": maybe(List(Record({"id": Whole(0, IDS.high), **ADDED}, {"special": Flag()}))),
    "model": maybe(Record(optional={"vocab": Either(Map(Whole(0, IDS.high)), List(List(maybe(Either(
        Text(most=1 << 16), Number()))))), })),
})
INDEX = Record({"weight_map": Map(Text(most=255))})
