"""Engines of tiny models, requests, reference traces, and exact output distributions."""
import math
import random
from pathlib import Path

import torch
from safetensors import safe_open

from engine.draft import HeadDrafter
from engine.drafting import DraftOptions
from engine.engine import Engine
from engine.request import Draft
from engine.sampling import Sampling
from engine.target import Runtime
from families.mixed import causal
from llm import LLM
from tree import TreeShape, depth_and_ancestors


def load(checkpoint, method="none", *, batch=1, max_seq_len=None, say=lambda line: None, **options) -> LLM:
    """Load an `LLM`. options: fields of `Runtime` and `DraftOptions`."""
    runtime = {k: v for k, v in options.items() if k in Runtime.__dataclass_fields__}
    drafting = DraftOptions(method, **{k: v for k, v in options.items() if k not in runtime})
    return LLM(checkpoint, drafting, batch_size=batch, max_seq_len=max_seq_len, log=say, **runtime)


def speculative(models, shape, coupled=True, **options) -> Engine:
    target, head = models
    drafter = HeadDrafter(head, shape, coupled)
    return Engine(target, drafter, **{"max_seq_len": 300, "compile": False, **options})


def plain(models, **options) -> Engine:
    return Engine(models[0], **{"max_seq_len": 300, "compile": False, **options})


def prompts(count: int, seed: int = 0, shortest: int = 1, longest: int = 40) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=g).tolist()
    return [torch.randint(32, 127, (n,), generator=g).tolist() for n in lengths]


def ids(engine: Engine, texts, sampling) -> list[list[int]]:
    return [request.ids for request in engine.generate(texts, sampling)]


def check_texts(found: list, expected: list, made: list[tuple[list[int], Sampling]]) -> None:
    """Fail at the first output that differs, with its request and the first different token. None: cancelled.
    """
    assert len(found) == len(expected) == len(made)
    for number, (ours, want, (prompt, sampling)) in enumerate(zip(found, expected, made)):
        if ours is not None and ours != want:
            at = next((i for i, (a, b) in enumerate(zip(ours, want)) if a != b), min(len(ours), len(want)))
            raise AssertionError(
                f"text {number} of {len(made)} differs from token {at} on: {ours[at : at + 8]}, expected "
                f"{want[at : at + 8]}; a prompt of {len(prompt)} tokens, {sampling}"
            )


OPTIONS = (  # of requests, one of each sort
    {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.9, "min_p": 0.05, "presence_penalty": 0.5},
    {"repetition_penalty": 1.2, "logit_bias": {101: 2}}, {"logprobs": 2},
)


def requests(count: int, seed: int, options=OPTIONS) -> list[tuple[list[int], Sampling]]:
    """Return prompts of 1 to 150 tokens, many with a common prefix, with many sampling options."""
    draw = random.Random(seed)
    beginnings, made = prompts(4, seed=seed, shortest=60, longest=120), []
    for i in range(count):
        prompt = prompts(1, seed=1000 * seed + i, longest=40)[0]
        if draw.random() < 0.6:
            prompt = draw.choice(beginnings)[: draw.randrange(1, 120)] + prompt
        made.append((prompt, Sampling(draw.randrange(8, 40), seed=i, **options[i % len(options)])))
    return made


def alone(models, made, **options) -> list[list[int]]:
    """Return the plain outputs of requests run one after the other."""
    engine = plain(models, **options)
    return [engine.generate([prompt], [sampling])[0].ids for prompt, sampling in made]


def decode(
    engine: Engine, made, draw: random.Random, leaving: float = 0.0, plain: float = 0.0
) -> list[list[int] | None]:
    """Return the outputs of requests that arrive at random; None for one that was cancelled. leaving:
    probability that a request is cancelled at a step. plain: share of requests without speculation.
    """
    waiting, found, here = list(enumerate(made)), [None] * len(made), {}
    while waiting or engine.busy:
        while waiting and engine.free and draw.random() < 0.5:
            i, (prompt, sampling) = waiting.pop(0)
            here[engine.admit(prompt, sampling, plain=draw.random() < plain)] = i
        for event in engine.step():
            if event.finish:
                found[here.pop(event.request)] = event.request.ids
        for request in [*here]:
            if draw.random() < leaving:
                engine.remove(request)
                del here[request]
        assert len(here) == sum(map(bool, engine.slots.requests)) == engine.batch - engine.free
        assert all(engine.slots.requests[request.slot] is request for request in here)
    return found


