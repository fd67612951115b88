"""Decoders over the tiny models, prompts for them, the reference's traces, and the text's exact distribution.
"""
from pathlib import Path

import torch
from safetensors import safe_open

from drafters.eagle import Eagle
from engine.api import Drafting, load_target
from engine.decoder import Decoder
from engine.run import Run
from engine.runtime import Runtime
from helpers.statistics import chi_square, chi_square_limit
from sampling.options import Sampling
from tree import TreeShape


def load(
    checkpoint, method="none", *, compile=True, kernels=True, device=None, dtype=None, batch=1,
    max_seq_len=None, say=None, **drafting
):
    """A `TextDecoder` in one call."""
    target = load_target(checkpoint, Runtime(device, dtype, compile, kernels), say)
    return target.decoder(Drafting(method, **drafting), batch=batch, max_seq_len=max_seq_len)


def speculative(models, shape, coupled=True, **options) -> Decoder:
    target, head = models
    return Decoder(target, Eagle(head, shape, coupled), **{"max_seq_len": 300, "compile": False, **options})


def plain(models, **options) -> Decoder:
    return Decoder(models[0], **{"max_seq_len": 300, "compile": False, **options})


def prompts(count: int, seed: int = 0, shortest: int = 1, longest: int = 40) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=g).tolist()
    return [torch.randint(32, 127, (n,), generator=g).tolist() for n in lengths]


def ids(decoder: Decoder, texts, sampling) -> list[list[int]]:
    return [o.ids for o in decoder.generate(texts, sampling)]


def replay(decoder: Decoder, path: Path) -> None:
    """Decode the trace's prompt and compare every step node for node."""
    with safe_open(path, "pt") as f:
        trace = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
    steps = len({k.split(".")[0] for k in trace if "." in k})
    committed = trace["prompt"].flatten().tolist()
    seen = []
    with decoder.observe(lambda tree, path: seen.append((tree, path))):
        check_steps(decoder, trace, committed, seen, steps)


def check_steps(decoder: Decoder, trace: dict, committed: list[int], seen: list, steps: int) -> None:
    run = Run(decoder, [committed], Sampling(max_new_tokens=200))
    known, emissions = list(committed), iter(run)
    while len(seen) < steps:
        before = list(known)
        known += next(emissions)[0]
        if not seen:
            continue  # prefill
        n = len(seen) - 1
        tree, path = seen[n]
        assert before == trace[f"{n:03d}.input_ids"].flatten().tolist()
        assert torch.equal(tree.tokens[0], trace[f"{n:03d}.draft_tokens"].flatten())
        assert torch.equal(tree.ancestors[0], trace[f"{n:03d}.tree_mask"].bool())
        assert torch.equal(tree.depth[0], trace[f"{n:03d}.depth"].flatten())
        # The accepted path is the one the reference committed, read off its next step or its output.
        after = trace.get(f"{n + 1:03d}.input_ids", trace["output_ids"]).flatten().tolist()
        took = tree.tokens[0, path[0, : len(known) - len(before)]].tolist()
        if len(after) > len(before):
            assert took == after[len(before) - 1 :][: len(took)]
    assert known[: len(trace["output_ids"].flatten())] == trace["output_ids"].flatten().tolist()


def shape_of(path: Path) -> TreeShape:
    with safe_open(path, "pt") as f:
        meta = f.metadata()
    return TreeShape(int(meta["total_token"]), int(meta["depth"]), int(meta["top_k"]))


def check_distribution(
    target, decoder: Decoder, batches: int = 16, tokens: int = 2, temperature: float = 0.8
) -> None:
    """Each of the first tokens after 256 seeds a batch, given those before it, against the target's exact
    probabilities: one chi-square per position over all beginnings that are common enough, each at 1e-6.
    """
    prompt, B = prompts(1, seed=5, shortest=20)[0], 256
    rows = []
    for i in range(batches):
        rows += ids(
            decoder, [prompt] * B,
            [Sampling(tokens + 1, temperature=temperature, seed=i * B + j) for j in range(B)]
        )
    rows = torch.tensor(rows)
    for position in range(tokens):
        begun, inverse = rows[:, :position].unique(dim=0, return_inverse=True) if position else (
            rows[:1, :0], torch.zeros(len(rows))
        )
        freedom, statistic = 0, 0.0
        for i, beginning in enumerate(begun):
            n = int((inverse == i).sum())
            if n < 200:
                continue
            x, _ = target.causal(torch.tensor([[*prompt, *beginning.tolist()]]))
            p = (target.logits(x[0, -1]).double() / temperature).softmax(-1)
            common = p > 20 / n
            if common.any():
                counts = rows[inverse == i, position].bincount(minlength=320)
                statistic += chi_square(counts[common], n * p[common])
                freedom += int(common.sum())
                rest = n * float(p[~common].sum())
                if rest > 20:
                    statistic += (float(counts[~common].sum()) - rest) ** 2 / rest
                    freedom += 1
        assert freedom > 5 and statistic < chi_square_limit(freedom), (position, statistic, freedom)
