"""Convert a checkpoint to our folder format (see checkpoint.py), once: a LLaMA target or an EAGLE-3 head.

    python convert_checkpoint.py --checkpoint SOURCE --out DIR         a target
    python convert_checkpoint.py --checkpoint SOURCE --target DIR      a head of the converted target DIR

SOURCE is a Hugging Face folder, a hub repository id (org/name) or a .gguf file. Every tensor is accounted for before
the first byte is written. Then one tensor at a time is read, cast and appended: memory does not grow with the model.
"""
from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint import (
    FORMAT,
    WEIGHTS,
    CheckpointError,
    build,
    check_head_fits,
    check_keys,
    read_config,
)
from model import HeadArgs, ModelArgs, eagle3_aux_layers
from sources import Entry, Source, open_source, resolve_source
from writer import Planned, check_out, write_folder

# One row per family: our tensor -> the source's tensors, stacked along the output dimension in this order.
LLAMA = {
    "embed.weight": ["model.embed_tokens.weight"],
    "layers.{i}.attn_norm.weight": ["model.layers.{i}.input_layernorm.weight"],
    "layers.{i}.wqkv.weight": [f"model.layers.{{i}}.self_attn.{x}_proj.weight" for x in "qkv"],
    "layers.{i}.wo.weight": ["model.layers.{i}.self_attn.o_proj.weight"],
    "layers.{i}.mlp_norm.weight": ["model.layers.{i}.post_attention_layernorm.weight"],
    "layers.{i}.w_gate_up.weight": [f"model.layers.{{i}}.mlp.{x}_proj.weight" for x in ("gate", "up")],
    "layers.{i}.w_down.weight": ["model.layers.{i}.mlp.down_proj.weight"],
    "norm.weight": ["model.norm.weight"],
    "lm_head.weight": ["lm_head.weight"],
}
GGUF_LLAMA = {
    "embed.weight": ["token_embd.weight"],
    "layers.{i}.attn_norm.weight": ["blk.{i}.attn_norm.weight"],
    "layers.{i}.wqkv.weight": [f"blk.{{i}}.attn_{x}.weight" for x in "qkv"],
    "layers.{i}.wo.weight": ["blk.{i}.attn_output.weight"],
    "layers.{i}.mlp_norm.weight": ["blk.{i}.ffn_norm.weight"],
    "layers.{i}.w_gate_up.weight": ["blk.{i}.ffn_gate.weight", "blk.{i}.ffn_up.weight"],
    "layers.{i}.w_down.weight": ["blk.{i}.ffn_down.weight"],
    "norm.weight": ["output_norm.weight"],
    "lm_head.weight": ["output.weight"],
}
TARGETS = {"LlamaForCausalLM": LLAMA, "gguf:llama": GGUF_LLAMA}

