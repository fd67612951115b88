"""What is printed about decoded texts: figures for people, JSON for programs."""
from __future__ import annotations

from collections import Counter

from engine.decoder import Decoder
from engine.memory import peak_memory
from engine.text_decoder import Result
from tokens.ids import common_prefix


def as_json(
    result: Result, rule: str = "equal", plain: Result | None = None, ranks: int = 1, offload: int = 0
) -> dict:
    """The object that `--json` prints.

    rule: by which drafts were accepted. plain: the same prompt decoded plainly, to compare with. ranks: how
    many processes the target was dealt among. offload: how many of its layers stayed in the host's memory.
    """
    row = {
        "prompt": result.prompt if result.prompt is not None else result.prompt_ids,
        "text": result.text,
        "output_ids": result.ids,
        "tokens": len(result.ids),
        "seconds": result.seconds,
        "prefill_seconds": result.prefill_seconds,
        "tokens_per_second": result.tokens_per_second,
        "tau": result.tau,
        "accept_lengths": result.accept_lengths,
        "trees": result.trees,
        "seed": result.seed,
        "finish": result.finish,
        "accept": rule,
        "ranks": ranks,
        "offload": offload,
    }
    if result.stop is not None:
        row["stop"] = result.stop
    if result.scores:
        row["logprobs"] = [{"logprob": score.logprob, "top": score.top} for score in result.scores]
    if plain is not None:
        row |= {"plain": as_json(plain, ranks=ranks, offload=offload), "speedup": speedup(result, plain)}
        row["equal"] = result.ids == plain.ids
    return row


def speedup(result: Result, plain: Result) -> float | None:
    """Ratio of tokens per second, None when one of them has no second token to time."""
    fast, slow = result.tokens_per_second, plain.tokens_per_second
    return fast / slow if fast and slow else None


def statistics(results: list[Result], decoder: Decoder) -> str:
    """A few lines about one decoded batch."""
    tokens = sum(len(r.ids) for r in results)
    seconds, prefill = results[0].seconds, results[0].prefill_seconds
    lengths = [n for r in results for n in r.accept_lengths]
    lines = [
        f"{tokens} tokens, {sum(len(r.prompt_ids) for r in results)} of prompt;"
        f" prefill {prefill * 1e3:.0f} ms,"
        f" then {max(tokens - len(results), 0) / seconds if seconds else 0:.1f} tok/s ({seconds:.2f} s);"
        f" {', '.join(sorted({r.finish for r in results}))}"
    ]
    memory = f"peak memory {peak_memory(decoder.device) / 1e9:.2f} GB"
    if not lengths:
        lines.append(f"no step was needed; {memory}")
    else:
        steps = max(len(r.accept_lengths) for r in results)
        rate = decoder.bytes_read() / seconds / 1e9 if seconds else 0.0
        taken = decoder.trees_taken()
        which = f" ({', '.join(f'{n} {name}' for name, n in taken.items())})" if len(taken) > 1 else ""
        lines.append(
            f"{steps} steps{which}, tau {sum(lengths) / len(lengths):.2f} tokens per step;"
            f" {rate:.1f} GB/s of weights read; {memory}"
        )
        if decoder.drafter.shape.nodes > 1:
            counts = Counter(lengths)
            for n in range(1, decoder.window + 1):
                share = counts[n] / len(lengths)
                lines.append(f"  {n:2d} tokens {counts[n]:5d} steps {share:6.1%} {'#' * round(40 * share)}")
    return "\n".join(lines)


def comparison(results: list[Result], plain: list[Result], rule: str) -> str:
    """One line: plain decoding's speed, the speedup over it, and whether the texts are equal."""
    equal = sum(a.ids == b.ids for a, b in zip(results, plain))
    fast, slow = (sum(len(r.ids) - 1 for r in rs) / max(rs[0].seconds, 1e-9) for rs in (results, plain))
    ratio = speedup(results[0], plain[0]) if len(results) == 1 else fast / max(slow, 1e-9)
    verdict = "yes" if equal == len(results) else f"{equal} of {len(results)}; "
    if equal < len(results) and rule != "equal":
        verdict += f"{rule} acceptance draws with other random numbers"
    elif equal < len(results):
        verdict += first_difference(results, plain)
    return f"plain: {slow:.1f} tok/s; speedup {ratio or 0:.2f}x; texts equal: {verdict}"


def first_difference(results: list[Result], plain: list[Result]) -> str:
    """Where the first unequal pair of results parts, and what it means."""
    i, ids = next((i, (a.ids, b.ids)) for i, (a, b) in enumerate(zip(results, plain)) if a.ids != b.ids)
    return (
        f"prompt {i + 1} parts at token {common_prefix(*ids) + 1}: where our kernels do not compute (a GPU,"
        " fp16, fp8, experts, --no-kernels, --no-compile) a pass over many rows rounds differently from a"
        " pass over one, so near ties may fall either way; --dtype fp32 helps"
    )
