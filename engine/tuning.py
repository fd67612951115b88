"""`--tree auto`: the tree that decodes fastest with this target, head and device.

A tree of T nodes, depth D and width k emits tau(T, D, k) tokens in verify(T) + catch-up + D * level(k)
seconds. Both are measured: the costs on compiled passes, tau on a short calibration text. One growth of width
k holds every smaller tree of that width (a level does not depend on those after it, pruning only takes the
best T-1), so a single run of decoding gives tau for all trees. The best ratio wins and is kept beside the
head.
"""
from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.folder import WEIGHTS
from checkpoint.loading import identity
from common.files import write_text
from drafters.base import Proposal
from drafters.eagle import Eagle
from engine.compiling import compile_graph, unguarded
from engine.decoder import SPAN, Decoder
from engine.run import Run
from kernels.packed import threads_for
from model import KVCache, Transformer
from networks.head import Head
from sampling.options import Sampling
from tree import PAPER_TREE, Growth, TreeShape, visible_slots

WIDTHS = (2, 3, 4, 6, 8, 10)
NODES = (4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 60, 80)
# What is timed; sizes between are interpolated. Each is compiled with static shapes, as the step is.
VERIFY_ROWS, LEVEL_ROWS = (1, 8, 12, 16, 32, 80), (1, 4, 10)
DEEPEST = 7
PROMPTS = (
    "Explain how rain forms, step by step.",
    "Write a short story about a lighthouse keeper and a lost dog.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 60 miles in 90 minutes. What is its average speed in miles per hour?",
    "Summarize the causes of the French Revolution in three sentences.",
    "Give me five tips for learning a new language.",
    "Translate to French: The weather is nice today and we are going to the park.",
    "What are the differences between a virus and a bacterium?",
)


@dataclass(frozen=True)
class Candidate:
    """A tree with what is expected of it: tokens per step, seconds per step."""

    shape: TreeShape
    tau: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tau / self.seconds


class Recorder(Eagle):
    """Drafts as `Eagle` does and keeps, for every step, all candidates of every width."""

    def __init__(self, head: Head):
        super().__init__(head, TreeShape(60, DEEPEST, 10))
        # Length [B] before each step, growth by width.
        self.steps: list[tuple[Tensor, dict[int, Growth]]] = []

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Proposal:
        last = self._catch_up(state, slots)
        growths = {k: self.grow(last, state, slots, None, TreeShape(2, DEEPEST, k)) for k in WIDTHS}
        self.steps.append((state.length.clone(), growths))
        growths[10].shape = self.shape
        return Proposal(growths[10].prune(state.root()))


@torch.no_grad()
def measure_tau(
    target: Transformer, head: Head, prompts: list[list[int]], stop_ids, tokens: int = 64
) -> dict[TreeShape, float]:
    """Acceptance length of every tree on the target's greedy answers to these prompts.

    The trees are those of WIDTHS, NODES and all depths.
    """
    recorder = Recorder(head)
    longest = max(map(len, prompts)) + tokens + 1
    size = {"batch": len(prompts), "max_seq_len": longest}
    decoder = Decoder(target, recorder, stop_ids=stop_ids, compile=False, **size)
    run = Run(decoder, prompts, Sampling(tokens))
    for _ in run:
        pass
    texts = [p + ids for p, ids in zip(prompts, run.ids)]
    accepted: dict[TreeShape, list[float]] = {}
    for length, growths in recorder.steps:
        # Steps whose true continuation is known to the tree's full depth.
        ahead = [text[n + 1 : n + DEEPEST + 2] for text, n in zip(texts, length.tolist())]
        rows = [b for b, tokens in enumerate(ahead) if len(tokens) == DEEPEST + 1]
        if not rows:
            continue
        truth = torch.tensor([ahead[b] for b in rows])
        for growth in growths.values():
            for shape, count in count_accepted(growth, truth, rows).items():
                accepted.setdefault(shape, []).extend(count.tolist())
    return {shape: 1 + statistics.fmean(counts) for shape, counts in accepted.items()}