EAGLE3 = {  # `midlayer.` is SafeAILab's and SpecForge's name for it, newer SGLang writes `layers.0.`
    "fc.weight": ["fc.weight"],
    "layer.embed_norm.weight": ["midlayer.input_layernorm.weight"],
    "layer.feature_norm.weight": ["midlayer.hidden_norm.weight"],
    "layer.wqkv.weight": [f"midlayer.self_attn.{x}_proj.weight" for x in "qkv"],
    "layer.wo.weight": ["midlayer.self_attn.o_proj.weight"],
    "layer.mlp_norm.weight": ["midlayer.post_attention_layernorm.weight"],
    "layer.w_gate_up.weight": [f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up")],
    "layer.w_down.weight": ["midlayer.mlp.down_proj.weight"],
    "norm.weight": ["norm.weight"],
    "lm_head.weight": ["lm_head.weight"],
    "embed.weight": ["embed_tokens.weight"],
}
# Buffers that old checkpoints carry and that follow from the config.
IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.masked_bias$")

OUTPUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def convert(
    source: str | Path,
    out: str | Path | None = None,
    target: str | Path | None = None,
    dtype: str = "keep",
    aux_layers: tuple[int, ...] | None = None,
    force: bool = False,
    quiet: bool = False,
) -> Path:
    """Convert `source` into the folder `out` and return it. Targets and heads are told apart by their contents.

    out: for a target by default `default_folder(source)`, for a head TARGET/eagle3.
    target: the converted folder of the model a head belongs to; needed for a head, since it is checked to fit.
    dtype: keep, bf16, fp16 or fp32; keep is what most of the source's numbers are stored in, bf16 if quantised.
    aux_layers: for a head, the target layers whose inputs feed it, where its config does not say.
    force: replace `out` if it is one of our folders of the same kind; folders inside it, such as heads, are kept.
    Raises CheckpointError with one line on any bad input or lack of space; nothing is left behind then.
    """
    started = time.perf_counter()
    opened = open_source(resolve_source(source))
    if dtype not in ("keep", *OUTPUT_DTYPES):
        raise CheckpointError(f"dtype {dtype!r} is not one of keep, {', '.join(OUTPUT_DTYPES)}")
    is_head = _is_head(opened)
    if is_head and target is None:
        raise CheckpointError(f"{opened.path}: is a draft head and needs --target DIR, the converted model it is for")
    if is_head:
        out = Path(out or Path(target) / "eagle3")
        config, plan = _plan_head(opened, Path(target), dtype, aux_layers)
    else:
        out = Path(out or default_folder(source))
        config, plan = _plan_target(opened, dtype)
    if out.is_symlink():
        out = out.resolve()  # replace what the link points to, not the link
    config = {"format": FORMAT, "name": _name(source), "source": origin(source), **config}
    check_out(out, config["kind"], force)
    has_tokenizer = write_folder(out, config, plan, None if is_head else opened.tokenizer, quiet)
    if not has_tokenizer:
        print(f"warning: {source} has no tokenizer files; run it with --prompt-ids", file=sys.stderr)
    if not config.get("stop_ids", True):
        print(f"warning: {source} names no end token; texts end at --max-new-tokens only", file=sys.stderr)
    if not quiet:
        params = sum(math.prod(t.shape) for t in plan if t.dtype.is_floating_point)
        size = sum(t.nbytes for t in plan)
        seconds = time.perf_counter() - started
        print(f"wrote {out}: {config['kind']}, {params:,} parameters, {size:,} bytes, {seconds:.1f} s")
    return out


def default_folder(source: str | Path) -> Path:
    """Where a target is written unless --out says otherwise: checkpoints/NAME, in lower case."""
    return Path("checkpoints") / _name(source).lower()


def origin(source: str | Path) -> str:
    """What a converted folder's config says it came from: an absolute path, or the hub id."""
    return str(Path(source).resolve()) if Path(source).exists() else str(source)


def _name(source: str | Path) -> str:
    path = Path(source)
    return path.stem if path.suffix.lower() == ".gguf" else path.name if not path.is_dir() else path.resolve().name


# What a source is, and whether we can run it


def _is_head(source: Source) -> bool:
    """True for an EAGLE-3 head, False for a target. Raises CheckpointError for heads of another kind."""
    config, names = source.config, source.tensors
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        raise CheckpointError(f"{source.path}: heads in the layout of speculators are not supported")
    if "medusa_num_heads" in config or any(n.startswith("medusa_head.") for n in names):
        raise CheckpointError(f"{source.path}: Medusa heads are not supported")
    if config.get("draft_vocab_size") or any(re.match(r"midlayer\.|layers\.0\.hidden_norm\.", n) for n in names):
        return True
    if "fc.weight" in names:
        raise CheckpointError(f"{source.path}: EAGLE-1 heads are not supported")
    return False


def _refuse(path: Path, config: dict, keys: tuple[str, ...]) -> None:
    for key in keys:
        if config.get(key):
            raise CheckpointError(f"{path}: {key} {json.dumps(config[key])[:60]} is not supported")


def _llama_fields(source: Source) -> dict:
    """The fields of ModelArgs from a config of the LLaMA family, with that family's defaults for absent keys."""
    config, path = {k: v for k, v in source.config.items() if v is not None}, source.path
    _refuse(path, config, ("quantization_config", "attention_bias", "mlp_bias"))
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"{path}: hidden_act {config['hidden_act']!r} is not supported (only silu)")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for key in sizes:
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise CheckpointError(f"{path}: config has no positive {key} (found {config.get(key)!r})")
    vocab, hidden, intermediate, layers, heads = (config[key] for key in sizes)
    if "head_dim" not in config and hidden % heads:
        raise CheckpointError(f"{path}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # transformers 5 or 4
    if not isinstance(rope, dict) or any(isinstance(v, dict) for v in rope.values()):
        raise CheckpointError(f"{path}: rope parameters per kind of layer are not supported")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) != 1:
        raise CheckpointError(f"{path}: partial_rotary_factor is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = {k: v for k, v in rope.items() if k not in ("type", "rope_type", "rope_theta", "partial_rotary_factor")}
    longest = config.get("max_position_embeddings", 2048)
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
        raise CheckpointError(f"{path}: config: max_position_embeddings must be a positive integer, got {longest!r}")
    numbers = {
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_base": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
    }
    for key, value in numbers.items():
        if not isinstance(value, (int, float)) or not value > 0:
            raise CheckpointError(f"{path}: config: {key} must be a positive number, got {value!r}")
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim", hidden // heads),
        **numbers,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **scaling},
        "max_seq_len": longest,
    }


