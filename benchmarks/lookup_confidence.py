"""How often prompt lookup is right, by the length of the match: what `drafters.lookup` says of its matches.

    python benchmarks/lookup_confidence.py --checkpoint DIR --shards WORK/data

The texts are those of train.py runs (prompts with the target's answers). At every place of an answer the best
match before it is looked up, as the drafter does, and what followed it is compared with what follows here.
"""
from __future__ import annotations

import sys
from pathlib import Path

import bench  # noqa: F401  (first: it makes the modules below importable)

from checkpoint.folder import read_config
from checkpoint.loading import identity, load_model
from common.cli import Options, run_command
from drafters.lookup import CHAINS, LONGEST
from engine.runtime import Runtime
from training.corpus import load_shards, shards_in


def follow(ids: list[int], at: int, known: dict[tuple[int, ...], list[int]]) -> list[tuple[int, int]]:
    """(Length of the match, right tokens) of the best matches before place `at`, each going on otherwise.

    known: where each run of up to LONGEST tokens ended before.
    """
    found, begun = [], set()
    for size in range(LONGEST, 1, -1):
        for end in reversed(known.get(tuple(ids[at - size + 1 : at + 1]), [])):
            if ids[end + 1] in begun:
                continue
            begun.add(ids[end + 1])
            length, period = CHAINS[len(found)], at - end
            right = 0
            while right < length and at + 1 + right < len(ids):
                if ids[end + 1 + right % period] != ids[at + 1 + right]:
                    break
                right += 1
            found.append((size, right))
            if len(found) == len(CHAINS):
                return found
    return found


def run(o) -> None:
    """Print by the length of the match how many there were, how often what followed was right."""
    config = read_config(o.checkpoint, "target")
    name = identity(load_model(o.checkpoint, "cpu", Runtime().torch_dtype)[0])
    paths = [path for folder in o.shards for path in shards_in(Path(folder))]
    rows, *_ = load_shards(paths, config["max_seq_len"], config["vocab_size"], name)
    matches, first = [0] * (LONGEST + 1), [0] * (LONGEST + 1)
    tried, further = [0] * (LONGEST + 1), [0] * (LONGEST + 1)
    for row in rows[: o.limit]:
        ids, known = row["ids"], {}
        spans = [range(b - 1, e - 1) for b, e in row["answers"]]
        for at in range(len(ids)):
            if any(at in span for span in spans):
                for place, (size, right) in enumerate(follow(ids, at, known)):
                    matches[size] += 1
                    first[size] += right > 0
                    ended = right < min(CHAINS[place], len(ids) - 1 - at)
                    tried[size] += max(right - 1, 0) + (ended and right > 0)
                    further[size] += max(right - 1, 0)
            for size in range(2, LONGEST + 1):
                if at >= size - 1:
                    known.setdefault(tuple(ids[at - size + 1 : at + 1]), []).append(at)
    print("tokens", "matches", "first", "further", sep="\t")
    for size in range(2, LONGEST + 1):
        shares = first[size] / max(matches[size], 1), further[size] / max(tried[size], 1)
        print(size, f"{matches[size]:,}", *(f"{share:.3f}" for share in shares), sep="\t")


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = Options(__doc__)
    p.add_argument("--checkpoint", required=True, help="converted target")
    add = p.add_argument
    add("--shards", action="append", required=True, metavar="FOLDER", help="WORK/data of a train.py run")
    p.add_argument("--limit", type=int, default=2000, metavar="N", help="conversations (default 2000)")
    o = p.parse_args(argv)
    return run_command(lambda: run(o), OSError)


if __name__ == "__main__":
    sys.exit(main())
