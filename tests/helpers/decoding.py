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
from tokens.tokenizer import common_prefix
from tree import TreeShape, depth_and_ancestors


def load(checkpoint, method="none", *, batch=1, max_seq_len=None, log=lambda line: None, **options) -> LLM:
    """Load an `LLM`. options: fields of `Runtime` and `DraftOptions`."""
    runtime = {k: v for k, v in options.items() if k in Runtime.__dataclass_fields__}
    drafting = DraftOptions(method, **{k: v for k, v in options.items() if k not in runtime})
    return LLM(checkpoint, drafting, batch_size=batch, max_seq_len=max_seq_len, log=log, **runtime)


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


def check_outputs(outputs: list, expected: list, jobs: list[tuple[list[int], Sampling]]) -> None:
    """Fail at the first output that differs from the expected one, with its request and token.

    jobs: (prompt, sampling) of each. An output of None, of a cancelled request, is skipped.
    """
    assert len(outputs) == len(expected) == len(jobs)
    for number, (a, b, (prompt, sampling)) in enumerate(zip(outputs, expected, jobs)):
        if a is not None and a != b:
            n = common_prefix(a, b)
            raise AssertionError(
                f"output {number} of {len(jobs)} differs from token {n} on: {a[n : n + 8]}, expected"
                f" {b[n : n + 8]}; a prompt of {len(prompt)} tokens, {sampling}"
            )


OPTIONS = (  # sampling options of requests
    {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.9, "min_p": 0.05, "presence_penalty": 0.5},
    {"repetition_penalty": 1.2, "logit_bias": {101: 2}}, {"logprobs": 2},
)


def requests(count: int, seed: int, options=OPTIONS) -> list[tuple[list[int], Sampling]]:
    """Return prompts of 1 to 150 tokens, many with a common prefix, with many sampling options."""
    rng = random.Random(seed)
    prefixes, jobs = prompts(4, seed=seed, shortest=60, longest=120), []
    for i in range(count):
        prompt = prompts(1, seed=1000 * seed + i, longest=40)[0]
        if rng.random() < 0.6:
            prompt = rng.choice(prefixes)[: rng.randrange(1, 120)] + prompt
        jobs.append((prompt, Sampling(rng.randrange(8, 40), seed=i, **options[i % len(options)])))
    return jobs


def alone(models, jobs, **options) -> list[list[int]]:
    """Return the outputs of plain decoding, one request at a time."""
    engine = plain(models, **options)
    return [engine.generate([prompt], [sampling])[0].ids for prompt, sampling in jobs]


def decode(
    engine: Engine, jobs, rng: random.Random, cancelled: float = 0.0, plain: float = 0.0
) -> list[list[int] | None]:
    """Return the outputs of requests that arrive at random times; None for cancelled ones.

    cancelled: probability that a request is cancelled at a step. plain: fraction of `plain` requests.
    """
    waiting, outputs, running = list(enumerate(jobs)), [None] * len(jobs), {}
    while waiting or engine.busy:
        while waiting and engine.free and rng.random() < 0.5:
            i, (prompt, sampling) = waiting.pop(0)
            running[engine.admit(prompt, sampling, plain=rng.random() < plain)] = i
        for event in engine.step():
            if event.finish:
                outputs[running.pop(event.request)] = event.request.ids
        for request in [*running]:
            if rng.random() < cancelled:
                engine.remove(request)
                del running[request]
        assert len(running) == sum(map(bool, engine.slots.requests)) == engine.batch - engine.free
        assert all(engine.slots.requests[request.slot] is request for request in running)
    return outputs


def draft_steps(
    engine: Engine, prompt: list[int], sampling: Sampling = Sampling()
) -> list[tuple[list[int], Draft]]:
    """Return (tokens up to the root, tree) for every step of a request."""
    tokens, steps = list(prompt), []
    for event in engine.run([prompt], [sampling], [], watch=True):
        if event.draft:
            steps.append((list(tokens), event.draft))
        tokens += event.ids
    return steps


def drafts(engine: Engine, prompt: list[int], sampling: Sampling = Sampling()) -> list[Draft]:
    """Return the tree of every step of one request."""
    return [draft for _, draft in draft_steps(engine, prompt, sampling)]


class Trace:
    """A golden trace: the reference's tree of each step. tokens: number of tokens that cover all steps."""

    def __init__(self, path: Path):
        with safe_open(path, "pt") as f:
            self.tensors, meta = {k: f.get_tensor(k) for k in f.keys()}, f.metadata()  # noqa: SIM118
        self.shape = TreeShape(int(meta["total_token"]), int(meta["depth"]), int(meta["top_k"]))
        self.prompt, self.output = (self.tensors[k].flatten().tolist() for k in ("prompt", "output_ids"))
        self.tokens = len(self.output) - len(self.prompt) + 9

    def check(self, steps: list[tuple[list[int], list[int], list[int]]]) -> None:
        """Compare (tokens up to the root, tokens and parents of the tree) of all steps, node for node."""
        for n in range(len({k.split(".")[0] for k in self.tensors if "." in k})):
            context, tokens, parent = steps[n]
            expected = {k[4:]: x for k, x in self.tensors.items() if k.startswith(f"{n:03d}.")}
            depth, ancestors = depth_and_ancestors(torch.tensor([parent]), len(parent))
            assert context == expected["input_ids"].flatten().tolist()  # ends with the accepted path
            assert tokens == expected["draft_tokens"].flatten().tolist()
            assert torch.equal(ancestors[0], expected["tree_mask"].bool())
            assert torch.equal(depth[0], expected["depth"].flatten())
        assert context[: len(self.output)] == self.output


def check_counts(observed: torch.Tensor, expected: torch.Tensor) -> None:
    """Run a chi-square test at 1e-6. The quantile is the Wilson-Hilferty approximation."""
    degrees = len(expected) - 1  # of freedom
    a = 2 / (9 * degrees)
    limit = degrees * (1 - a + 4.75 * math.sqrt(a)) ** 3
    statistic = float(((observed - expected).double() ** 2 / expected).sum())
    assert degrees > 0 and statistic < limit, (statistic, degrees)


def check_distribution(target, engine: Engine) -> None:
    """Compare counts of the first two tokens, over 4096 seeds, with the target's probabilities of frequent
    pairs.
    """
    n, temperature, V = 4096, 0.8, target.args.vocab_size
    prompt = [token % V for token in prompts(1, seed=5, shortest=20)[0]]
    seeds = [Sampling(3, temperature, seed=seed) for seed in range(n)]
    rows = torch.tensor(ids(engine, [prompt] * n, seeds))

    def probabilities(contexts: list[list[int]]) -> torch.Tensor:
        last = causal(target, torch.tensor(contexts))[0][:, -1]
        return (target.logits(last).double() / temperature).softmax(-1)

    first = probabilities([prompt])[0]
    frequent = (first > 100 / n).nonzero()[:, 0]
    p = first[frequent, None] * probabilities([[*prompt, token] for token in frequent.tolist()])
    counts = (rows[:, 0] * V + rows[:, 1]).bincount(minlength=V * V).view(V, V)[frequent]
    pairs = p > 20 / n  # all others are counted together
    counts, p = (torch.cat((x[pairs], (total - x[pairs].sum())[None])) for x, total in ((counts, n), (p, 1)))
    assert len(p) > 6
    check_counts(counts, n * p)