# What will be written


def _plan_target(source: Source, dtype: str) -> tuple[dict, list[Planned]]:
    names = TARGETS.get(source.family)
    if names is None:
        known = ", ".join(TARGETS)
        raise CheckpointError(f"{source.path}: unknown architecture {source.family} (known: {known})")
    config = {
        "kind": "target",
        **_llama_fields(source),
        "tie_embeddings": bool(source.config.get("tie_word_embeddings", False)),
        "stop_ids": [i for i in source.stop_ids if i < source.config["vocab_size"]],
        "bos_id": source.bos_id,
    }
    tensors = dict(source.tensors)
    if config["tie_embeddings"] and names["lm_head.weight"][0] in tensors:
        # Some files spell the tied matrix out. transformers 4 ignores the second copy, 5 uses it: only safe if equal.
        copy, embed = tensors.pop(names["lm_head.weight"][0]), tensors.get(names["embed.weight"][0])
        if embed is None or copy.shape != embed.shape or not torch.equal(copy.read(), embed.read()):
            raise CheckpointError(
                f"{source.path}: tie_word_embeddings is true, yet there is an {names['lm_head.weight'][0]} that differs"
                " from the embedding; set it to false in config.json if that tensor is meant"
            )
    return config, _plan(source.path, config, names, tensors, dtype)


