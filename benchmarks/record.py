"""Record an answer with and without drafting, and draw both as an animated SVG in real time.

    python benchmarks/record.py --checkpoint DIR [--prompt TEXT] [--redraw]

Runs alternate after warmup. The run of median duration is drawn, with the timestamp of every token. Writes
benchmarks/results/NAME.json and NAME.svg, which contains no scripts. --redraw draws an existing result.
"""
from __future__ import annotations

import itertools
import json
import sys
import textwrap
from html import escape
from pathlib import Path

import bench  # first: it makes the modules below importable
from bench import positive

from common.errors import InputError
from common.writing import write_text
from llm import LLM

PROMPT = "How does photosynthesis work? Explain it in simple words."
METHODS = {"none": "plain decoding", "eagle3": "EAGLE-3"}
RUNS = 5
COLUMNS, LINES = 60, 20  # characters of a terminal
CHAR_WIDTH, LINE_HEIGHT, LEFT, TOP = 7.2, 17, 16, 84  # pixels: character, line, margins
TICK, PAUSE = 0.2, 5.0  # seconds between updates of the token count; seconds before the animate repeats
TEXT, DRAFTED, DIM, BACKGROUND = "#e6edf3", "#7ee787", "#8b949e", "#0d1117"


def record(llm: LLM, prompt: str, tokens: int) -> dict:
    """Decode an answer. Returns ids, pieces [seconds, text, whether drafted], tau and tokens per second."""
    ids, pieces, text = [], [], ""
    for event in llm.stream(prompt, max_new_tokens=tokens):
        request = event.request
        for i, token in enumerate(event.ids):
            ids.append(token)
            before, text = text, llm.tokenizer.decode(ids)
            seconds = round(request.last - request.admitted_at, 4)
            pieces.append([seconds, text[len(before):], i < event.drafted])
    return {"ids": ids, "pieces": pieces, "tau": round(request.tau, 2), "rate": request.tokens_per_second}


def positions(text: str) -> list[tuple[int, int]]:
    """Return line and column of each character of word-wrapped text."""
    cells, line = [], 0
    for paragraph in text.split("\n"):
        rows = textwrap.wrap(paragraph, COLUMNS, drop_whitespace=False) or [""]
        cells += [(line + y, x) for y, row in enumerate(rows) for x in range(len(row))]
        line += len(rows)
        cells.append((line - 1, len(rows[-1])))  # of the line break
    return cells


def text_element(
    x: float, y: float, text: str, color: str, times: tuple[float, ...] = (), size: int = 12
) -> str:
    """Return a text element. times: when it appears and disappears, as fractions of the duration."""
    animate = ""
    if times:
        keys, values = ";".join(f"{t:.4f}" for t in (0, *times)), ";".join("010"[: len(times) + 1])
        animate = (f'<animate attributeName="opacity" calcMode="discrete" keyTimes="{keys}" values="{values}"'
                   ' dur="DURATION" repeatCount="indefinite"/>')
    width = f'textLength="{len(text) * CHAR_WIDTH * size / 12}"'  # independent of the font
    return f'<text x="{x}" y="{y}" fill="{color}" font-size="{size}" {width}>{escape(text)}{animate}</text>'


def terminal(left: float, title: str, answer: dict, end: str, total: float) -> list[str]:
    """Return the elements of one terminal. end: suffix of the final status line. total: seconds."""
    pieces = answer["pieces"]
    last, elements = pieces[-1][0], [text_element(left, 46, title, TEXT, size=15)]
    cells = iter(positions("".join(text for _, text, _ in pieces)))
    for seconds, text, drafted in pieces:
        for line, characters in itertools.groupby(zip(text, cells), lambda pair: pair[1][0]):
            characters = list(characters)
            visible = "".join(c for c, _ in characters).rstrip()
            column = characters[0][1][1] + len(visible) - len(visible := visible.lstrip())
            if line < LINES and visible:
                position = round(left + column * CHAR_WIDTH, 1), TOP + line * LINE_HEIGHT
                color = DRAFTED if drafted else TEXT
                elements.append(text_element(*position, visible, color, (seconds / total,)))
    for i in range(int(last / TICK) + 1):
        now = i * TICK
        count = sum(seconds <= now for seconds, *_ in pieces)
        interval = now / total, min(now + TICK, last) / total
        elements.append(text_element(left, 64, f"{now:.1f} s: {count} tokens", DIM, interval))
    status = f"{last:.1f} s: {len(pieces)} tokens, {answer['rate']:.0f} tokens/s{end}"
    return [*elements, text_element(left, 64, status, DRAFTED, (last / total,))]


def draw(result: dict) -> str:
    """Return a result as SVG."""
    plain, drafted = (result["answers"][name] for name in METHODS)
    total = max(answer["pieces"][-1][0] for answer in (plain, drafted)) + PAUSE
    panel, height = LEFT + COLUMNS * CHAR_WIDTH, TOP + LINES * LINE_HEIGHT + 26
    ratio = plain["pieces"][-1][0] / drafted["pieces"][-1][0]
    same = "identical output" if plain["ids"] == drafted["ids"] else "different output"
    ends = {"none": "", "eagle3": f", {ratio:.2f}x, {same}"}
    machine = f"{result['device']}, {result['isa']}, {result['threads']} threads, {result['date']}"
    parts = [
        text_element(LEFT, 22, f"{result['model']}: {result['prompt']}", DIM),
        text_element(LEFT, height - 12, f"Real time. Green: accepted draft tokens. {machine}", DIM),
    ]
    for i, (name, title) in enumerate(METHODS.items()):
        parts += terminal(LEFT + i * (panel + LEFT), title, result["answers"][name], ends[name], total)
    body = "\n".join(parts).replace("DURATION", f"{total:.2f}s")
    box = f'viewBox="0 0 {2 * panel + 2 * LEFT:.0f} {height}" font-family="monospace"'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n<rect width="100%" height="100%" rx="8"'
            f' fill="{BACKGROUND}"/>\n{body}\n</svg>\n')


def action(args) -> None:
    """Record unless --redraw, then draw."""
    file = bench.RESULTS / f"{args.name}.json"
    if not args.redraw:
        llms = {name: LLM(args.checkpoint, speculate=name, batch_size=1) for name in METHODS}
        runs = {name: [] for name in METHODS}
        for _ in range(RUNS + 1):
            for name, llm in llms.items():
                runs[name].append(record(llm, args.prompt, args.max_new_tokens))
        if len(runs["none"][0]["ids"]) < 2:
            raise InputError("--prompt: the answer is a single token; use a prompt with a longer answer")
        answers = {n: sorted(r[1:], key=lambda a: a["pieces"][-1][0])[RUNS // 2] for n, r in runs.items()}
        settings = {"model": Path(args.checkpoint).name, "prompt": args.prompt}
        bench.write(args.name, bench.describe(args) | settings | {"answers": answers})
    write_text(file.with_suffix(".svg"), draw(json.loads(file.read_text())))


def main(argv: list[str] | None = None) -> int:
    """Parse a command line and run it. Returns the exit status."""
    p = bench.options(__doc__, "record")
    p.add_argument("--checkpoint", required=True, help="converted target with its EAGLE-3 head")
    p.add_argument("--prompt", default=PROMPT, help=f"prompt (default: {PROMPT})")
    p.add_argument("--max-new-tokens", type=positive, default=192, metavar="N",
                   help="maximum tokens of the answer (default 192)")
    p.add_argument("--redraw", action="store_true", help="draw an existing result file")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