def watched(
    engine: Engine, prompt: list[int], sampling: Sampling = Sampling()
) -> list[tuple[list[int], Draft]]:
    """Return, for every step of a request, the text before it (its last token is the root) and the tree."""
    known, steps = list(prompt), []
    for event in engine.run([prompt], [sampling], [], watch=True):
        if event.draft:
            steps.append((list(known), event.draft))
        known += event.ids
    return steps


def drafts(engine: Engine, prompt: list[int], sampling: Sampling = Sampling()) -> list[Draft]:
    """Return the tree of every step of one request."""
    return [draft for _, draft in watched(engine, prompt, sampling)]


class Trace:
    """A golden trace: the reference's tree of each step. tokens: how many to decode to see them all."""

    def __init__(self, path: Path):
        with safe_open(path, "pt") as f:
            self.tensors, meta = {k: f.get_tensor(k) for k in f.keys()}, f.metadata()  # noqa: SIM118
        self.shape = TreeShape(int(meta["total_token"]), int(meta["depth"]), int(meta["top_k"]))
        self.prompt, self.output = (self.tensors[k].flatten().tolist() for k in ("prompt", "output_ids"))
        self.tokens = len(self.output) - len(self.prompt) + 9

    def check(self, steps: list[tuple[list[int], list[int], list[int]]]) -> None:
        """Compare (text before a step, tokens and parents of its tree) of all steps, node for node."""
        for n in range(len({k.split(".")[0] for k in self.tensors if "." in k})):
            known, tokens, parent = steps[n]
            wanted = {k[4:]: x for k, x in self.tensors.items() if k.startswith(f"{n:03d}.")}
            depth, ancestors = depth_and_ancestors(torch.tensor([parent]), len(parent))
            assert known == wanted["input_ids"].flatten().tolist()  # with the path accepted before
            assert tokens == wanted["draft_tokens"].flatten().tolist()
            assert torch.equal(ancestors[0], wanted["tree_mask"].bool())
            assert torch.equal(depth[0], wanted["depth"].flatten())
        assert known[: len(self.output)] == self.output


def check_counts(observed: torch.Tensor, expected: torch.Tensor) -> None:
    """One chi-square test at 1e-6; the quantile is the Wilson-Hilferty approximation."""
    freedom = len(expected) - 1
    a = 2 / (9 * freedom)
    limit = freedom * (1 - a + 4.75 * math.sqrt(a)) ** 3
    statistic = float(((observed - expected).double() ** 2 / expected).sum())
    assert freedom > 0 and statistic < limit, (statistic, freedom)


def check_distribution(target, engine: Engine) -> None:
    """Compare the first two tokens over 16 batches of 256 seeds with the target's exact probabilities of all
    frequent pairs.
    """
    n, temperature, V = 4096, 0.8, target.args.vocab_size
    prompt = [token % V for token in prompts(1, seed=5, shortest=20)[0]]
    seeds = [Sampling(3, temperature, seed=seed) for seed in range(n)]
    rows = torch.tensor(ids(engine, [prompt] * n, seeds))

    def probabilities(texts: list[list[int]]) -> torch.Tensor:
        last = causal(target, torch.tensor(texts))[0][:, -1]
        return (target.logits(last).double() / temperature).softmax(-1)

    first = probabilities([prompt])[0]
    common = (first > 100 / n).nonzero()[:, 0]
    p = first[common, None] * probabilities([[*prompt, token] for token in common.tolist()])
    counts = (rows[:, 0] * V + rows[:, 1]).bincount(minlength=V * V).view(V, V)[common]
    kept = p > 20 / n
    counts, p = (torch.cat((x[kept], (whole - x[kept].sum())[None])) for x, whole in ((counts, n), (p, 1)))
    assert len(p) > 6
    check_counts(counts, n * p)