def count_accepted(growth: Growth, truth: Tensor, rows: list[int]) -> dict[TreeShape, Tensor]:
    """How many drafted tokens [R] of each tree of this width are accepted.

    rows: R sequences of the batch. truth [R, DEEPEST+1]: the tokens that follow in each.
    """
    k = growth.shape.width
    tokens, scores, parents = (
        torch.cat(x, dim=1)[rows].cpu() for x in (growth.tokens, growth.scores, growth.parents)
    )
    right = torch.zeros_like(tokens, dtype=torch.bool)
    right[:, :k] = tokens[:, :k] == truth[:, :1]
    for level in range(1, DEEPEST + 1):
        at = slice(k + (level - 1) * k * k, k + level * k * k)
        right[:, at] = (tokens[:, at] == truth[:, level, None]) & right.gather(1, parents[:, at])
    counts = {}
    for depth in range(DEEPEST + 1):
        size = k + depth * k * k
        order = scores[:, :size].sort(dim=1, descending=True, stable=True).indices
        hits = right[:, :size].gather(1, order).cumsum(1)  # [R, size] right ones among the best n
        for nodes in NODES:
            if nodes - 1 <= size:
                counts[TreeShape(nodes, depth, k)] = hits[:, nodes - 2].float()
    return counts


class Costs:
    """What the passes of a step cost: the target's over T rows, the head's over k."""

    def __init__(self, target: Transformer, head: Head, compile: bool, live: int = 4 * SPAN):
        self.target, self.head = target, head
        self.device = target.embed.weight.device
        dtype = target.embed.weight.dtype
        self.slots = torch.arange(live, device=self.device)
        room = live - 2 * max(NODES)
        self.length = torch.full((1,), room, device=self.device)
        self.caches = torch.nn.ModuleList(
            KVCache(1, live, target.args, dtype, self.device) for _ in range(target.args.num_layers)
        )
        self.head_caches = head.caches(1, live, dtype, self.device)
        self.verify_pass, self.level_pass = self._verify, self._level
        if compile:
            self.verify_pass, self.level_pass = (
                compile_graph(f, dynamic=False) for f in (self._verify, self._level)
            )
        self.feature = torch.zeros(1, 1, head.args.hidden_size, dtype=dtype, device=self.device)

    def _verify(self, tokens: Tensor, own: Tensor) -> Tensor:
        visible = visible_slots(self.slots, self.length, torch.ones_like(own[..., None] == own[:, None]))
        x, _ = self.target(tokens, own, own, visible, self.caches, self.head.args.aux_layers)
        return self.target.logits(x).argmax(-1)

    def _level(self, tokens: Tensor, own: Tensor, feature: Tensor):
        visible = visible_slots(self.slots, self.length, torch.ones_like(own[..., None] == own[:, None]))
        h = self.head(tokens, feature, own, own, visible, self.head_caches)
        logits = self.head.logits(h)
        return logits.topk(4, dim=-1), logits.logsumexp(-1)

    def _rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """Tokens and slots of so many rows after the committed ones, both [1, rows]."""
        own = self.length[:, None] + torch.arange(rows, device=self.device)
        return torch.zeros_like(own), own

    def measure(self, repeat: int = 15) -> tuple[dict[int, float], dict[int, float]]:
        """Seconds of a pass, by rows: of the target over VERIFY_ROWS, of the head over LEVEL_ROWS.

        The passes take turns, so that a machine that is slow for a while is slow for all; medians.
        """
        calls = {}
        for rows in VERIFY_ROWS:
            calls["verify", rows] = partial(self.verify_pass, *self._rows(rows))
        for rows in LEVEL_ROWS:
            calls["level", rows] = partial(
                self.level_pass, *self._rows(rows), self.feature.expand(-1, rows, -1).contiguous()
            )
        times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
        with torch.no_grad(), threads_for(self.target):
            for call in calls.values():
                for _ in range(3):
                    call()
            with unguarded():  # as the decoder runs its step
                for _ in range(repeat):
                    for key, call in calls.items():
                        self._settle()
                        began = time.perf_counter()
                        call()
                        self._settle()
                        times[key].append(time.perf_counter() - began)
        verify, level = (
            {n: statistics.median(t) for (kind, n), t in times.items() if kind == which}
            for which in ("verify", "level")
        )
        return verify, level

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def between(measured: dict[int, float], rows: int) -> float:
    """The cost at `rows`, linearly between the nearest measured sizes; beyond them that of the last."""
    sizes = sorted(measured)
    rows = min(max(rows, sizes[0]), sizes[-1])
    high = next(n for n in sizes if n >= rows)
    low = max((n for n in sizes if n <= rows), default=high)
    share = 0 if high == low else (rows - low) / (high - low)
    return measured[low] + (measured[high] - measured[low]) * share


