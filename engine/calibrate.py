"""Measuring what the trees of a head are accepted for.

One growth of width k holds every smaller tree of that width (a level does not depend on those after it,
pruning only takes the best T-1), so a single run of decoding gives tau for all trees.
"""
from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from checkpoint.calibration import LONG, SHORT, TEMPERATURES, Calibration, Confidence, Far
from common.errors import InputError, counted
from drafters.base import Drafter, Proposal
from drafters.network import HeadDrafter
from engine.engine import Engine
from engine.request import Request
from model import Transformer
from sampling.noise import seed_keys
from sampling.options import Sampling
from tree import Growth, TreeShape

PROMPTS = (  # where a head has no calibration.json
    "Explain how rain forms, step by step.",
    "Write a short story about a lighthouse keeper and a lost dog.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 60 miles in 90 minutes. What is its average speed in miles per hour?",
    "Summarize the causes of the French Revolution in three sentences.",
    "Give me five tips for learning a new language.",
    "Translate to French: The weather is nice today and we are going to the park.",
    "What are the differences between a virus and a bacterium?",
)

WIDTHS = (1, 2, 3, 4, 6, 8, 10)
NODES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 60, 80)
DEEPEST = 7
USUAL = TreeShape(8, 2, 4)  # measures the ease of texts
NEGLIGIBLE = -7.0  # score of a node that no tree would take
FAR_TEXTS = 8  # that are decoded after a long text too: one takes as long to read as dozens of short prompts


class Recorder(Drafter):
    """Drafts trees of width 2 as `drafter` does and keeps, for every step, all candidates of these widths."""

    def __init__(self, drafter: HeadDrafter, widths: tuple[int, ...] = WIDTHS):
        self.depth = DEEPEST if drafter.deepest is None else min(DEEPEST, drafter.deepest)
        candidates = 2 + 4 * self.depth
        shape = TreeShape(min(8, candidates + 1), self.depth, 2)
        super().__init__(shape, drafter.with_tree(shape))
        self.aux_layers = drafter.aux_layers
        self.widths = [k for k in widths if k <= drafter.head.args.draft_vocab_size]
        # Keys of the noise [B, 2], which tell requests apart, length [B] before each step, growth by width.
        self.steps: list[tuple[Tensor, Tensor, dict[int, Growth]]] = []

    @property
    def extra_slots(self) -> int:
        widest = (self.parts[0].with_tree(TreeShape(2, self.depth, k)) for k in self.widths)
        return max(one.extra_slots for one in widest)

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Proposal:
        (drafter,) = self.parts
        last, noise = drafter.catch_up(state, slots), drafter.draft_noise(noise)
        shapes = (TreeShape(2, self.depth, k) for k in self.widths)
        growths = {shape.width: drafter.grow(last, state, slots, noise, shape) for shape in shapes}
        self.steps.append((state.key.clone(), state.length.clone(), growths))
        growths[2].shape = self.shape
        return Proposal(state.backend.prune(growths[2], state.root()))


@torch.no_grad()
def calibrate(
    target: Transformer, drafter: HeadDrafter, prompts: list[list[int]], stop_ids, tokens: int = 64,
    say: Callable[[str], None] = lambda line: None, far: bool = True,
) -> Calibration:
    """Measure the calibration of a drafter's head, on the target's own answers to prompts (lists of ids).

    tokens: of each answer. The trees are those of WIDTHS, NODES and all depths. far: measure after long texts
    too, which takes longer. Raises InputError if the answers are too short to tell anything.
    """
    taus, ease, kept, believed = {}, (), {}, []
    context = min(LONG, target.args.max_seq_len - tokens - 1)
    for temperature in TEMPERATURES:
        texts = counted(len(prompts), "text")
        say(f"acceptance of the head's trees on {texts}, temperature {temperature:g} ...")
        answers = record_answers(target, Recorder(drafter), prompts, stop_ids, tokens, temperature)
        by_text = [answer.accepted for answer in answers if answer.accepted]
        if not by_text:
            raise InputError(f"all answers end within {DEEPEST + 2} tokens, too short to measure trees on:"
                             " give --tree T,D,K, or other questions to evaluate.py --calibrate")
        taus[temperature] = _taus(by_text)
        believed.append(fit_confidence([scored for answer in answers for scored in answer.scored]))
        if not ease:
            mean = max(taus[temperature][USUAL] - 1, 1e-6)
            ease = tuple(sorted(statistics.fmean(text[USUAL]) / mean for text in by_text))
        if far and context > 2 * SHORT:
            say(f"the same after {context} tokens ...")
            few = min(tokens, 64)
            kept[temperature] = _kept(target, drafter, answers, stop_ids, few, temperature, context)
    return Calibration(taus, ease, Far(context, kept) if kept else None, Confidence(*believed))


@dataclass(frozen=True)
class Recorded:
    """request: the decoded one. accepted: of each tree, how many drafted tokens in every step.

    scored: of every step's candidates of the usual width the scores [n], and whether they were right.
    """

    request: Request
    accepted: dict[TreeShape, list[float]] = field(default_factory=lambda: defaultdict(list))
    scored: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def _taus(texts: list[dict[TreeShape, list[float]]]) -> dict[TreeShape, float]:
    """tau of each tree over the steps of all texts."""
    return {shape: 1 + statistics.fmean(n for text in texts for n in text[shape]) for shape in texts[0]}


