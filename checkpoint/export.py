"""Write an EAGLE-3 head of ours as a Hugging Face folder that other programs read.

    python -m checkpoint.export --head checkpoints/mine/eagle3 --checkpoint checkpoints/mine --out DIR

--layout sglang (default)  as the EAGLE repository publishes them, for SGLang and vLLM
--layout speculators       as the speculators library writes them, for vLLM and llama.cpp
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from checkpoint.configs import ACTIVATIONS
from checkpoint.dense import KEYS, NameTable, parts_of
from checkpoint.eagle_layouts import AUX_KEY, FIRST_LAYER, MIDLAYER, eagle3_names
from checkpoint.folder import check_unquantized
from checkpoint.load import CONFIG, WEIGHTS, is_converted, load_head, load_model, read_config
from common.cli import Options, command
from common.errors import InputError
from common.writing import check_replaceable, staging
from extensions import CLASS_FIELDS
from head import Head
from networks.weights import own_state

ARCHITECTURES = {"sglang": "LlamaForCausalLMEagle3", "speculators": "Eagle3Speculator"}  # by layout
Published = tuple[dict, dict[str, Tensor]]  # config.json and tensors for other programs


def publish(head: Head, names: NameTable) -> dict[str, Tensor]:
    """Return a head's own weights under published names. Raises InputError if a weight has none."""
    tensors = {}
    for name, tensor in own_state(head).items():
        if name == "draft_ids":
            continue
        try:
            parts = parts_of(names, head.args, name, tuple(tensor.shape))
        except KeyError:
            raise InputError(f"no layout supports weight {name} of this head") from None
        rows = [shape[0] for shape in parts.values()]
        tensors |= dict(zip(parts, tensor.split(rows)))
    return tensors


def llama_config(head: Head) -> dict:
    """Return the shape of a head's layers under the keys of transformers."""
    a = head.args
    shape = {key: getattr(a, name) for name, (key, _) in KEYS.items()}
    shape["hidden_act"] = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == a.activation)
    if a.windows:
        layer_types = ["sliding_attention" if window else "full_attention" for window in a.windows]
        shape |= {"use_sliding_window": True, "sliding_window": max(a.windows), "layer_types": layer_types}
    if a.draft_window:
        shape["draft_window"] = a.draft_window
    return {"model_type": "llama", **shape, "torch_dtype": "bfloat16"}


def publish_eagle3(head: Head, layout: str, target: dict) -> Published:
    """Return an EAGLE-3 head in a layout; norms before fc and EAGLE-3.1's flags need speculators."""
    a, speculators = head.args, layout == "speculators"
    options = {name: getattr(a, name, "") for name in CLASS_FIELDS["eagle3"]}  # of EAGLE-3.1
    for flag in ("norm_before_residual", "recycle_normed"):
        if options[flag] and not speculators:
            raise InputError(f"{flag} is not supported in the sglang layout; use --layout speculators")
    first, norm = (FIRST_LAYER, options["feature_norm"]) if speculators else (MIDLAYER, "")
    tensors = publish(head, eagle3_names(a.num_layers, norm, len(a.aux_layers), first))
    # Target id = draft id + d2t[draft id]; t2d marks the target ids that are drafted.
    ids = head.draft_ids.cpu()
    marked = torch.zeros(a.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": marked}
    config = {"draft_vocab_size": a.draft_vocab_size, "target_hidden_size": a.target_hidden_size}
    if a.aux_layers[0] != 2:
        # Readers tell outputs from inputs by the first id under AUX_KEY, see `eagle_layouts`. DeepSpec's key
        # always means outputs.
        config["target_layer_ids"] = [i - 1 for i in a.aux_layers]
    if speculators:
        return config | _speculators_config(head, options, target), tensors
    # SGLang's convention: "output of layer id", one less than the layer whose input is captured.
    nested = {AUX_KEY: [i - 1 for i in a.aux_layers], "use_aux_hidden_state": True}
    return {**llama_config(head), **config, "eagle_config": nested}, tensors


def _speculators_config(head: Head, options: dict, target: dict) -> dict:
    """Return the keys of the speculators library. options: of EAGLE-3.1. target: its config.json."""
    a = head.args
    # Targets converted before 2026-11-28 have no architecture key.
    classes = [target["architecture"]] if "architecture" in target else []
    proposal = {
        "proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0, "speculative_tokens": 5,
    }
    return {
        "speculators_model_type": "eagle3", "norm_before_residual": bool(options["norm_before_residual"]),
        "norm_before_fc": options["feature_norm"] == "all", "fc_norm": options["feature_norm"] == "each",
        "norm_output": bool(options["recycle_normed"]), "embed_requires_grad": a.own_embedding,
        AUX_KEY: list(a.aux_layers), "transformer_layer_config": llama_config(head),
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.get("name"), "architectures": classes},
        },
        "torch_dtype": "bfloat16",
    }


def export(head: Head, folder: str | Path, layout: str, target: dict) -> None:
    """Write an EAGLE-3 head as config.json and model.safetensors in bfloat16, without the target's weights.

    Both files are replaced together; other files of the folder stay. target: the target's config.json. Raises
    InputError if the layout cannot hold this head, or if there is no space or no permission.
    """
    config, tensors = publish_eagle3(head, layout, target)
    config = {"architectures": [ARCHITECTURES[layout]], **config}
    for name, t in tensors.items():
        tensors[name] = t.detach().to("cpu", torch.bfloat16 if t.is_floating_point() else None).contiguous()
    with staging(Path(folder), kept=lambda old: True) as staged:
        # save_file would create a file that only its owner can read.
        (staged / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
        (staged / CONFIG).write_text(json.dumps(config, indent=1) + "\n")


def parser() -> Options:
    """Declare the options of the command line."""
    p = Options(__doc__, prog="python -m checkpoint.export")
    add = p.add_argument
    add("--head", required=True, help="converted EAGLE-3 head")
    p.add_checkpoint("converted target of the head")
    add("--layout", choices=("sglang", "speculators"), default="sglang")
    add("--out", required=True)
    add("--force", action="store_true", help="replace the weights of an existing folder")
    p.reject_if(lambda o: (Path(o.out).resolve() / WEIGHTS).exists() and not o.force,
             lambda o: f"{o.out}: holds a {WEIGHTS}; replace it with --force or choose another --out")
    p.add_rule(lambda o: check_replaceable("--out", o.out))
    return p


def run(o) -> None:
    """Do what the options say. Raises InputError and OSError on bad input."""
    if is_converted(o.out):
        raise InputError(f"--out {o.out}: holds a converted checkpoint; choose another folder")
    check_unquantized(o.head, read_config(o.head, "eagle3", "--head"))
    target, target_config = load_model(o.checkpoint)
    export(load_head(o.head, target), o.out, o.layout, target_config)
    print(f"wrote {o.out}")


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, OSError)


if __name__ == "__main__":
    sys.exit(main())
