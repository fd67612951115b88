"""Acceptance length of an EAGLE-3 head after long prompts, by its window (--draft-window). Nothing is timed.

    python benchmarks/draft_window.py --checkpoint DIR --questions long_2000.jsonl long_7000.jsonl ...
        [--draft-window 0 256 512 1024 2048] [--tree 12,3,4] [--temperature 0 1]

The text is the target's own whatever drafts. So it is decoded once, and after each step all windows draft on
it: they are compared at the same places of the same texts. The first window's trees are those that are
accepted. tau is over all steps of a set. Raw figures go to benchmarks/results/NAME.json with date, device and
torch version.
"""
from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path

import bench  # first: it makes the modules below importable
import torch
import torch.nn as nn
from bench import describe, write
from torch import Tensor

from checkpoint.loading import load_head, load_model
from common.errors import InputError
from drafters.base import Drafter, Proposal
from drafters.eagle import Eagle
from engine.decoder import Decoder
from engine.run import Run
from engine.text_decoder import encode
from kernels.choose import choose_backend
from networks.head import Head
from sampling.options import Sampling
from tokens.dataset import read_prompts
from tokens.tokenizer import Tokenizer
from tree import Tree, TreeShape


class Windows(Drafter):
    """Drafts as the first of some drafters does, and keeps what each would have drafted."""

    def __init__(self, parts: list[Eagle]):
        super().__init__(parts[0].shape)
        self.parts, self.aux_layers = nn.ModuleList(parts), parts[0].aux_layers
        self.steps: list[tuple[list[int], list[Tree]]] = []  # lengths before each step, the trees

    def allocate(self, *sizes) -> None:
        for part in self.parts:
            part.allocate(*sizes)

    def memory(self, *sizes) -> int:
        return sum(part.memory(*sizes) for part in self.parts)

    def read(self, *chunk) -> None:
        for part in self.parts:
            part.read(*chunk)

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Proposal:
        found = [part.propose(state, slots, noise) for part in self.parts]
        self.steps.append((state.length.tolist(), [proposal.tree for proposal in found]))
        return found[0]


def accepted(tree: Tree, place: int, ahead: list[int]) -> int:
    """How many drafted tokens of a tree of the batch are accepted if these tokens follow its root."""
    tokens, parent, depth = (x[place].tolist() for x in (tree.tokens, tree.parent, tree.depth))
    right = [True]
    for node in range(1, len(tokens)):
        right.append(right[parent[node]] and tokens[node] == ahead[depth[node] - 1])
    return max(d for d, is_right in zip(depth, right) if is_right)


@torch.no_grad()
def acceptance(
    target, head: Head, prompts: list[list[int]], stop_ids, shape: TreeShape, tokens: int, temperature: float,
    windows: list[int],
) -> dict[int, list[int]]:
    """Drafted tokens that are accepted, of each window at every step of all answers.

    Steps whose next tokens are not known as far as a tree is deep do not count.
    """
    drafter = Windows([Eagle(head, shape, reach=window) for window in windows])
    longest = max(map(len, prompts)) + tokens
    decoder = Decoder(
        target, drafter, batch=len(prompts), max_seq_len=longest, stop_ids=stop_ids, compile=False
    )
    run = Run(decoder, prompts, [Sampling(tokens, temperature, seed=i) for i in range(len(prompts))])
    for _ in run:
        pass
    texts = [prompt + ids for prompt, ids in zip(prompts, run.ids)]
    counts: dict[int, list[int]] = {window: [] for window in windows}
    for lengths, trees in drafter.steps:
        for place, (length, text) in enumerate(zip(lengths, texts)):
            ahead = text[length + 1 : length + 1 + shape.window - 1]
            if len(ahead) == shape.window - 1:
                for window, tree in zip(windows, trees):
                    counts[window].append(accepted(tree, place, ahead))
    return counts


def prompts_of(path: str, o, longest: int) -> list[list[int]]:
    """The first turns of a question file as ids. Raises InputError if one and its answer do not fit."""
    tokenizer = Tokenizer.load(o.checkpoint)
    prompts = [encode(tokenizer, prompt) for prompt in read_prompts(path)[: o.limit]]
    if (most := max(map(len, prompts)) + o.max_new_tokens) > longest:
        raise InputError(f"{path}: a question and its answer have {most} tokens, the model takes {longest}")
    return prompts


def run(o) -> None:
    """Decode all questions; print a row for each set and temperature."""
    target, config = load_model(o.checkpoint, "cuda" if torch.cuda.is_available() else "cpu")
    head = load_head(o.draft or Path(o.checkpoint) / "eagle3", target)
    if target.embed.weight.device.type == "cpu":
        choose_backend("cpu").prepare(target, head)
    shape, record = TreeShape.parse(o.tree), describe(o.threads) | {"rows": []}
    record |= {"tree": o.tree, "max_new_tokens": o.max_new_tokens}
    print("set", "tokens", "T", "steps", *(window or "all" for window in o.draft_window), sep="\t")
    for temperature, path in itertools.product(o.temperature, o.questions):
        prompts, name = prompts_of(path, o, target.args.max_seq_len), Path(path).stem
        counts = acceptance(
            target, head, prompts, config["stop_ids"], shape, o.max_new_tokens, temperature, o.draft_window
        )
        if not (steps := len(counts[o.draft_window[0]])):
            raise InputError(f"{path}: all answers are shorter than a tree is deep")
        taus = {window: 1 + statistics.fmean(some) for window, some in counts.items()}
        size = round(statistics.fmean(map(len, prompts)))
        record["rows"].append({
            "set": name, "prompts": len(prompts), "prompt_tokens": size, "temperature": temperature,
            "steps": steps, "tau": taus,
        })
        print(name, size, temperature, steps, *(f"{tau:.3f}" for tau in taus.values()), sep="\t", flush=True)
        write(o.name, record)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "draft-window")
    add = p.add_argument
    add("--checkpoint", required=True)
    add("--draft", metavar="HEAD", help="a converted EAGLE-3 head (default: CHECKPOINT/eagle3)")
    add("--questions", nargs="+", required=True, metavar="FILE", help="whose first turns are long")
    add("--limit", type=int)
    p.within("--limit", 1, float("inf"))
    add("--max-new-tokens", type=int, default=128)
    add("--tree", default="12,3,4", metavar="T,D,K")
    add("--temperature", nargs="+", type=float, default=[0.0], metavar="T")
    add("--draft-window", nargs="+", type=int, default=[0, 256, 512, 1024, 2048], metavar="N",
        help="tokens that the head attends to; 0: all")
    p.refuse(lambda o: min(o.draft_window) < 0,
             lambda o: f"--draft-window {min(o.draft_window)}: must be at least 1 token, or 0 for all")
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
