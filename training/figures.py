"""Figures of the training text: what is in it, and which tokens a head should be able to draft."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

COVERAGE = (2048, 4096, 8192, 16384, 32768)  # sizes of draft vocabularies in the report
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # bounds of the rows' lengths in the report


def counts_of(rows: list[dict]) -> Counter:
    """How often each token occurs in the answers."""
    return Counter(t for r in rows for b, e in r["answers"] for t in r["ids"][b:e])


def draft_vocabulary(counts: Counter, size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The `size` most frequent answer tokens, ascending, and the share of answer tokens that they cover."""
    ranked = [t for t, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][:size]
    # With little text the rest are the lowest unused ids, which are the tokenizer's commonest merges.
    if len(ranked) < size:
        used = set(ranked)
        ranked += [t for t in range(vocab_size) if t not in used][: size - len(ranked)]
    return torch.tensor(sorted(ranked)), covered(counts, ranked)


def unused(rows: list[dict], vocabulary: int) -> int:
    """An id of the vocabulary that the text does not hold, or holds least often: the last of these."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for row in rows:
        counts += torch.bincount(torch.tensor(row["ids"]), minlength=vocabulary)
    return int((counts == counts.min()).nonzero()[-1])


def covered(counts: Counter, ids: Iterable[int]) -> float:
    """The share of the answer tokens that are among these ids."""
    return sum(counts[t] for t in ids) / max(1, counts.total())


def describe(rows: list[dict], vocab_size: int) -> dict:
    """Count rows, tokens, answers and lengths of the text, and what draft vocabularies would cover of it."""
    lengths, counts = [len(r["ids"]) for r in rows], counts_of(rows)
    spans = [(f"{low + 1}-{high}", low, high) for low, high in zip((0, *LENGTHS), LENGTHS)]
    spans.append((f"over {LENGTHS[-1]}", LENGTHS[-1], max(lengths)))
    histogram = {name: sum(low < n <= high for n in lengths) for name, low, high in spans}
    coverage = {n: draft_vocabulary(counts, n, vocab_size)[1] for n in COVERAGE if n < vocab_size}
    return {
        "rows": len(rows), "by_source": dict(Counter(r["source"] for r in rows)),
        "answers": sum(len(r["answers"]) for r in rows),
        "several_answers": sum(len(r["answers"]) > 1 for r in rows), "tokens": sum(lengths),
        "answer_tokens": counts.total(), "longest": max(lengths),
        "lengths": {name: n for name, n in histogram.items() if n},
        "distinct_answer_tokens": len(counts), "coverage": coverage,
    }


def report(d: dict) -> str:
    """`describe` for people."""
    sources = ", ".join(f"{name} {n:,}" for name, n in d["by_source"].items())
    coverage = ", ".join(f"{size:,}: {share:.2%}" for size, share in d["coverage"].items())
    return "\n".join([
        f"{d['rows']:,} conversations ({sources}), {d['several_answers']:,} with several answers",
        f"{d['tokens']:,} tokens, {d['answer_tokens']:,} of them in {d['answers']:,} answers;"
        f" the longest row has {d['longest']:,}",
        "lengths  " + ", ".join(f"{span}: {n:,}" for span, n in d["lengths"].items()),
        f"{d['distinct_answer_tokens']:,} distinct answer tokens"
        + (f"; a draft vocabulary covers {coverage}" if coverage else ""),
    ])