def _kept(
    target: Transformer, drafter: HeadDrafter, near: list[Recorded], stop_ids, tokens: int,
    temperature: float, context: int,
) -> float:
    """Accepted drafts after `context` tokens of other answers, over those without them.

    Measured with the tree USUAL, on the answers to the same prompts.
    """
    near = [answer for answer in near if answer.accepted][:FAR_TEXTS]
    prompts = []
    for i, answer in enumerate(near):
        before: list[int] = []
        for other in itertools.cycle(near[i + 1 :] + near[: i + 1]):
            if len(before) + len(other.request.tokens) + len(answer.request.prompt) > context:
                break
            before += other.request.tokens
        prompts.append(before + answer.request.prompt)
    recorder = Recorder(drafter, (2, USUAL.width))
    far = [
        answer.accepted
        for prompt in prompts  # one at a time: their caches are large
        for answer in record_answers(target, recorder, [prompt], stop_ids, tokens, temperature)
        if answer.accepted
    ]
    if not far:
        return 1.0
    gained = _taus([answer.accepted for answer in near])[USUAL] - 1
    return max((_taus(far)[USUAL] - 1) / max(gained, 1e-6), 0.1)


def record_answers(
    target: Transformer, recorder: Recorder, prompts: list[list[int]], stop_ids, tokens: int,
    temperature: float
) -> list[Recorded]:
    """Decode answers of at most `tokens` tokens, and count what of the recorder's trees is accepted."""
    answers = []
    for first in range(0, len(prompts), 8):
        some = prompts[first : first + 8]
        recorder.steps = []
        longest = max(map(len, some)) + tokens + 1
        engine = Engine(
            target, recorder, batch=len(some), max_seq_len=longest, stop_ids=stop_ids, compile=False
        )
        samplings = [Sampling(tokens, temperature, seed=first + i) for i in range(len(some))]
        keys = seed_keys([sampling.seed for sampling in samplings], "cpu").tolist()
        of_key = {tuple(k): Recorded(r) for k, r in zip(keys, engine.generate(some, samplings))}
        answers += of_key.values()
        for keys, length, growths in recorder.steps:
            rows = {}  # whose true continuation is known to the tree's full depth
            for row, (key, n) in enumerate(zip(keys.tolist(), length.tolist())):
                if answer := of_key.get(tuple(key)):
                    ahead = answer.request.tokens[n + 1 : n + recorder.depth + 2]
                    if len(ahead) > recorder.depth:
                        rows[row] = answer, ahead
            if not rows:
                continue
            truth = torch.tensor([ahead for _, ahead in rows.values()])
            for growth in growths.values():
                if growth.shape.width == USUAL.width:
                    for (answer, _), *each in zip(rows.values(), *_rights(growth, truth, [*rows])):
                        answer.scored.append(tuple(each))
                for shape, counts in count_accepted(growth, truth, [*rows]).items():
                    for (answer, _), count in zip(rows.values(), counts.tolist()):
                        answer.accepted[shape].append(count)
    return answers


def count_accepted(growth: Growth, truth: Tensor, rows: list[int]) -> dict[TreeShape, Tensor]:
    """Count the accepted tokens [R] of each tree of this width.

    rows: R sequences of the batch. truth [R, levels]: the tokens that follow in each.
    """
    (scores, right), k, deepest = _rights(growth, truth, rows), growth.shape.width, truth.shape[1] - 1
    counts = {}
    for depth in range(deepest + 1):
        size = k + depth * k * k
        order = scores[:, :size].sort(dim=1, descending=True, stable=True).indices
        hits = right[:, :size].gather(1, order).cumsum(1)  # [R, size] right ones among the best n
        for nodes in NODES:
            if nodes - 1 <= size:
                counts[TreeShape(nodes, depth, k)] = hits[:, nodes - 2].float()
    return counts


def _rights(growth: Growth, truth: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Return the scores of all candidates [R, n], and whether they and all above them are the text's.

    rows, truth: as for `count_accepted`.
    """
    k = growth.shape.width
    tokens, scores, parents = (
        torch.cat(x, dim=1)[rows].cpu() for x in (growth.tokens, growth.scores, growth.parents)
    )
    right = torch.zeros_like(tokens, dtype=torch.bool)
    right[:, :k] = tokens[:, :k] == truth[:, :1]
    for level in range(1, truth.shape[1]):
        at = slice(k + (level - 1) * k * k, k + level * k * k)
        right[:, at] = (tokens[:, at] == truth[:, level, None]) & right.gather(1, parents[:, at])
    return scores, right


def fit_confidence(scored: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """(slope, shift) of `checkpoint.calibration.Confidence`: those under which what was right is likeliest.

    scored: scores of nodes and whether they were right. The nodes that no tree would take are left out. By
    Fisher's scoring.
    """
    scores, right = (torch.cat(x) for x in zip(*scored))
    some = scores > NEGLIGIBLE
    scores, right = scores[some].double(), right[some].double()
    inputs, found = torch.stack((scores, torch.ones_like(scores)), 1), torch.tensor([1.0, 0.0]).double()
    ridge = 1e-3 * torch.eye(2, dtype=torch.float64)
    for _ in range(30):
        p = (inputs @ found).clamp(-30, -1e-3).exp()
        weight = p / (1 - p)  # of exp(x) as a probability: the inverse of its variance, per p squared
        slope = inputs.T @ (weight * (right - p) / p)
        change = torch.linalg.solve(inputs.T @ (weight[:, None] * inputs) + ridge, slope)
        found = found + change.clamp(-0.5, 0.5)
        found[0] = found[0].clamp(0.05, 20)
    return float(found[0]), float(found[1])
