"""Mutated files against the commands and the readers: nothing in a file may break them.

    python tests/fuzz.py --inputs 5000 --seed 1

Each input is a good folder of which one file was changed, at random, always the same way for a seed. What
must come of it: a right result, or one line that names what is wrong; in at most 5 s of processor time and
1 GB of memory beyond what is there. What is not so is printed, with what makes it again: --only SEED:NUMBER.
"""
from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import gguf  # noqa: E402
import torch  # noqa: E402
from helpers import GOLDEN  # noqa: E402
from helpers.sources import HEAD_CONFIG, head_state, target_state, write_gguf, write_source  # noqa: E402
from helpers.tokenizers import write_byte_tokenizer  # noqa: E402

import convert_checkpoint  # noqa: E402
import evaluate  # noqa: E402
import generate  # noqa: E402
import quantize  # noqa: E402
from checkpoint.convert import convert  # noqa: E402
from common.cli import Options, positive, run_command  # noqa: E402
from drafters import rest  # noqa: E402
from engine.calibration import Calibration  # noqa: E402
from tokens.dataset import check_dataset, read_chats, read_conversations  # noqa: E402
from training.trainer import load_state, save_state  # noqa: E402

BATCH, SECONDS, MEMORY = 50, 5, 1 << 20  # inputs of a process; most of each: seconds, and KiB
# Words of a message that nobody chose for this case.
CATCH_ALL = re.compile(r"\b[A-Z][A-Za-z]+(Error|Exception)\b|malformed|Traceback|unexpected keyword")
VALUES = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"), 2**31, 2**62,
    2**63, 10**30, "", "x", "64", "\x1b[31m", "\ud800", "a\0b", "é" * 300, "../../etc/passwd", "/dev/zero",
    [], {}, [[]], [None], [-1], {"": None}, [0] * 300, [[[[[[]]]]]], "9" * 5000, "{{", "yarn", "llama3",
    "LlamaForCausalLM",
)
TEXTS = (
    b"", b"null", b"[]", b"{}", b"{", b"\xff\xfe", b"[" * 5000, b'{"a":' * 5000, b"9" * 5000, b"\0" * 64,
    b"NaN", b'"\\ud800"', b"\xef\xbb\xbf{}", b"1e999", b"-" * 100,
)
TEMPLATES = (
    "{{ messages[0].content }}", "{% for m in messages %}", "{% endfor %}", "{{ 'a' * 10**9 }}",
    "{{ x.y.z }}", "{% for i in range(10**9) %}", "{{ ''.__class__.__mro__ }}", "{% if %}",
    "{{ raise_exception('no\n') }}",
    "{% set x = 'aaaaaaaa' %}", "{{ x|center(10**8) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages|tojson }}", "{{ '%9999999d'|format(1) }}", "{{ 1 // 0 }}", "{{ lipsum(n=9999) }}", "\x1b[2J",
    "{#",
)


# -- how a file is changed -----------------------------------------------------------------------------------


def places(value: object, path: tuple = ()) -> list[tuple]:
    """The paths of all that a JSON value holds."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in ((*path, key), *places(item, (*path, key)))]


def change_json(draw: random.Random, value: object) -> object:
    """Change one to three values, or take them out, or move them."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 2, 3))):
        if not (paths := places(value)):
            return draw.choice(VALUES)
        # Long lists, such as vocabularies, would take all draws.
        short = [path for path in paths if len(path) < 3]
        *way, last = draw.choice(draw.choice((short, paths)))
        holder = value
        for key in way:
            holder = holder[key]
        what = draw.random()
        if what < 0.2:
            del holder[last]
        elif what < 0.3 and isinstance(holder, dict):
            holder[draw.choice(("x", "\x1b[1m", "", "é"))] = holder.pop(last)
        elif what < 0.4 and type(holder[last]) in (int, float):
            holder[last] *= draw.choice((-1, 2, 3, 0.5, 1000, 2**40))
        else:
            holder[last] = copy.deepcopy(draw.choice(VALUES))
    return value


def dumps(value: object) -> bytes:
    """JSON with all that Python can say, lone surrogates too."""
    return json.dumps(value).encode()


def change_bytes(draw: random.Random, data: bytes, within: int = 1 << 30) -> bytes:
    """Flip, cut out, repeat or insert bytes among the first so many, or cut the file off."""
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, many = draw.randrange(max(1, min(len(data), within))), draw.choice((1, 1, 2, 4, 8, 64))
        what = draw.randrange(6)
        if what == 0 and data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif what == 1:
            data[at : at + many] = draw.randbytes(many)
        elif what == 2:
            del data[at : at + many]
        elif what == 3:
            data[at:at] = draw.choice((draw.randbytes(many), data[at : at + many], b"\xff" * 8))
        elif what == 4:
            data[at : at + 8] = struct.pack("<q", draw.choice((0, 1, -1, 2**31, 2**40, 2**62)))
        else:
            del data[at:]
    return bytes(data)


