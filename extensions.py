"""What the core can be extended by: tables from a name to the module, or "module:object", that implements it.

The core imports nothing of it before the name is used. A new entry is a line here and a file there.
"""
from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class Method(NamedTuple):
    """A method of --speculate.

    module: function that builds its drafter from an `engine.drafting.Setup`; "" without one of its own.
    draft: the kind of checkpoint that --draft names; None: it takes neither --draft nor --tree. grows: its
    head grows trees of any size, and takes --draft-window.
    """

    module: str
    what: str
    draft: str | None = None
    grows: bool = False


class MethodFlag(NamedTuple):
    """An option of one method. default: None for a file, which must be given. minimum: of a number."""

    method: str
    default: int | None
    what: str
    minimum: int = 1


METHODS = {
    "none": Method("", "plain decoding"),
    "eagle": Method("drafters.static:build", "EAGLE-1: a head on a static tree", "eagle", True),
    "eagle2": Method("engine.draft:build", "EAGLE-2: the same head on a dynamic tree", "eagle", True),
    "eagle3": Method("engine.draft:build", "EAGLE-3: a head that reads three target layers", "eagle3", True),
    "p-eagle": Method("drafters.block:build", "P-EAGLE: EAGLE-3, all levels in one pass", "p-eagle", True),
    "dflash": Method("drafters.block:build", "DFlash: a head that drafts a block a pass", "dflash", True),
    "dspark": Method("drafters.block:build", "DSpark: the same with a Markov head", "dspark", True),
    "medusa": Method("drafters.medusa:build", "Medusa heads: each predicts one of the next tokens", "medusa"),
    "hydra": Method("drafters.medusa:build", "Hydra heads: each conditioned on the tokens before", "hydra"),
    "mtp": Method("engine.draft:build", "MTP: the layer for it in the target's own checkpoint", "mtp", True),
    "draft-model": Method("drafters.pard:build", "a smaller model with the same vocabulary (SpS)", "target"),
    "lookahead": Method("drafters.lookahead:build", "n-grams that the target predicts while verifying"),
    "lookup": Method("drafters.ngram:build",
                     "what followed the same tokens earlier in the text (prompt lookup)"),
    "suffix": Method("drafters.ngram:build", "the same, also in earlier requests (suffix decoding)"),
    "rest": Method("drafters.ngram:build", "the same, also in a file of tokens (REST)"),
    "auto": Method("drafters.auto", "the best head in the checkpoint's folder, joined with prompt lookup",
                   "auto", True),
}
METHOD_FLAGS = {
    "window": MethodFlag("lookahead", 7, "columns drafted in parallel"),
    "level": MethodFlag("lookahead", 5, "tokens of an n-gram", 3),
    "guess-set": MethodFlag("lookahead", 7, "n-grams tried at a time"),
    "datastore": MethodFlag("rest", None, "file that python -m drafters.ngram made"),
}
# Checks of those flags; "auto"; the heads that plain decoding does not use; two drafters on one tree; static
# trees from a file.
CHECK_METHOD_FLAGS, CHOOSE_DRAFTER, UNUSED_HEADS = (
    "drafters.options:check", "drafters.auto:choose", "drafters.auto:log_unused_heads")
JOIN, TREE_FILES, STATIC_HEAD = (
    "drafters.mixed:Mixed", "drafters.static:read_paths", "drafters.static:StaticHeadDrafter")
# Fields of a target's config.json that a dense LLaMA or Qwen leaves out: the class of target that has them.
# The first field that is set decides, so a family stands above those that share its fields.
TARGETS = {
    **dict.fromkeys(("delta_layers", "shared_expert_size"), "families.hybrid:Hybrid"),
    **dict.fromkeys(("sinks", "biases"), "families.gpt_oss:GptOss"),
    "global_head_dim": "families.gemma4:Gemma4", "conv_layers": "families.short_conv:ShortConv",
    **dict.fromkeys(
        ("output_norms", "scaled_embedding", "query_scalar", "local_rope_base", "zero_centred", "rotary_dim",
         "only_output_norms", "wide_qk_norm", "unrotated_layers", "embedding_factor", "residual_factor",
         "logit_divisor", "logit_cap", "score_cap"), "families.variants:Variant"),
    "num_experts": "families.experts:Mixture",
}
# Of those, what no GPU runs yet.
CPU_ONLY = {"delta_layers": "gated delta nets", "conv_layers": "short convolutions",
            "global_head_dim": "models with two sizes of heads"}
