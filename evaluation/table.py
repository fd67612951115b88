"""The table of the papers: per set and temperature, speedup over plain decoding and acceptance length."""
from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable

from evaluation.lossless import Difference
from evaluation.runs import Answer
from sampling.rules import LOSSY

PLAIN = "none"


def label(method: str, rule: str) -> str:
    """What a method is called that accepts by this rule (see `accepting`): a lossy one says so wherever it is
    named.
    """
    return method if rule == "equal" else f"{method}+{rule}" + ("-lossy" if rule in LOSSY else "")


def method_of(name: str) -> str:
    """The method that `label` has given this name."""
    return name.partition("+")[0]


def bound_to_be_plain(method: str, temperature: float) -> bool:
    """Whether the texts of a method so called must be those of plain decoding."""
    return "+" not in method or temperature == 0


def summarise(
    answers: Iterable[Answer], sets: list[str], methods: list[str], differences: list[Difference]
) -> list[dict]:
    """A row per temperature, method and set, and a row `mean` over the sets that are there, each counting as
    much as the others.

    `speedup`: median over the questions of (tokens per second / those of plain decoding), both after the
    first token, so without the prompt's pass; `speedup_total`: of whole sets; `tau`: tokens per step of a
    whole set, without each answer's first token; all three None where no answer has a second token.
    `seconds`, `prefill_seconds`: of whole sets. `equal` of `questions` texts are those of plain decoding;
    `ties` and `errors`: what the others are; all three None where the texts need not be.
    """
    found = {a.key: a for a in answers}
    rows = []
    for temperature in sorted({a.temperature for a in found.values()}):
        for method in methods:
            mine = []
            for name in sets:
                pairs = [
                    (a, found.get((name, a.question, PLAIN, temperature)))
                    for a in found.values() if (a.set, a.method, a.temperature) == (name, method, temperature)
                ]
                pairs = [(a, plain) for a, plain in pairs if plain is not None]
                if pairs:
                    mine.append(
                        {
                            "temperature": temperature, "method": method, "set": name,
                            **_row(pairs, differences)
                        }
                    )
            if mine:
                rows += mine
                rows.append({"temperature": temperature, "method": method, "set": "mean", **_mean(mine)})
    return rows


def _row(pairs: list[tuple[Answer, Answer]], differences: list[Difference]) -> dict:
    timed = [(a, p) for a, p in pairs if a.tokens and a.seconds > 0 and p.tokens and p.seconds > 0]
    lengths = [n for a, _ in pairs for n in a.lengths]
    tokens, seconds = (sum(getattr(a, what) for a, _ in timed) for what in ("tokens", "seconds"))
    plain_rate = sum(p.tokens for _, p in timed) / sum(p.seconds for _, p in timed) if timed else None
    own = {a.key for a, _ in pairs}
    mine = [d for d in differences if (d.set, d.question, d.method, d.temperature) in own]
    return {
        "questions": len(pairs), "tokens_per_second": tokens / seconds if timed else None,
        "speedup": statistics.median((a.tokens / a.seconds) / (p.tokens / p.seconds) for a, p in timed)
        if timed else None,
        "speedup_total": tokens / seconds / plain_rate if timed else None,
        "tau": sum(lengths) / len(lengths) if lengths else None,
        "seconds": sum(a.seconds for a, _ in pairs),
        "prefill_seconds": sum(t.prefill_seconds for a, _ in pairs for t in a.turns),
        **(
            {
                "equal": len(pairs) - len(mine), "ties": sum(d.tie for d in mine),
                "errors": sum(not d.tie for d in mine)
            }
            if bound_to_be_plain(pairs[0][0].method, pairs[0][0].temperature)
            else {"equal": None, "ties": None, "errors": None}
        ),
    }


def _mean(rows: list[dict]) -> dict:
    means = {}
    for name in ("tokens_per_second", "speedup", "speedup_total", "tau"):
        known = [row[name] for row in rows if row[name] is not None]
        means[name] = statistics.fmean(known) if known else None
    counted = ("questions", "equal", "ties", "errors", "seconds", "prefill_seconds")
    return means | {
        name: None if rows[0][name] is None else sum(row[name] for row in rows) for name in counted
    }


def _cell(value: float | None, what: str) -> str:
    return "–" if value is None else f"{value:.2f}" + "×" * (what == "speedup")


def markdown(rows: list[dict], sets: list[str]) -> str:
    """One table per temperature: a line per method, speedup and tau for every set and their mean."""
    lines = []
    for temperature in sorted({row["temperature"] for row in rows}):
        mine = [row for row in rows if row["temperature"] == temperature]
        shown = [name for name in [*sets, "mean"] if any(row["set"] == name for row in mine)]
        lines += [
            f"Temperature {temperature:g}: speedup over plain decoding (median over the questions, prompts apart), τ", ""
        ]
        lines += [
            "| method | " + " | ".join(f"{name} | τ" for name in shown) + " | texts equal | ties | errors |"
        ]
        lines += ["|---" * (2 * len(shown) + 4) + "|"]
        for method in dict.fromkeys(row["method"] for row in mine):
            by_set = {row["set"]: row for row in mine if row["method"] == method}
            cells = [
                " | ".join(_cell(by_set.get(n, {}).get(what), what) for what in ("speedup", "tau"))
                for n in shown
            ]
            total = by_set["mean"]
            if total["equal"] is None:
                cells += ["LOSSY" if method.endswith("-lossy") else "other draws", "", ""]
            else:
                cells += [f"{total['equal']}/{total['questions']}", str(total["ties"]), str(total["errors"])]
            lines.append("| " + " | ".join(["plain" if method == PLAIN else method, *cells]) + " |")
        lines.append("")
    return "\n".join(lines)


def as_csv(rows: list[dict]) -> str:
    """All rows, all columns."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