def choose(
    taus: dict[TreeShape, float], verify: dict[int, float], level: dict[int, float]
) -> list[Candidate]:
    """All trees, fastest first.

    verify, level: seconds of a pass by rows. The catch-up is a level of W rows.
    """
    def seconds(shape: TreeShape) -> float:
        drafting = between(level, shape.window) + shape.depth * between(level, shape.width)
        return between(verify, shape.nodes) + drafting

    candidates = [Candidate(shape, tau, seconds(shape)) for shape, tau in taus.items()]
    return sorted(candidates, key=lambda c: -c.tokens_per_second)


def fingerprint(target: Transformer, head: Head, compile: bool) -> dict:
    """What a choice depends on beside the head's folder."""
    weight = target.embed.weight
    on_cuda = weight.device.type == "cuda"
    processor = platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name(weight.device) if on_cuda else processor,
        "threads": 0 if on_cuda else torch.get_num_threads(), "dtype": str(weight.dtype), "compile": compile,
        "target": identity(target), "torch": torch.__version__,
        "head": [head.args.hidden_size, head.args.draft_vocab_size, len(head.args.aux_layers)],
    }


def auto_tree(
    target: Transformer, head: Head, prompts: list[list[int]], stop_ids, folder: Path, compile: bool,
    say: Callable[[str], None]
) -> TreeShape:
    """The fastest tree, from FOLDER/tree.json if it was chosen before under the same conditions.

    folder: the head's; if it cannot be written, every start measures. `say` is told what was chosen and why.
    """
    file, made_by = folder / "tree.json", fingerprint(target, head, compile)
    weights = (folder / WEIGHTS).stat().st_mtime
    try:
        record = json.loads(file.read_text())
        if record["made_by"] == made_by and file.stat().st_mtime >= weights:
            shape = TreeShape(**record["tree"])
            say(f"tree {shape.nodes}/{shape.depth}/{shape.width} (chosen before: {file})")
            return shape
    except (OSError, ValueError, KeyError, TypeError):
        pass
    say("choosing a tree: acceptance on a few prompts ...")
    taus = measure_tau(target, head, prompts, stop_ids)
    taus = {shape: tau for shape, tau in taus.items() if shape.width <= head.args.draft_vocab_size}
    say("choosing a tree: cost of passes ...")
    verify, level = Costs(target, head, compile).measure()
    ranked = choose(taus, verify, level)
    best, paper = ranked[0], next((c for c in ranked if c.shape == PAPER_TREE), None)
    shape = best.shape
    passes = between(verify, shape.nodes) * 1e3, verify[1] * 1e3, between(level, shape.width) * 1e3
    say(
        f"tree {shape.nodes}/{shape.depth}/{shape.width}: {best.tau:.2f} tokens in"
        f" {best.seconds * 1e3:.1f} ms expected ({best.tokens_per_second:.0f}/s):"
        f" verify {passes[0]:.1f} ms (one row {passes[1]:.1f}),"
        f" {shape.depth + 1} draft passes of about {passes[2]:.1f} ms"
    )
    if paper:
        say(
            f"the paper's 60/7/10: {paper.tau:.2f} tokens in {paper.seconds * 1e3:.1f} ms"
            f" ({paper.tokens_per_second:.0f}/s)"
        )
    if best.tokens_per_second < 1 / verify[1]:
        say(f"plain decoding is expected to be faster: {1 / verify[1]:.0f}/s")
    record = {
        "made_by": made_by, "tree": asdict(shape), "verify_ms": {n: t * 1e3 for n, t in verify.items()},
        "level_ms": {n: t * 1e3 for n, t in level.items()},
        "ranked": [
            [*asdict(c.shape).values(), round(c.tau, 3), round(c.tokens_per_second, 1)] for c in ranked[:20]
        ],
    }
    try:
        write_text(file, json.dumps(record, indent=1) + "\n")
    except OSError:
        say(f"{file}: cannot be written, so this is measured again next time")
    return shape
