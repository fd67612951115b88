"""The papers' table: speedup over plain decoding and acceptance length, per question set and temperature."""
from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable

from evaluation.answers import Answer
from evaluation.lossless import Difference
from evaluation.settings import PLAIN
from sampling.options import RULES


def label(method: str, rule: str) -> str:
    """The name of a method that accepts by this rule of `sampling.options.RULES`."""
    return method if rule == "equal" else f"{method}+{rule}"


def bound_to_be_plain(method: str, temperature: float) -> bool:
    """Whether the texts of a method with this label must be those of plain decoding."""
    others = tuple(label("", rule) for rule in RULES if rule != "equal")
    return temperature == 0 or not method.endswith(others)


def summarise(
    answers: Iterable[Answer], sets: list[str], methods: list[str], differences: list[Difference]
) -> list[dict]:
    """The rows of the table, one per temperature, method and set.

    After the sets of a method stands a row of the set `mean`: the mean over them, each counting as much as
    the others.

    `speedup`: median over the questions of (tokens per second / those of plain decoding), both after the
    first token, so without the prompt's pass. `speedup_total`: of the complete set. `tau`: tokens per step of
    the complete set, without each answer's first token. All three are None if no answer has a second token.
    `seconds`, `prefill_seconds`: of the complete set. `equal`: how many of the `questions` have the text of
    plain decoding; `ties` and `errors`: what the others are. All three are None if texts need not be equal.
    """
    by_key = {a.key: a for a in answers}
    rows = []
    for temperature in sorted({a.temperature for a in by_key.values()}):
        for method in methods:
            set_rows = []
            for name in sets:
                pairs = [
                    (a, by_key.get((name, a.question, PLAIN, temperature))) for a in by_key.values()
                    if (a.set, a.method, a.temperature) == (name, method, temperature)
                ]
                pairs = [(a, plain) for a, plain in pairs if plain is not None]
                if pairs:
                    row = {"temperature": temperature, "method": method, "set": name}
                    set_rows.append(row | _summary(pairs, differences))
            if set_rows:
                mean = {"temperature": temperature, "method": method, "set": "mean", **_mean(set_rows)}
                rows += [*set_rows, mean]
    return rows


def _summary(pairs: list[tuple[Answer, Answer]], differences: list[Difference]) -> dict:
    """The figures of one set. pairs: the answers of one method, each with the plain one."""
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
        ties_among = [d.tie for d in differences if (d.set, d.question, d.method, d.temperature) in keys]
        equal, ties, errors = len(pairs) - len(ties_among), sum(ties_among), ties_among.count(False)
    return {
        "questions": len(pairs), "tokens_per_second": rate, "speedup": speedup,
        "speedup_total": speedup_total, "tau": sum(lengths) / len(lengths) if lengths else None,
        "seconds": sum(a.seconds for a, _ in pairs),
        "prefill_seconds": sum(t.prefill_seconds for a, _ in pairs for t in a.turns),
        "equal": equal, "ties": ties, "errors": errors,
    }


def _mean(rows: list[dict]) -> dict:
    """Means of speeds and tau over the sets, sums of everything that is counted."""
    mean = {}
    for name in ("tokens_per_second", "speedup", "speedup_total", "tau"):
        known = [row[name] for row in rows if row[name] is not None]
        mean[name] = statistics.fmean(known) if known else None
    for name in ("questions", "equal", "ties", "errors", "seconds", "prefill_seconds"):
        mean[name] = None if rows[0][name] is None else sum(row[name] for row in rows)
    return mean


def by_temperature(
    rows: list[dict], sets: list[str]
) -> list[tuple[float, list[str], dict[str, dict[str, dict]]]]:
    """(temperature, the sets it has rows of, its rows by method and set) for every temperature."""
    tables = []
    for temperature in sorted({row["temperature"] for row in rows}):
        methods: dict[str, dict[str, dict]] = {}
        for row in rows:
            if row["temperature"] == temperature:
                methods.setdefault(row["method"], {})[row["set"]] = row
        present = {name for by_set in methods.values() for name in by_set}
        tables.append((temperature, [name for name in (*sets, "mean") if name in present], methods))
    return tables


def markdown(rows: list[dict], sets: list[str]) -> str:
    """One table per temperature: a line per method, speedup and tau for every set and their mean."""
    lines = []
    for temperature, shown_sets, methods in by_temperature(rows, sets):
        title = "speedup over plain decoding (median over the questions, prompts apart), τ"
        heads = ["method", *(f"{name} | τ" for name in shown_sets), "texts equal", "ties", "errors"]
        lines += [f"Temperature {temperature:g}: {title}", "", _line(heads)]
        lines.append("|---" * (2 * len(shown_sets) + 4) + "|")
        for method, by_set in methods.items():
            cells = ["plain" if method == PLAIN else method]
            for name in shown_sets:
                row = by_set.get(name, {})
                cells += [_number(row.get("speedup"), "×"), _number(row.get("tau"))]
            total = by_set["mean"]
            if total["equal"] is None:
                cells += ["other draws", "", ""]
            else:
                cells += [f"{total['equal']}/{total['questions']}", str(total["ties"]), str(total["errors"])]
            lines.append(_line(cells))
        lines.append("")
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:.2f}{unit}"


def as_csv(rows: list[dict]) -> str:
    """All rows, all columns."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