def text_file(draw: random.Random, data: bytes) -> bytes:
    """Change a JSON file: mostly its values, else its bytes, or all of it."""
    what = draw.random()
    if what < 0.75:
        return dumps(change_json(draw, json.loads(data)))
    return change_bytes(draw, data) if what < 0.9 else draw.choice(TEXTS)


def lines_file(draw: random.Random, data: bytes) -> bytes:
    """Change a line of JSON lines."""
    lines = data.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    lines[at] = text_file(draw, lines[at]) + draw.choice((b"\n", b"\n", b"", b"\r\n"))
    return b"".join(lines)


def tensors_file(draw: random.Random, data: bytes) -> bytes:
    """Change the header of a safetensors file, or its bytes."""
    size, = struct.unpack("<Q", data[:8])
    if draw.random() < 0.5:
        return change_bytes(draw, data, 8 + size)
    head = dumps(change_json(draw, json.loads(data[8 : 8 + size])))
    return struct.pack("<Q", len(head)) + head + data[8 + size :]


def template_file(draw: random.Random, data: bytes) -> bytes:
    """A template of a few pieces."""
    return "".join(draw.choice(TEMPLATES) for _ in range(draw.randint(1, 4))).encode()


def header_bytes(draw: random.Random, data: bytes) -> bytes:
    """Change bytes where a binary file says what it holds."""
    return change_bytes(draw, data, 3000)


# -- good folders, and what is asked of them -----------------------------------------------------------------


def make_good(place: Path) -> None:
    """All that is changed below, whole, in one folder."""
    target = place / "target"
    convert(GOLDEN / "target", target, quiet=True)
    convert(GOLDEN / "eagle3", target=target, quiet=True)
    write_byte_tokenizer(target)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (target / "chat_template.jinja").write_text(template)
    hf = write_source(place / "hf", target_state())
    write_byte_tokenizer(hf)
    (hf / "generation_config.json").write_text('{"eos_token_id": [3, 5], "bos_token_id": 1}')
    shards = write_source(place / "shards", target_state(), form="safetensors-sharded")
    assert (shards / "model.safetensors.index.json").exists()
    write_source(place / "pickle", target_state(), form="bin")
    convert(hf, place / "small", quiet=True)
    write_source(place / "head", head_state(), HEAD_CONFIG)
    alphabet = json.loads((target / "tokenizer.json").read_text())["model"]["vocab"]

    def tokens(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*list(alphabet)[:95], "".join(list(alphabet)[:2])])
        writer.add_token_merges([" ".join(list(alphabet)[:2])])
        writer.add_token_types([1] * 96)
        writer.add_chat_template(template)

    write_gguf(place / "gguf" / "m.gguf", target_state(), extra=tokens)
    assert converted(place, "gguf/m.gguf") == 0
    shutil.rmtree(place / "out")
    write_gguf(place / "plain" / "m.gguf", target_state())
    (place / "tree").mkdir()
    (place / "tree" / "tree.json").write_text("[[0], [1], [0, 0], [0, 1], [0, 0, 0]]")
    (place / "measured").mkdir()
    (place / "measured" / "calibration.json").write_text(json.dumps({
        "format": 1, "ease": [0.5, 1.0], "tau": {t: {"8/2/4": 1.5, "16/3/4": 1.7} for t in "01"},
        "far": {"context": 1000, "kept": {"0": 0.8, "1": 0.9}},
        "confidence": {"of_greedy": [0.1, 1.0], "of_sampling": [0.2, 1.1]},
    }))
    (place / "work").mkdir()
    save_state(place / "work", {"options": {"a": 1}, "step": 3, "weights": {"w": torch.zeros(9)}})
    (place / "texts").mkdir()
    (place / "texts" / "prompts.jsonl").write_text(
        '{"prompt": "a"}\n{"turns": ["b", "c"]}\n{"messages": [{"role": "user", "content": "d"}]}\n')
    talk = '[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]'
    (place / "texts" / "conversations.jsonl").write_text(f'{{"conversations": {talk}}}\n' * 3)
    text = str(place / "texts" / "prompts.jsonl")
    assert rest.main(["build", "--checkpoint", str(target), "--out", str(place / "store"), text]) == 0
    (place / "questions").mkdir()
    (place / "questions" / "q.jsonl").write_text(
        '{"question_id": 1, "turns": ["a?"]}\n{"question_id": 2, "turns": ["b?"]}\n')
    assert evaluate.main(evaluation(place, place / "run")) == 0


