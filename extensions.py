"""Registry of everything outside the core: names to "module" or "module:object".

A module is imported when it is first used (`load`). To add one, write it and add an entry here.
"""
from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class Method(NamedTuple):
    """A method of --speculate.

    module: function that builds the drafter from an `engine.drafting.DrafterSetup`; "" for plain decoding;
    unused for "auto". what: text for --help.
    draft: kind of the checkpoint that --draft names; None: the method takes neither --draft nor --tree.
    resizable: it drafts trees of any size and takes --draft-window.
    """

    module: str
    what: str
    draft: str | None = None
    resizable: bool = False


class MethodFlag(NamedTuple):
    """An option of one method. default: None for a required file. minimum: of an integer option."""

    method: str
    default: int | None
    what: str
    minimum: int = 1


METHODS = {
    "none": Method("", "plain decoding"),
    "eagle": Method("drafters.static:build", "EAGLE-1 head, static tree", "eagle", True),
    "eagle2": Method("engine.draft:build", "EAGLE-1 head, dynamic tree (EAGLE-2)", "eagle", True),
    "eagle3": Method("engine.draft:build", "EAGLE-3 head, dynamic tree", "eagle3", True),
    "p-eagle": Method("drafters.block:build", "P-EAGLE head: all levels in one pass", "p-eagle", True),
    "dflash": Method("drafters.block:build", "DFlash head: drafts a block in one pass", "dflash", True),
    "dspark": Method("drafters.block:build", "DSpark head: DFlash with a Markov head", "dspark", True),
    "medusa": Method("drafters.medusa:build", "Medusa heads, static tree", "medusa"),
    "hydra": Method("drafters.medusa:build", "Hydra heads: Medusa, sequentially dependent", "hydra"),
    "mtp": Method("drafters.assistant:build", "multi-token prediction layer of the target's checkpoint,"
                  " or Gemma 4 assistant", "mtp", True),
    "draft-model": Method("drafters.pard:build", "smaller model, same vocabulary (SpS, PARD)", "target"),
    "lookahead": Method("drafters.lookahead:build", "lookahead decoding"),
    "lookup": Method("drafters.ngram:build", "prompt lookup: n-gram matches in the context"),
    "suffix": Method("drafters.ngram:build", "suffix decoding: also matches in earlier requests"),
    "rest": Method("drafters.ngram:build", "REST: also matches in a datastore"),
    "auto": Method("drafters.auto", "prompt lookup with the best head in the target's folder, or else with a"
                   " smaller model next to it", "auto", True),
}
METHOD_FLAGS = {
    "window": MethodFlag("lookahead", 7, "W of the paper, branches drafted in parallel"),
    "level": MethodFlag("lookahead", 5, "N of the paper, n-gram size", 3),
    "guess-set": MethodFlag("lookahead", 7, "G of the paper, n-grams verified per step"),
    "datastore": MethodFlag("rest", None, "datastore written by python -m drafters.ngram"),
}
CHECK_METHOD_FLAGS = "drafters.options:check"
CHOOSE_DRAFTER = "drafters.auto:choose"  # resolves --speculate auto
UNUSED_HEADS = "drafters.auto:log_unused_heads"  # for plain decoding
JOIN = "drafters.mixed:Mixed"  # two drafters on one tree
TREE_FILES = "drafters.static:read_paths"  # reads --tree FILE
STATIC_HEAD = "drafters.static:StaticHeadDrafter"
# Target classes by the config field that selects them. The first field that is set wins, so order matters.
TARGETS = {
    "feature_size": "networks.pard2:Pard2",  # a draft model
    "latent_rank": "families.latent:Latent", "mamba": "families.mamba:Mamba",
    **dict.fromkeys(("delta_layers", "shared_expert_size"), "families.hybrid:Hybrid"),
    "sinks": "families.gpt_oss:GptOss", "biases": "families.gpt_oss:GptOss",
    "global_head_dim": "families.gemma4:Gemma4", "conv_layers": "families.short_conv:ShortConv",
    **dict.fromkeys(
        ("output_norms", "scaled_embedding", "query_scalar", "local_rope_base", "zero_centred", "rotary_dim",
         "only_output_norms", "wide_qk_norm", "unrotated_layers", "embedding_factor", "residual_factor",
         "logit_divisor", "logit_cap", "score_cap"), "families.variants:Variant"),
    "num_experts": "families.experts:Mixture",
}
# Draft head classes by kind. The kind is also the name of the head's folder in the target's folder.
HEADS = {
    "eagle": "head:Eagle1Head", "eagle3": "head:Eagle3Head",
    "p-eagle": "networks.p_eagle:PEagleHead", "medusa": "drafters.medusa:MedusaHeads",
    "hydra": "drafters.medusa:HydraHeads", "dflash": "networks.block:BlockHead",
    "dspark": "networks.block:DSparkHead", "mtp": "networks.mtp:MtpHead",
}
# By kind: config fields that select another class than `HEADS`.
CLASS_FIELDS = {
    "target": TARGETS,
    "eagle3": {"global_head_dim": "networks.gemma4_heads:Gemma4Eagle3Head", **dict.fromkeys(
        ("feature_norm", "norm_before_residual", "recycle_normed"), "networks.eagle31:Eagle31Head")},
    "dspark": {"global_head_dim": "networks.gemma4_heads:Gemma4DSparkHead"},
    "mtp": {"global_head_dim": "networks.assistant:AssistantHead",
            "latent_rank": "networks.mtp:LatentMtpHead"},
    "dflash": {"selector_rank": "networks.dflash2:DFlash2Head"},
}
CHECK_KV = "kernels.kv_dtypes:check_kv"
ON_BACKEND = "kernels.choose:on_backend"  # puts a target on the `Backend` of its device
SCHEDULER = "schedulers.cost_model:schedule"
QUANTIZE = "kernels.quantized:quantize_at_load"  # quantizes a 16-bit head
ISA = "kernels.isa:choose"
# Tensor parallelism.
CHECK_RANKS = "kernels.check_ranks:check_ranks"  # before loading
RANKS_MEMORY = "kernels.check_ranks:shared_memory"  # free memory: minimum over ranks
SHARDED = "checkpoint.sharded:load_shard"
JOIN_RANKS = "engine.ranks:join_ranks"
# Types of RoPE scaling besides default and llama3.
ROPE = dict.fromkeys(("linear", "yarn", "divisors"), "families.rope")
CONVERT = "engine.conversion:convert_if_needed"  # converts other formats before loading
HOW_TO_CONVERT = "checkpoint.folder:how_to_convert"  # text for errors
# Functions of gate and up projections, in addition to silu.
ACTIVATIONS = {
    "gelu_tanh": "families.activations:gelu_tanh", "clamped_swiglu": "families.activations:clamped_swiglu",
}
# Tokenizer files besides tokenizer.json: the function that reads one.
TOKENIZER_FILES = {
    "tokenizer.model": "tokens.sentencepiece_backend:SentencePieceBackend",
    "vocab.json": "tokens.convert:open_vocab",
}
STOP_TEXTS = "tokens.stops"
MASKED_CHAT = "tokens.masking:MaskedChat"  # chats that may spell control tokens
GRAMMARS = "tokens.grammar:Grammars"
PROCESSORS = "engine.processors:Processors"  # logits processors
SCORES_OF_SLOT = "engine.processors:scores_of"
ANNOUNCED = "common.progress:announced"  # prints a line if something takes long
LAUNCH_ALL = "engine.warmup:launch_all"  # warmup of all passes
# torch.compile and CUDA.
COMPILE_PASSES, CONFIGURE_COMPILER = "engine.graphs:compile_passes", "engine.graphs:configure"
PASS_BYTES, COPY_TO_HOST = "engine.graphs:pass_bytes", "engine.graphs:copy_to_host"
PROMPT_SCORES = "engine.prompt_scores:score_prompt"  # log-probabilities of a prompt


def load(entry: str) -> Any:
    """Import and return the module or object that a registry entry names."""
    module, _, name = entry.partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, name) if name else imported