def _plan_head(source: Source, target: Path, dtype: str, aux_layers) -> tuple[dict, list[Planned]]:
    path, given, tensors = source.path, source.config, dict(source.tensors)
    nested = given.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"{path}: config: eagle_config is not an object: {nested!r}")
    if not isinstance(given.get("draft_vocab_size") or 0, int):
        raise CheckpointError(f"{path}: config: draft_vocab_size is not a number: {given['draft_vocab_size']!r}")
    for flags in (given, nested):
        _refuse(path, flags, ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"))
    if nested.get("use_aux_hidden_state") is False:
        raise CheckpointError(f"{path}: an EAGLE-3 head with use_aux_hidden_state false is not supported")
    target_config = read_config(target, "target")
    target_args = build(target_config).args
    names = EAGLE3
    if not any(n.startswith("midlayer.") for n in tensors):
        names = {ours: [n.replace("midlayer.", "layers.0.") for n in theirs] for ours, theirs in EAGLE3.items()}
    fields = _llama_fields(source)
    rows = {ours: sum(tensors[theirs[0]].shape[:1]) for ours, theirs in names.items() if theirs[0] in tensors}
    if given.get("head_dim") is None and "layer.wqkv.weight" in rows:
        fields["head_dim"] = rows["layer.wqkv.weight"] // fields["num_heads"]  # H / heads is wrong for some Qwen heads
    config = {
        "kind": "eagle3",
        **fields,
        "draft_vocab_size": given.get("draft_vocab_size") or rows.get("lm_head.weight", fields["vocab_size"]),
        "target_hidden_size": given.get("target_hidden_size") or fields["hidden_size"],
        "aux_layers": list(aux_layers or _aux_layers(path, given, nested, target_args)),
    }
    embed = tensors.get(names["embed.weight"][0])
    config["own_embedding"] = embed is not None and not _same_embedding(embed, target, target_config)
    if embed is not None and not config["own_embedding"]:
        del tensors[names["embed.weight"][0]]
    check_head_fits(config, target_args, str(path))
    maps = {name: tensors.pop(name) for name in ("d2t", "t2d") if name in tensors}
    plan = _plan(path, config, names, tensors, dtype)
    ids = _draft_ids(path, maps, config["draft_vocab_size"], config["vocab_size"])
    entry = Entry(tuple(ids.shape), ids.dtype, lambda: iter((ids,)))
    return config, [Planned("draft_ids", entry.shape, torch.int64, [entry]), *plan]


def _aux_layers(path: Path, given: dict, nested: dict, target: ModelArgs) -> tuple[int, ...]:
    """The target layers whose inputs feed the head.

    Files disagree on whether an id names a layer's output or its input. All of them start with the second layer's
    output, so the first id tells: 1 counts outputs (SGLang, SpecForge), 2 counts inputs (vLLM, speculators).
    """
    key = "eagle_aux_hidden_state_layer_ids"
    ids = nested.get(key) or given.get(key)
    if not ids:
        return eagle3_aux_layers(target.num_layers)
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise CheckpointError(f"{path}: {key} is not a list of layer numbers: {ids!r}")
    if ids[0] in (1, 2):
        return tuple(i + 2 - ids[0] for i in ids)
    inputs, outputs = (",".join(str(i + n) for i in ids) for n in (0, 1))
    raise CheckpointError(
        f"{path}: does {key} {ids} count inputs or outputs of layers?"
        f" say --aux-layers {inputs} if inputs, {outputs} if outputs"
    )


def _same_embedding(embed: Entry, target: Path, config: dict) -> bool:
    """Whether a head's embedding is the target's, bit for bit in the target's dtype."""
    if embed.shape != (config["vocab_size"], config["hidden_size"]):
        return False
    try:
        with safe_open(target / WEIGHTS, framework="pt") as file:
            theirs = file.get_tensor("embed.weight")
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{target / WEIGHTS}: damaged ({e}); convert the target again") from None
    return torch.equal(embed.read().to(theirs.dtype), theirs)


def _draft_ids(path: Path, maps: dict[str, Entry], draft_vocab: int, vocab: int) -> Tensor:
    """Target id of each draft id [Vd] int64, from the offsets `d2t`; `t2d`, the mask of the same ids, must agree."""
    ids = torch.arange(draft_vocab)
    if "d2t" in maps:
        check_keys({"d2t": maps["d2t"].shape}, {"d2t": (draft_vocab,)}, str(path))
        ids = ids + maps["d2t"].read().to(torch.int64)
    elif draft_vocab != vocab:
        raise CheckpointError(f"{path}: tensor d2t is missing, which maps the {draft_vocab} draft ids to {vocab} ids")
    if ids[0] < 0 or ids[-1] >= vocab or bool((ids.diff() <= 0).any()):
        raise CheckpointError(f"{path}: d2t does not give ascending ids of the target's vocabulary 0..{vocab - 1}")
    if "t2d" in maps:
        check_keys({"t2d": maps["t2d"].shape}, {"t2d": (vocab,)}, str(path))
        if not torch.equal(maps["t2d"].read().bool().nonzero()[:, 0], ids):
            raise CheckpointError(f"{path}: t2d and d2t contradict each other")
    return ids


def _plan(path: Path, config: dict, names: dict, tensors: dict[str, Entry], dtype: str) -> list[Planned]:
    """Match every tensor of the model with its sources, both ways. Raises CheckpointError naming the first odd one."""
    try:
        module = build(config)
    except CheckpointError as e:
        raise CheckpointError(f"{path}: {e}") from None
    tensors = {name: entry for name, entry in tensors.items() if not IGNORED.search(name)}
    wanted: dict[str, tuple[int, ...]] = {}
    plan: dict[str, tuple[tuple[int, ...], list[str]]] = {}
    for ours, tensor in module.state_dict().items():
        if ours == "draft_ids":
            continue
        number = re.search(r"(?<=^layers\.)\d+", ours)
        theirs = [n.format(i=number and number[0]) for n in names[re.sub(r"^layers\.\d+", "layers.{i}", ours)]]
        plan[ours] = tuple(tensor.shape), theirs
        for name, rows in zip(theirs, _row_counts(module.args, ours, tensor), strict=True):
            wanted[name] = (rows, *tensor.shape[1:])
    check_keys({name: entry.shape for name, entry in tensors.items()}, wanted, str(path))
    for name, entry in tensors.items():
        if entry.dtype is None or not entry.dtype.is_floating_point:
            raise CheckpointError(f"{path}: tensor {name} is not stored as floating point (a quantised checkpoint?)")
    dtype = OUTPUT_DTYPES[dtype] if dtype in OUTPUT_DTYPES else _prevailing_dtype(tensors)
    return [Planned(ours, shape, dtype, [tensors[n] for n in theirs]) for ours, (shape, theirs) in plan.items()]


def _row_counts(args: ModelArgs | HeadArgs, name: str, tensor: Tensor) -> tuple[int, ...]:
    """How the rows of one of our tensors divide among its sources."""
    if name.endswith("wqkv.weight"):
        return args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim, args.num_kv_heads * args.head_dim
    if name.endswith("w_gate_up.weight"):
        return args.intermediate_size, args.intermediate_size
    return (tensor.shape[0],)


def _prevailing_dtype(tensors: dict[str, Entry]) -> torch.dtype:
    """What most numbers are stored in. A model computes in one type, and the config's may not be the file's."""
    counts: dict[torch.dtype, int] = {}
    for entry in tensors.values():
        counts[entry.dtype] = counts.get(entry.dtype, 0) + math.prod(entry.shape)
    dtype = max(counts, key=counts.get)
    return torch.float32 if dtype == torch.float64 else dtype


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, 1 on bad input, 130 when interrupted (argparse exits with 2)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, metavar="SOURCE", help="a folder, org/name on the hub, or .gguf")
    parser.add_argument("--out", metavar="DIR", help="default: checkpoints/NAME, for a head TARGET/eagle3")
    parser.add_argument("--target", metavar="DIR", help="for a head: the converted target it belongs to")
    parser.add_argument("--dtype", choices=("keep", *OUTPUT_DTYPES), default="keep", help="default: as stored")
    parser.add_argument("--aux-layers", metavar="I,J,K", help="for a head: the target layers whose inputs feed it")
    parser.add_argument("--force", action="store_true", help="replace a converted folder; heads inside it are kept")
    args = parser.parse_args(argv)
    if args.aux_layers is not None and not re.fullmatch(r"\d+(,\d+)*", args.aux_layers):
        parser.error(f"--aux-layers takes layer numbers such as 2,15,27, got {args.aux_layers!r}")
    aux_layers = tuple(int(i) for i in args.aux_layers.split(",")) if args.aux_layers else None
    try:
        convert(args.checkpoint, args.out, args.target, args.dtype, aux_layers, args.force)
    except CheckpointError as e:
        print("error:", " ".join(str(e).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    except Exception as e:  # a checkpoint can be malformed in more ways than anyone can list
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        print(f"error: {args.checkpoint}: malformed in a way this program does not know ({reason})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