def evaluation(place: Path, out: Path) -> list[str]:
    """A run of evaluate.py of which every question is answered, with plain decoding beside."""
    return [
        "--checkpoint", str(GOOD / "target"), "--questions", str(place / "questions" / "q.jsonl"),
        "--out", str(out), "--no-compile", "--max-new-tokens", "2", "--max-seq-len", "64",
        "--dtype", "fp32", "--observe", "0", "--speculate", "lookup", "--threads", "1",
    ]


def decode(place: Path, *more: str) -> int:
    """Two tokens of a target."""
    return generate.main([
        "--checkpoint", str(place), "--no-compile", "--max-new-tokens", "2", "--threads", "1",
        "--device", "cpu", *more,
    ])


def chat(place: Path) -> int:
    return decode(place / "target", "--prompt", "hi")


def draft(place: Path) -> int:
    return decode(place / "target", "--prompt-ids", "1,2", "--speculate", "eagle3", "--tree", "4,1,2")


def converted(place: Path, name: str, *more: str) -> int:
    out = place / "out"
    code = convert_checkpoint.main(["--checkpoint", str(place / name), "--out", str(out), *more])
    return code or decode(out, "--prompt-ids", "1,2")


def read(action: Callable[[], object]) -> int:
    """A reader, as a command would call it."""
    return run_command(lambda: action() and None)


def judged(place: Path, reader: Callable, name: str) -> int:
    """A file of text to train on, as train.py judges it."""
    return read(lambda: check_dataset("--text", place / "texts" / name, reader))


GOOD = Path()
# What is asked, of which file, changed in which way.
CASES: tuple[tuple[str, str, Callable, Callable[[Path], int]], ...] = (
    ("target", "config.json", text_file, lambda p: decode(p / "target", "--prompt-ids", "1,2")),
    ("target", "model.safetensors", tensors_file, lambda p: decode(p / "target", "--prompt-ids", "1,2")),
    ("target", "eagle3/config.json", text_file, draft),
    ("target", "eagle3/model.safetensors", tensors_file, draft),
    ("target", "tokenizer.json", text_file, chat),
    ("target", "tokenizer_config.json", text_file, chat),
    ("target", "chat_template.jinja", template_file, chat),
    ("small", "config.json", text_file, lambda p: quantize.main(
        ["--checkpoint", str(p / "small"), "--out", str(p / "out")])),
    ("hf", "config.json", text_file, lambda p: converted(p, "hf")),
    ("hf", "model.safetensors", tensors_file, lambda p: converted(p, "hf")),
    ("hf", "generation_config.json", text_file, lambda p: converted(p, "hf")),
    ("hf", "tokenizer_config.json", text_file, lambda p: converted(p, "hf")),
    ("hf", "tokenizer.json", text_file, lambda p: converted(p, "hf")),
    ("shards", "model.safetensors.index.json", text_file, lambda p: converted(p, "shards")),
    ("pickle", "pytorch_model.bin", header_bytes, lambda p: converted(p, "pickle")),
    ("head", "config.json", text_file, lambda p: convert_checkpoint.main(
        ["--checkpoint", str(p / "head"), "--target", str(GOOD / "small"), "--out", str(p / "out")])),
    ("gguf", "m.gguf", header_bytes, lambda p: converted(p, "gguf/m.gguf")),
    ("plain", "m.gguf", header_bytes, lambda p: converted(p, "plain/m.gguf")),
    ("tree", "tree.json", text_file, lambda p: decode(
        GOOD / "target", "--prompt-ids", "1,2", "--speculate", "eagle3",
        "--tree", str(p / "tree" / "tree.json"))),
    ("measured", "calibration.json", text_file, lambda p: read(lambda: Calibration.read(p / "measured"))),
    ("work", "state.pt", header_bytes,
     lambda p: read(lambda: load_state(p / "work", {"a": 1}, torch.device("cpu")))),
    ("run", "answers.jsonl", lines_file, lambda p: evaluate.main(evaluation(GOOD, p / "run"))),
    ("run", "options.json", text_file, lambda p: evaluate.main(evaluation(GOOD, p / "run"))),
    ("store", "store.json", text_file, lambda p: decode(
        GOOD / "target", "--prompt-ids", "1,2", "--speculate", "rest", "--datastore", str(p / "store"))),
    ("texts", "prompts.jsonl", lines_file, lambda p: judged(p, read_chats, "prompts.jsonl")),
    ("texts", "conversations.jsonl", lines_file,
     lambda p: judged(p, read_conversations, "conversations.jsonl")),
    ("questions", "q.jsonl", lines_file, lambda p: evaluate.main(evaluation(p, p / "out"))),
)


