"""Results table: speedup over plain decoding and acceptance length, per question set and temperature."""
from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from evaluation.answers import MEAN, PLAIN, Answer
from evaluation.lossless import Difference

AVERAGED = ("tokens_per_second", "speedup", "speedup_total", "tau")
MAX_NAME_CHARACTERS = 19  # longer names of methods and sets are cut in the table
BAR_COLUMNS = 60  # length of the bar of a 4x speedup, the longest bar
COLUMNS = ["method", "set", "tokens/s", "speedup", "τ", "texts equal", "ties", "errors"]


def summarize(
    answers: Iterable[Answer], sets: list[str], methods: list[str], differences: Sequence[Difference]
) -> list[dict]:
    """Return the rows of the table, one per temperature, method and set.

    The sets of a method are followed by their unweighted mean, the set `mean`. Answers without a plain answer
    are skipped.

    speedup: median over the questions of tokens/s relative to plain decoding, without prefill.
    speedup_total: total tokens/s of the set relative to plain decoding.
    tau: mean tokens per step, without the first token of each turn.
    These are None if no answer has a second token.
    seconds, prefill_seconds: totals of the set.
    equal: number of questions with the output of plain decoding; the others are ties or errors.
    """
    answers = sorted(answers, key=lambda a: a.temperature)
    plain = {(a.set, a.question, a.temperature): a for a in answers if a.method == PLAIN}
    cells: dict[tuple, list[tuple[Answer, Answer]]] = defaultdict(list)
    for a in answers:
        if p := plain.get((a.set, a.question, a.temperature)):
            cells[a.temperature, a.method, a.set].append((a, p))
    rows = []
    for temperature in dict.fromkeys(a.temperature for a in answers):
        for method in methods:
            set_rows = [
                {"temperature": temperature, "method": method, "set": name, **_results(pairs, differences)}
                for name in sets if (pairs := cells.get((temperature, method, name)))
            ]
            if set_rows:
                rows += [*set_rows, _mean(set_rows)]
    return rows


def _results(pairs: list[tuple[Answer, Answer]], differences: Sequence[Difference]) -> dict:
    """Return the results of one set. pairs: (answer of the method, plain answer)."""
    timed = [(a, p) for a, p in pairs if a.tokens and a.seconds > 0 and p.tokens and p.seconds > 0]
    rate = speedup = speedup_total = None
    if timed:
        rate = sum(a.tokens for a, _ in timed) / sum(a.seconds for a, _ in timed)
        speedup = statistics.median((a.tokens / a.seconds) / (p.tokens / p.seconds) for a, p in timed)
        speedup_total = rate / (sum(p.tokens for _, p in timed) / sum(p.seconds for _, p in timed))
    lengths = [n for a, _ in pairs for n in a.lengths]
    keys = {a.key for a, _ in pairs}
    tied = [d.tie for d in differences if (d.set, d.question, d.method, d.temperature) in keys]
    return {
        "questions": len(pairs), "tokens_per_second": rate, "speedup": speedup,
        "speedup_total": speedup_total, "tau": statistics.fmean(lengths) if lengths else None,
        "seconds": sum(a.seconds for a, _ in pairs),
        "prefill_seconds": sum(t.prefill_seconds for a, _ in pairs for t in a.turns),
        "equal": len(pairs) - len(tied), "ties": tied.count(True), "errors": tied.count(False),
    }


def _mean(rows: list[dict]) -> dict:
    """Return the row of the set `mean`: means of AVERAGED over the sets, sums of the other columns."""
    mean = rows[0] | {"set": MEAN}
    for name in list(mean)[3:]:  # after temperature, method, set
        values = [row[name] for row in rows if row[name] is not None]
        mean[name] = (statistics.fmean if name in AVERAGED else sum)(values) if values else None
    return mean


def format_table(rows: list[dict]) -> str:
    """Format a Markdown table per temperature, at most 100 characters wide, and a bar chart."""
    lines = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        group = [row for row in rows if row["temperature"] == temperature]
        if len({row["set"] for row in group}) == 2:  # one set: its mean is redundant
            group = [row for row in group if row["set"] != MEAN]
        table = [COLUMNS, *map(_cells, group)]
        widths = [max(map(len, column)) for column in zip(*table)]
        table.insert(1, ["-" * width for width in widths])
        lines += [f"Temperature {temperature:g}: speedup is the median over questions, without prefill", ""]
        for cells in table:
            aligned = (c.rjust(w) if i > 1 else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths)))
            lines.append("| " + " | ".join(aligned) + " |")
        for row in group:  # a bar for each method's mean, or its only set
            if row["set"] == group[-1]["set"] and row["speedup"]:
                length = min(BAR_COLUMNS, round(BAR_COLUMNS / 4 * row["speedup"]))
                lines.append(f"{_cells(row)[0]:{MAX_NAME_CHARACTERS}} {'#' * length} {row['speedup']:.2f}×")
        lines.append("")
    return "\n".join(lines)


def _cells(row: dict) -> list[str]:
    """Return the cells of a row, in the order of COLUMNS."""
    names = "plain" if row["method"] == PLAIN else row["method"], row["set"]
    values = (row["tokens_per_second"], ""), (row["speedup"], "×"), (row["tau"], "")
    numbers = ["–" if value is None else f"{value:.2f}{unit}" for value, unit in values]
    equal = [f"{row['equal']}/{row['questions']}", str(row["ties"]), str(row["errors"])]
    short = [n if len(n) <= MAX_NAME_CHARACTERS else n[: MAX_NAME_CHARACTERS - 1] + "…" for n in names]
    return [*short, *numbers, *equal]
