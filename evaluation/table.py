"""The papers' table: speedup over plain decoding and acceptance length, per question set and temperature."""
from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from evaluation.answers import PLAIN, Answer
from evaluation.lossless import Difference, bound_to_be_plain
from evaluation.sets import MEAN

MEANS = ("tokens_per_second", "speedup", "speedup_total", "tau")
LONGEST_NAME = 20  # characters of a method's or a set's name on the screen


def summarise(
    answers: Iterable[Answer], sets: list[str], methods: list[str], differences: Sequence[Difference]
) -> list[dict]:
    """Return the rows of the table, one per temperature, method and set.

    The set `mean` follows the sets of a method: all of them weigh alike in it. Answers without a plain one
    are left out.

    `speedup`: median over the questions of (tokens per second / those of plain decoding), both after the
    first token, so without the prompt's pass. `speedup_total`: of the complete set. `tau`: tokens per step of
    the complete set, without each answer's first token. All three are None if no answer has a second token.
    `seconds`, `prefill_seconds`: of the complete set; see `answers.Turn` for prompts that are known in part.
    `equal`: number of the `questions` with the text of plain decoding; `ties` and `errors` count the others.
    All three are None if texts need not be equal.
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
            of_sets = [
                {"temperature": temperature, "method": method, "set": name, **_figures(pairs, differences)}
                for name in sets if (pairs := cells.get((temperature, method, name)))
            ]
            if of_sets:
                rows += [*of_sets, _mean(of_sets)]
    return rows


def _figures(pairs: list[tuple[Answer, Answer]], differences: Sequence[Difference]) -> dict:
    """Return the figures of one set. pairs: the answers of one method, each with the plain one."""
    timed = [(a, p) for a, p in pairs if a.tokens and a.seconds > 0 and p.tokens and p.seconds > 0]
    rate = speedup = speedup_total = None
    if timed:
        rate = sum(a.tokens for a, _ in timed) / sum(a.seconds for a, _ in timed)
        speedup = statistics.median((a.tokens / a.seconds) / (p.tokens / p.seconds) for a, p in timed)
        speedup_total = rate / (sum(p.tokens for _, p in timed) / sum(p.seconds for _, p in timed))
    lengths = [n for a, _ in pairs for n in a.lengths]
    equal = ties = errors = None
    if bound_to_be_plain(pairs[0][0].method, pairs[0][0].temperature):
        keys = {a.key for a, _ in pairs}
        tied = [d.tie for d in differences if (d.set, d.question, d.method, d.temperature) in keys]
        equal, ties, errors = len(pairs) - len(tied), tied.count(True), tied.count(False)
    return {
        "questions": len(pairs), "tokens_per_second": rate, "speedup": speedup,
        "speedup_total": speedup_total, "tau": statistics.fmean(lengths) if lengths else None,
        "seconds": sum(a.seconds for a, _ in pairs),
        "prefill_seconds": sum(t.prefill_seconds for a, _ in pairs for t in a.turns),
        "equal": equal, "ties": ties, "errors": errors,
    }


def _mean(rows: list[dict]) -> dict:
    """Return the row of the mean set: means of speeds and tau over the sets, sums of all that is counted."""
    row = rows[0] | {"set": MEAN}
    for name in list(row)[3:]:  # after temperature, method, set
        known = [other[name] for other in rows if other[name] is not None]
        row[name] = (statistics.fmean if name in MEANS else sum)(known) if known else None
    return row


def by_temperature(
    rows: list[dict], sets: list[str]
) -> list[tuple[float, list[str], dict[str, dict[str, dict]]]]:
    """Return (temperature, the sets it has rows of, its rows by method and set) for each temperature."""
    tables: dict[float, dict[str, dict[str, dict]]] = {}
    for row in rows:
        tables.setdefault(row["temperature"], {}).setdefault(row["method"], {})[row["set"]] = row
    present = {(row["temperature"], row["set"]) for row in rows}
    return [(t, [n for n in (*sets, MEAN) if (t, n) in present], methods) for t, methods in tables.items()]


def markdown(rows: list[dict], sets: list[str]) -> str:
    """Write one table per temperature: a line per method, speedup and tau of each set and their mean."""
    lines = []
    for temperature, shown_sets, methods in by_temperature(rows, sets):
        title = "speedup over plain decoding (median over the questions, prompts apart), τ"
        heads = ["method", *(f"{name} | τ" for name in shown_sets), "texts equal", "ties", "errors"]
        lines += [f"Temperature {temperature:g}: {title}", "", _line(heads)]
        lines.append("|---" * (2 * len(shown_sets) + 4) + "|")
        for method, by_set in methods.items():
            cells = [_name(method)]
            for name in shown_sets:
                row = by_set.get(name, {})
                cells += [_number(row.get("speedup"), "×"), _number(row.get("tau"))]
            lines.append(_line(cells + _equality(by_set[MEAN])))
        lines.append("")
    return "\n".join(lines)


def for_screen(rows: list[dict], sets: list[str]) -> str:
    """Write the same in columns, at most 100 characters wide: a line per method and set, with its speed."""
    heads = ["method", "set", "tokens/s", "speedup", "τ", "texts equal", "ties", "errors"]
    lines = []
    for temperature, shown_sets, methods in by_temperature(rows, sets):
        table = [heads]
        for method, by_set in methods.items():
            shown = shown_sets[:1] if len(shown_sets) == 2 else shown_sets  # one set is its own mean
            for row in (by_set[name] for name in shown if name in by_set):
                names = _name(method), row["set"]
                short = [n if len(n) <= LONGEST_NAME else n[: LONGEST_NAME - 1] + "…" for n in names]
                numbers = _number(row["tokens_per_second"]), _number(row["speedup"], "×"), _number(row["tau"])
                table.append([*short, *numbers, *_equality(row)])
        widths = [max(map(len, column)) for column in zip(*table)]
        lines.append(f"Temperature {temperature:g}: speedup is the median over the questions, prompts apart")
        for cells in table:
            aligned = (c.rjust(w) if i > 1 else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths)))
            lines.append("  ".join(aligned).rstrip())
        lines.append("")
    return "\n".join(lines)


def _equality(row: dict) -> list[str]:
    if row["equal"] is None:
        return ["other draws", "", ""]
    return [f"{row['equal']}/{row['questions']}", str(row["ties"]), str(row["errors"])]


def _name(method: str) -> str:
    return "plain" if method == PLAIN else method


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:.2f}{unit}"
