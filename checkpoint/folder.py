"""Our checkpoint folder: what is in it, and how its config is read.

    DIR/config.json         format, kind ("target" or one of HEAD_KINDS), the fields of ModelArgs or HeadArgs;
                            `name`, `source`, `sha256` of the weights, for a target also `stop_ids` (all of
                            them) and `bos_id` (or null)
    DIR/model.safetensors   the state dict of `Transformer` or of a head, q/k/v and gate/up fused
                            (with `quantization` in the config, its linear layers are `QuantizedLinear`)
    DIR/tokenizer.*         tokenizer.json or tokenizer.model, tokenizer_config.json, chat_template.jinja
    DIR/KIND/               heads of that target in the same format, a folder for each of HEAD_KINDS; EAGLE-1
                            and EAGLE-2 share one; also
                            calibration.json (`engine.calibration`) and costs.json (`engine.costs`)
"""
from __future__ import annotations

from pathlib import Path

from checkpoint.names import ADVICE, CONFIG, HEAD_KINDS, check_kind, glance
from common.errors import InputError
from common.schema import (
    ABSENT,
    List,
    Map,
    Number,
    Record,
    Sha256,
    Text,
    Whole,
    Wrong,
    maybe,
    record_of,
)
from kernels.quantized import Scheme
from model import ModelArgs
from networks.block import BlockHead, DSparkHead
from networks.eagle import Eagle1Head, Eagle3Head, PEagleHead
from networks.hydra import HydraHeads
from networks.medusa import MedusaHeads

# What every config.json of ours has beside the fields of `ModelArgs` or `HeadArgs`.
FOLDER = Record(
    {"kind": Text("target", *HEAD_KINDS)},
    {
        "format": Whole(1, 1000), "name": Text(), "source": Text(), "sha256": Sha256(),
        "stop_ids": List(Whole()), "bos_id": maybe(Whole()), "quantization": record_of(Scheme),
    },
)
_BY_TEMPERATURE = {"0": Map(Number(1, 1e6)), "1": Map(Number(1, 1e6))}
MEASURED = Record(  # calibration.json, see `engine.calibration`
    {"format": Whole(), "ease": List(Number(0, 1e6), 1), "tau": Record(_BY_TEMPERATURE)},
    {
        "far": Record({"context": Whole(1), "kept": Record(dict.fromkeys("01", Number(above=0, high=1e6)))}),
        "confidence": Record(dict.fromkeys(("of_greedy", "of_sampling"), List(Number(-100, 100), 2, 2))),
    },
)
CLASSES = Eagle1Head, Eagle3Head, PEagleHead, MedusaHeads, HydraHeads, BlockHead, DSparkHead
HEADS = dict(zip(HEAD_KINDS, CLASSES, strict=True))


def read_config(folder: str | Path, kind: str | None = None) -> dict:
    """The parsed config.json of one of our folders.

    Raises InputError if the folder is not ours, not of this kind (if a kind is asked for), or if a key is
    missing, out of its range, or contradicts another.
    """
    folder, config = Path(folder), glance(folder)
    try:
        check_config(config)
        if config["kind"] == "target" and "stop_ids" not in config:
            raise Wrong("stop_ids", ABSENT, FOLDER.optional["stop_ids"].words)
    except Wrong as e:
        raise InputError(f"{folder / CONFIG}: {e}; {ADVICE}") from None
    check_kind(folder, config, kind)
    return config


def check_config(config: dict) -> ModelArgs:
    """What a config.json says of its model. Raises Wrong on the first key that is not right."""
    FOLDER.check(config)
    kind = config["kind"]
    args = (ModelArgs if kind == "target" else HEADS[kind].Args).from_config(config)
    ids = [(f"stop_ids[{i}]", token) for i, token in enumerate(config.get("stop_ids", ()))]
    for key, token in [*ids, ("bos_id", config.get("bos_id") or 0)]:
        if token >= args.vocab_size:
            raise Wrong(key, token, f"an id below vocab_size, {args.vocab_size}")
    if "quantization" in config:
        Scheme.read(config["quantization"])
    return args
