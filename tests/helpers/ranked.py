"""Outputs that are compared between one process and several ranks: families, drafters, precisions, options.

torchrun starts this file with a folder and an output file. All ranks decode together and must agree; rank 0
writes the file. Outputs are short: every layer of every pass has two all-reduces.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from checkpoint.load import load_head, load_model
from drafters.draft_model import DraftModel
from engine.draft import Drafter, HeadDrafter
from engine.engine import Engine
from engine.sampling import Sampling
from families.mixed import causal
from head import Head
from helpers.drafters import make_drafter
from kernels.choose import choose_backend
from kernels.kv_dtypes import Float8Caches
from kernels.tp import Ranks, process_group
from model import Transformer
from tree import TreeShape

TREE, TOKENS, FAMILY_TOKENS = TreeShape(8, 2, 3), 12, 8  # output tokens
PROMPTS = [[7, 21, 90], [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]]
# Drafters that differ in what they read from the target.
DRAFTERS = (
    "plain", "eagle3", "eagle1", "dspark", "hydra++", "draft-model", "lookahead", "lookup+eagle3",
    "eagle3 window",
)
TWO_RANKS_ONLY = "Qwen3.5", "Qwen3-Next", "drafters", "modes"
# Sampling options that need more of the logits than the argmax.
MODES = {
    "greedy": {},
    "top-k and top-p": {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "seed": 1},
    "min-p": {"temperature": 1.1, "min_p": 0.05, "seed": 2},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2, "seed": 3},
    "a bias": {"logit_bias": ((101, 3.0), (97, -100.0))},
    "log-probabilities": {"logprobs": 3},
}


def outputs(
    target: Transformer, drafter: Drafter | None, modes: Iterable[dict] = ({},), tokens: int = TOKENS
) -> list[list[int]]:
    """Return the outputs for all prompts with each sampling mode, decoded in one batch."""
    samplings = [Sampling(tokens, **mode) for mode in modes for _ in PROMPTS]
    engine = Engine(target, drafter, batch=len(samplings), max_seq_len=80, compile=False)
    return [request.ids for request in engine.generate(PROMPTS * (len(samplings) // 2), samplings)]


GREEDY_AND_SAMPLED = {}, {"temperature": 1.0, "seed": 9}


def family_outputs(folder: Path, ranks: Ranks | None) -> dict[str, list]:
    """Return outputs of a target and the heads in its folder: plain, and speculative, greedy and sampled.

    With an MTP layer all heads are sharded, and the kernels are used.
    """
    has_mtp = (folder / "mtp").is_dir()
    target, _ = load_model(folder, ranks=ranks and replace(ranks, heads=has_mtp))
    results = {}
    with torch.no_grad():  # as evaluate.py rescores outputs
        results["rescored"] = target.logits(causal(target, torch.tensor(PROMPTS[1:]))[0]).argmax(-1).tolist()
    if has_mtp:
        assert choose_backend("cpu").prepare(target)
    # With inputs rounded to 8 bits, sampled outputs soon differ, at a position that depends on the processor.
    with_min_p = (ranks is None or ranks.count == 2) and folder.name != "w4a8"
    modes = ({}, MODES["min-p"]) if with_min_p else ({},)
    results["plain"] = outputs(target, None, modes, FAMILY_TOKENS)
    for kind in ("eagle3", "mtp"):
        if (folder / kind).is_dir():
            drafter = HeadDrafter(load_head(folder / kind, target, kind), TREE)
            if has_mtp:
                target.backend.prepare(drafter.head)
            results[kind] = outputs(target, drafter, GREEDY_AND_SAMPLED, FAMILY_TOKENS)
    return results


def tie_again(drafter: Drafter, whole: Transformer, target: Transformer) -> Drafter:
    """Replace the weights that a drafter's heads share with `whole` by weights of `target`."""
    for head in [module for module in drafter.modules() if isinstance(module, Head)]:
        for name in ("embed", "lm_head"):
            if getattr(head, name) in (whole.embed, whole.lm_head):
                setattr(head, name, None)
        head.use_target(target)
    return drafter


def drafter_outputs(folder: Path, ranks: Ranks | None) -> dict[str, list]:
    """Return outputs of the golden target with every drafter, greedy and at temperature 1."""
    whole, (target, _), results = load_model(folder)[0], load_model(folder, ranks=ranks), {}
    for name in DRAFTERS:
        heads = (load_head(folder / kind, whole, kind) for kind in ("eagle3", "eagle"))
        drafter = make_drafter(name, whole, *heads, lambda module: None)
        results[name] = outputs(target, tie_again(drafter, whole, target), GREEDY_AND_SAMPLED)
    return results


def mode_outputs(folder: Path, ranks: Ranks | None) -> dict[str, list]:
    """Return speculative outputs of requests that need more of the logits than the argmax, with caches in the
    model's dtype and in float8.
    """
    target, _ = load_model(folder, ranks=ranks)
    drafter = HeadDrafter(load_head(folder / "eagle3", target, "eagle3"), TREE)
    results = {"modes": outputs(target, drafter, MODES.values())}
    target.Caches = Float8Caches
    return results | {"caches in float8": outputs(target, drafter, MODES.values())}


def sharded_head_outputs(folder: Path, ranks: Ranks | None) -> dict[str, list]:
    """Return speculative outputs with sharded heads, and with the target as a sharded draft model."""
    target, draft = (load_model(folder, ranks=ranks and replace(ranks, heads=True))[0] for _ in range(2))
    kinds = "eagle3", "eagle"
    drafters = {kind: HeadDrafter(load_head(folder / kind, target, kind), TREE) for kind in kinds}
    for drafter in drafters.values():
        assert drafter.head.args.num_heads == 4 // (ranks.count if ranks else 1)
    drafters["draft-model"] = DraftModel(draft, TREE)
    return {name: outputs(target, drafter, GREEDY_AND_SAMPLED) for name, drafter in drafters.items()}


def everything(folder: Path, ranks: Ranks | None = None) -> dict[str, dict[str, list]]:
    """Return all outputs for the checkpoints in a folder; see `tests/engine/test_ranks.py: folder`.

    With more than two ranks, TWO_RANKS_ONLY are skipped: drafters and sampling options read gathered features
    and logits, which the outputs of the families cover too; DeltaNet layers with two key heads cannot be
    sharded over more than two ranks.
    """
    golden, at_most_two = folder / "golden", ranks is None or ranks.count == 2
    results = {
        path.name: family_outputs(path, ranks) for path in sorted(folder.iterdir())
        if path != golden and (at_most_two or path.name not in TWO_RANKS_ONLY)
    }
    results["heads"] = sharded_head_outputs(golden, ranks)
    if at_most_two:
        results |= {"drafters": drafter_outputs(golden, ranks), "modes": mode_outputs(golden, ranks)}
    return results


def main(folder: Path, out: Path) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    with process_group("cpu") as ranks:
        results = json.dumps(everything(folder, ranks))
        ranks.check_equal(results, "cpu")
        if ranks.rank == 0:
            out.write_text(results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