# -- one input -----------------------------------------------------------------------------------------------


def peak() -> int:
    """The most memory of this process since it was last asked, in KiB."""
    text = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+)", text)[1])


def attempt(seed: int, number: int, show: bool = False) -> tuple[str, str, float, int]:
    """Make an input and ask for it -> what came of it, what was said, seconds, KiB."""
    draw = random.Random(f"{seed}:{number}")
    folder, name, change, ask = CASES[number % len(CASES)]
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        shutil.copytree(GOOD / folder, place / folder, copy_function=os.link)
        file = place / folder / name
        data = change(draw, file.read_bytes())
        file.unlink()
        file.write_bytes(data)
        if show:
            print(data[:3000], file=sys.__stderr__)
        said, out = io.StringIO(), io.StringIO()
        peak()
        before, began = resident(), time.process_time()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
            try:
                code = ask(place)
            except SystemExit as e:
                code = e.code
            except BaseException:
                return f"TRACEBACK {folder}/{name}", traceback.format_exc()[-1500:], 0.0, 0
        seconds, memory = time.process_time() - began, peak() - before
        left = [p.name for p in place.iterdir() if p.name.startswith(".")]
    return judge(f"{folder}/{name}", code, said.getvalue(), seconds, memory, left), said.getvalue()[-1500:], \
        seconds, memory


def resident() -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def judge(what: str, code: int, said: str, seconds: float, memory: int, left: list[str]) -> str:
    """Whether what came of an input is right: "ok", "refused", or a word in capitals."""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    after = said[said.rindex("error: ") :].splitlines() if errors else []
    if seconds > SECONDS:
        return f"SLOW {what}"
    if memory > MEMORY:
        return f"LARGE {what}"
    if left:
        return f"LEFT {what}"
    if CATCH_ALL.search(said):
        return f"CATCH-ALL {what}"
    if code == 0:
        return "right"
    table = after[1:2] == ["the table so far:"]  # of evaluate.py
    one_line = len(errors) == 1 and (len(after) == 1 or table)
    return "refused" if one_line and after[0].isprintable() and len(after[0]) < 2000 else f"LINES {what}"


def batch(seed: int, numbers: list[int], pipe: int) -> None:
    """In a child: attempt inputs, one after the other, and tell the parent."""
    torch.set_num_threads(1)
    with os.fdopen(pipe, "w") as to:
        for number in numbers:
            signal.alarm(60)
            to.write(json.dumps([number, *attempt(seed, number)]) + "\n")
            to.flush()
    os._exit(0)


def run(o) -> int:
    """Attempt all inputs -> 1 if one of them was not as it should be."""
    global GOOD
    torch.set_num_threads(1)
    counts, worst = Counter(), [0.0, 0]
    with tempfile.TemporaryDirectory() as made:
        GOOD = Path(made)
        make_good(GOOD)
        if o.only:
            seed, number = map(int, o.only.split(":"))
            print(*attempt(seed, number, show=True), sep="\n")
            return 0
        todo = list(range(o.first, o.first + o.inputs))
        while todo:
            read_end, write_end = os.pipe()
            if (child := os.fork()) == 0:
                os.close(read_end)
                batch(o.seed, todo[:BATCH], write_end)
            os.close(write_end)
            done = 0
            with os.fdopen(read_end) as lines:
                for line in lines:
                    number, result, said, seconds, memory = json.loads(line)
                    done, worst = done + 1, [max(worst[0], seconds), max(worst[1], memory)]
                    count(counts, o.seed, number, result, said)
            _, status = os.waitpid(child, 0)
            if status:
                folder, name, *_ = CASES[todo[done] % len(CASES)]
                count(counts, o.seed, todo[done], f"ENDED {folder}/{name}", f"status {status}")
                done += 1
            todo = todo[done:]
            print(f"{len(todo)} left, {dict(counts)}", file=sys.stderr)
    for result, many in counts.most_common():
        print(f"{many:6d} {result}")
    print(f"at most {worst[0]:.1f} s of processor time and {worst[1] >> 10} MiB")
    return int(set(counts) > {"right", "refused"})


def count(counts: Counter, seed: int, number: int, result: str, said: str) -> None:
    counts[result] += 1
    if result not in ("right", "refused"):
        print(f"--only {seed}:{number} {result}\n{said}\n", flush=True)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = Options(__doc__)
    p.add_argument("--inputs", type=positive, default=5000)
    p.add_argument("--first", type=int, default=0, help="the number of the first (default 0)")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--only", metavar="SEED:NUMBER", help="this input only, which is printed")
    return run(p.read(argv))


if __name__ == "__main__":
    sys.exit(main())
