"""The output of generate.py: text as it comes, figures for people, JSON for programs."""
from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable

from engine.engine import Engine
from engine.memory import peak_memory
from engine.request import Event, Request
from tokens.ids import common_prefix
from tokens.tokenizer import Tokenizer

DRAFTED, RESET = "\033[36m", "\033[0m"


def is_terminal(stream) -> bool:
    """Return whether a person reads or writes this stream; it may be None, closed."""
    return stream is not None and stream.isatty()


def coloured(event: Event, decode: Callable[[list[int]], str]) -> str:
    """Colour the part of an event's text that came from accepted drafts.

    decode: turns token ids into the text that they complete.
    """
    head = decode(event.ids[: event.drafted])
    tail = event.text[len(head) :] if event.text.startswith(head) else ""
    return f"{DRAFTED}{head}{RESET}{tail}" if head and tail + head else event.text


def show(events: Iterable[Event], tokenizer: Tokenizer | None) -> None:
    """Print the text of one request as it comes, drafted tokens coloured on a terminal."""
    colour = is_terminal(sys.stdout)
    drafted = tokenizer.stream() if tokenizer else None  # decodes the drafted part of an event alone
    before = ""
    try:
        for event in events:
            text = event.text
            if tokenizer is None:
                text, before = before + ",".join(map(str, event.ids)), ","
            elif colour:
                text = coloured(event, drafted.push)
                drafted.push(event.ids[event.drafted :])
            print(text, end="", flush=True)
    finally:  # after Ctrl-C too
        print(flush=True)


def as_text(request: Request, tokenizer: Tokenizer | None) -> str:
    """Return the text of a request, or its token ids where there is no tokenizer."""
    return request.text if tokenizer else ",".join(map(str, request.ids))


def as_json(
    request: Request, prompt: str | list[int], rule: str = "equal", plain: Request | None = None,
    ranks: int = 1,
) -> dict:
    """Return the object that `--json` prints.

    rule: of acceptance. plain: the same prompt decoded plainly, to compare with. ranks:
    number of processes that the target was dealt among.
    """
    row = {
        "prompt": prompt,
        "text": request.text,
        "output_ids": request.ids,
        "tokens": len(request.ids),
        "seconds": request.seconds,
        "prefill_seconds": request.prefill_seconds,
        "tokens_per_second": request.tokens_per_second,
        "tau": request.tau,
        "accept_lengths": request.accept_lengths,
        "trees": dict(request.trees.most_common()),
        "seed": request.sampling.seed,
        "finish": request.finish or "interrupted",
        "accept": rule,
        "ranks": ranks,
    }
    if request.stop is not None:
        row["stop"] = request.stop
    if request.scores:
        row["logprobs"] = [{"logprob": score.logprob, "top": score.top} for score in request.scores]
    if plain is not None:
        row |= {"plain": as_json(plain, prompt, ranks=ranks), "speedup": speedup(request, plain)}
        row["equal"] = request.ids == plain.ids
    return row


def speedup(request: Request, plain: Request) -> float | None:
    """Return the ratio of tokens per second, None when one of them has no second token to time."""
    fast, slow = request.tokens_per_second, plain.tokens_per_second
    return fast / slow if fast and slow else None


def together(requests: list[Request]) -> float:
    """Return the seconds from the first token of any of these requests to the last one of all."""
    times = [(r.first, r.last) for r in requests if r.first]
    return max(last for _, last in times) - min(first for first, _ in times) if times else 0.0


def statistics(requests: list[Request], engine: Engine, read: int) -> str:
    """Return a few lines about requests that were decoded together. read: weight bytes that their steps read.
    """
    tokens, seconds = sum(len(r.ids) for r in requests), together(requests)
    lengths = [n for r in requests for n in r.accept_lengths]
    prefill = max(r.prefill_seconds for r in requests)
    lines = [
        f"{tokens} tokens, {sum(len(r.prompt) for r in requests)} of prompt; prefill {prefill * 1e3:.0f} ms,"
        f" then {max(tokens - len(requests), 0) / seconds if seconds else 0:.1f} tok/s ({seconds:.2f} s);"
        f" {', '.join(sorted({r.finish or 'interrupted' for r in requests}))}"
    ]
    memory = f"peak memory {peak_memory(engine.device) / 1e9:.2f} GB"
    if not lengths:
        return f"{lines[0]}\nno step was needed; {memory}"
    trees = sum((r.trees for r in requests), Counter()).most_common()
    which = f" ({', '.join(f'{n} {name}' for name, n in trees)})" if len(trees) > 1 else ""
    lines.append(
        f"{len(lengths)} steps{which}, tau {sum(lengths) / len(lengths):.2f} tokens per step;"
        f" {read / seconds / 1e9 if seconds else 0.0:.1f} GB/s of weights read; {memory}"
    )
    if engine.drafter.shape.nodes > 1:
        counts = Counter(lengths)
        for n in range(1, max(lengths) + 1):
            share = counts[n] / len(lengths)
            lines.append(f"  {n:2d} tokens {counts[n]:5d} steps {share:6.1%} {'#' * round(40 * share)}")
    return "\n".join(lines)


def comparison(requests: list[Request], plain: list[Request], rule: str) -> str:
    """Return one line: plain decoding's speed, the speedup over it, and whether the texts are equal."""
    equal = sum(a.ids == b.ids for a, b in zip(requests, plain))
    fast, slow = (
        sum(max(len(r.ids) - 1, 0) for r in rs) / max(together(rs), 1e-9) for rs in (requests, plain)
    )
    verdict = "yes" if equal == len(requests) else f"{equal} of {len(requests)}; "
    if equal < len(requests) and rule != "equal":
        verdict += f"{rule} acceptance draws with other random numbers"
    elif equal < len(requests):
        verdict += first_difference(requests, plain)
    return f"plain: {slow:.1f} tok/s; speedup {fast / slow if slow else 0:.2f}x; texts equal: {verdict}"


def first_difference(requests: list[Request], plain: list[Request]) -> str:
    """Say where the first unequal pair of texts parts, and what it means."""
    i, ids = next((i, (a.ids, b.ids)) for i, (a, b) in enumerate(zip(requests, plain)) if a.ids != b.ids)
    return (
        f"prompt {i + 1} parts at token {common_prefix(*ids) + 1}: where our kernels do not compute (a GPU,"
        " fp16, fp8, experts, --no-kernels, --no-compile) a pass over many rows rounds differently from a"
        " pass over one, so near ties may fall either way; --dtype fp32 helps"
    )