# The network of each kind of draft head; the kind is the name of its folder in the target's.
HEADS = {
    "eagle": "head:Eagle1Head", "eagle3": "head:Eagle3Head",
    "p-eagle": "networks.p_eagle:PEagleHead", "medusa": "drafters.medusa:MedusaHeads",
    "hydra": "drafters.medusa:HydraHeads", "dflash": "networks.block:BlockHead",
    "dspark": "networks.block:DSparkHead", "mtp": "networks.mtp:MtpHead",
}
# Fields of a kind's config that the class in `HEADS` has not: the class that has them.
HEAD_OPTIONS = {
    "eagle3": dict.fromkeys(
        ("feature_norm", "norm_before_residual", "recycle_normed"), "networks.eagle31:Eagle31Head"),
}
# A target's pass without a cache, for training and scoring.
CAUSAL = "families.mixed:causal"
# KV caches of `--kv` for PyTorch's step; kernels have their own.
CACHES, CHECK_KV = {"fp8": "kernels.float8:Float8Caches"}, "kernels.choose:check_kv"
# The step of a device's kernels, the scheduler of drafts, and what quantizes a head when it is loaded.
STEPS, SCHEDULER = "kernels.choose:choose_backend", "schedulers.cost_model:schedule"
QUANTIZE = "kernels.quantized:quantize_at_load"
# The instruction set of CPU kernels, and the folder of compiled code.
ISA, COMPILED = "kernels.isa:choose", "kernels.build:compiled_folder"
# Tensor parallelism: the checks before loading, and what loads one shard of a module.
CHECK_RANKS, RANKS_MEMORY = "kernels.check_ranks:check_ranks", "kernels.check_ranks:shared_memory"
SHARDED, JOIN_RANKS = "checkpoint.sharded:load_shard", "engine.ranks:join_ranks"
# Types of RoPE scaling, beside default and llama3.
ROPE = dict.fromkeys(("linear", "yarn", "divisors"), "families.rope")
# Files of other formats that `checkpoint/source.py` opens, by suffix.
SOURCE_FILES, FILE_KINDS = {".gguf": "checkpoint.gguf:open_file"}, "checkpoint.gguf:kind_of_file"
# What reads a folder whose config has a `quantization_config`.
PUBLISHED = "checkpoint.published:dequantized"
# What keeps the matrices of a target at the precision in which its source stores them.
AS_STORED = "checkpoint.as_stored:as_stored"
# Readers of published heads by kind: (source, kind, target, options) -> ReadHead.
HEAD_READERS = {
    **dict.fromkeys(("eagle", "eagle3", "p-eagle"), "checkpoint.eagle_layouts:read_eagle"),
    **dict.fromkeys(("medusa", "hydra"), "checkpoint.medusa_layouts:read_medusa"),
    **dict.fromkeys(("dflash", "dspark"), "checkpoint.block_layouts:read_block"),
}
# Converts what is named as a checkpoint and is no folder of ours.
CONVERT, HOW_TO_CONVERT = "engine.conversion:converted", "checkpoint.folder:how_to_convert"
# What `checkpoint/convert.py` does not read: other architectures, layouts of heads.
FAMILIES, HEAD_LAYOUTS = "checkpoint.families", "checkpoint.heads"
# Functions of gate and up projections, beside silu.
ACTIVATIONS = {
    "gelu_tanh": "families.activations:gelu_tanh", "clamped_swiglu": "families.activations:clamped_swiglu",
}
# Tokenizer files beside tokenizer.json: the function that reads one.
TOKENIZER_FILES = {
    "tokenizer.model": "tokens.sentencepiece_backend:SentencePieceBackend",
    "vocab.json": "tokens.convert:open_vocab",
}
CHAT_TEMPLATES, STOP_TEXTS = "tokens.templates", "tokens.stops"
# Logits processors; warmup of compiled passes; log-probabilities of a prompt.
PROCESSORS, SCORES_OF = "engine.processors:Processors", "engine.processors:scores_of"
LAUNCH_ALL, PROMPT_SCORES = "engine.warmup:launch_all", "engine.prompt_scores:score_prompt"
# What options of `generate.py` need: --interactive, --trace, JSON or several prompts, .jsonl, --json-schema.
INTERACTIVE, TRACE, OUTPUT = "console.chat", "console.trace", "console.output"
PROMPT_ROWS, JSON_SCHEMA = "tokens.dataset", "tokens.grammar"


def load(entry: str) -> Any:
    """Import the module, or the object in a module, that an entry of a table names."""
    module, _, name = entry.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found
