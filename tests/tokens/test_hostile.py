"""Tokenizers and chat templates that were made to hang, to grow or to crash: what is said of each.

The tables are a corpus: what a fuzzer and readers of the libraries found is kept here.
"""
import json
import os
import time
from functools import partial
from pathlib import Path

import pytest

from common.errors import InputError
from tokens.files import FILES
from tokens.guard import GUARD
from tokens.tokenizer import Tokenizer

STEPS, GROWS = "makes more than 1,000,000 steps", "makes a text or list of more than 4,1"
NUMBER, DEEP = "calls a function with the number", "it is nested too deeply"
BITS = "computes a number of more than 10,000 bits"
DOUBLES = "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = %s %}{% endfor %}{{ n.s }}"
TEMPLATES = (
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", STEPS),
    ("{% for i in range(9999999) %}{% endfor %}", NUMBER),
    ("{% for c in 'abc' * 400000 %}{% for d in 'abc' * 400000 %}{% endfor %}{% endfor %}", STEPS),
    ("{% for x in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}", DEEP),
    ("{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}", DEEP),
    ("{{ range(10**18) | list }}", NUMBER),
    ("{{ 'a' * 10**10 }}", GROWS), ("{{ 10**10 * 'a' }}", GROWS), ("{{ [1] * 10**10 }}", GROWS),
    ("{{ 'a'.center(10**10) }}", NUMBER), ("{{ 'a' | center(10**10) }}", NUMBER),
    ("{{ 'a'.zfill(10**10) }}", NUMBER), ("{{ 'a'.ljust(width=10**10) }}", NUMBER),
    ("{{ '%9999999999d' | format(1) }}", GROWS), ("{{ '%9999999999d' % 1 }}", GROWS),
    ("{{ '%(a)9999999999d' % {'a': 1} }}", GROWS),
    ("{{ '%.9999999999f' % 1 }}", GROWS), ("{{ '%*d' % (10**10, 1) }}", NUMBER),
    ("{{ '%*d' | format(10**10, 1) }}", NUMBER), ("{{ '{:>9999999999}'.format(1) }}", GROWS),
    ("{{ '{:>{}}'.format(1, 10**10) }}", NUMBER), ("{{ lipsum(n=10**8) }}", NUMBER),
    ("{{ lipsum(n=9) }}", "'lipsum' is undefined"),
    (DOUBLES.replace("%s", "n.s + n.s"), GROWS), (DOUBLES.replace("%s", "n.s ~ n.s"), GROWS),
    (DOUBLES.replace("%s", "n.s * 2"), GROWS), (DOUBLES.replace("%s", "'%s%s' % (n.s, n.s)"), GROWS),
    (DOUBLES.replace("%s", "n.s.replace('a', 'aa')"), GROWS), (DOUBLES.replace("%s", "[n.s, n.s]"), GROWS),
    (DOUBLES.replace("%s", "n.s | replace('a', 'aab')"), GROWS),
    (DOUBLES.replace("%s", "n.s.join(n.s)"), GROWS),
    (DOUBLES.replace("%s", "{'x': n.s, 'y': n.s}"), GROWS), (DOUBLES.replace("%s", "n.s | urlize"), None),
    ("{% set x %}{% for i in range(900000) %}12345678{% endfor %}{% endset %}{{ x }}", GROWS),
    ("{% for i in range(900000) %}12345678{% endfor %}", GROWS),
    ("{{ 10**(9**9) }}", BITS),
    ("{% set n = namespace(x=10) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}", BITS),
    ("{{ ('a' * 1000000).join('b' * 1000000) }}", GROWS), ("{{ (['a' * 1000000] * 9000) | join }}", GROWS),
    ("{{ ('\n' * 1000000) | indent(1000000) }}", GROWS),
    ("{{ messages | tojson(indent=65) }}", "indents JSON by"),
    ("{{ ('\t' * 1000000).expandtabs(1000000) }}", GROWS),
    ("{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}", GROWS),
    ("{{ ('a' * 1000000) | wordwrap(1, true, 'b' * 1000000) }}", GROWS),
    ("{{ 1.5 | round(10**10) }}", NUMBER), ("{{ (1).to_bytes(10**10) }}", NUMBER),
    ("{{ [1, 2] | batch(10**10, 'x') | list }}", NUMBER),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", DEEP), ("{{ " + "not " * 5000 + "1 }}", DEEP),
    ("{% if 1 %}" * 2000 + "{% endif %}" * 2000, DEEP), ("{{ x" + "|upper" * 20000 + " }}", DEEP),
    ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"), ("{% include '/etc/passwd' %}", "no loader"),
    ("{{ raise_exception('\x1b[2J\x1b]0;owned\x07\nsecond line') }}", r"\x1b[2J\x1b]0;owned\x07 second line"),
    ("{{ 1 / 0 }}", "division by zero"), ("{% if %}", "Expected an expression"),
    ("{{ messages[9].x.y }}", "no element 9"),
)


@pytest.fixture
def copy(bpe, tmp_path):
    """A copy of a good tokenizer, whose files may be changed."""
    for file in bpe.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def said(action) -> str:
    """What an InputError says. It is one line that a terminal shows as it is, and came soon."""
    before, began = os.times(), time.monotonic()
    with pytest.raises(InputError) as e:
        action()
    took = os.times()
    line = str(e.value)
    assert line.isprintable() and len(line) < 2000
    # Of this process; that of the other is bounded by the system.
    assert took.user + took.system - before.user - before.system < 5 or time.monotonic() - began < 5
    return line


@pytest.mark.parametrize("template, words", TEMPLATES, ids=lambda text: (text or "")[:40])
def test_a_template_that_does_too_much(copy, template, words):
    (copy / "chat_template.jinja").write_text(template)
    chat = lambda: Tokenizer.load(copy).chat([{"role": "user", "content": "Hello"}])  # noqa: E731
    if words is None:
        chat()
        return
    line = said(chat)
    assert line.startswith(f"{copy / 'chat_template.jinja'}: chat template: ") and words in line, line


def test_a_long_conversation_is_not_too_much(copy):
    """The bounds grow with what a template is given."""
    text = "word " * 1_000_000
    (copy / "chat_template.jinja").write_text(
        "{% for m in messages %}{% set x = m.content | trim ~ '!' %}"
        "{{ x.replace('word', 'words') }}{% endfor %}"
    )
    rendered = Tokenizer.load(copy).render([{"role": "user", "content": text}])
    assert rendered == text.strip().replace("word", "words") + "!"


def with_split(pattern: str):
    """A change of tokenizer.json: texts are cut by a pattern."""
    def change(spec: dict) -> None:
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ]}
    return change


def setting(*path, value):
    """A change of tokenizer.json: a value at a path."""
    def change(spec: dict) -> None:
        for key in path[:-1]:
            spec = spec[key]
        spec[path[-1]] = value
    return change


TOKENIZERS = {
    "a pattern that backtracks": (with_split("(a+)+$"), "json: made its library panic (Onig: Regex search"),
    "a pattern that backtracks at every place": (with_split("(?=(a{0,17})*c)|a"), "panic"),
    "a pattern that takes a second at every place": (
        with_split("(?:a|a){22}b|a"), "the tokenizer took more than "),
    "a pattern that is none": (with_split("["), "cannot be read as a tokenizer"),
    "a pattern that is too large": (
        with_split("(?:(?:(?:(?:a{1000}){1000}){1000}){1000}){1000}"), "cannot be read as a tokenizer"),
    "an empty vocabulary": (setting("model", "vocab", value={}), "cannot be read as a tokenizer"),
    "an id of 2^62": (setting("model", "vocab", "a", value=2**62), "cannot be read as a tokenizer"),
    "an id of 30 digits": (setting("model", "vocab", "a", value=10**30), "cannot be read as a tokenizer"),
    "a model of another kind": (setting("model", "type", value="\x1b[31m"), "cannot be read as a tokenizer"),
    "a decoder of another kind": (
        setting("decoder", value={"type": "WordPiece", "prefix": "#", "cleanup": True}),
        "decoder WordPiece is neither byte-level nor sentencepiece's"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_json_that_does_too_much(copy, bpe, name):
    change, words = TOKENIZERS[name]
    spec = json.loads((copy / "tokenizer.json").read_text())
    change(spec)
    (copy / "tokenizer.json").write_text(json.dumps(spec))
    line = said(lambda: Tokenizer.load(copy).encode("a" * 40 + "b" + "a" * 3000))
    assert words in line, line
    assert Tokenizer.load(bpe).encode("x")  # others are served


CONFIGS = {
    "no object": ("[]", "expected a JSON object, found list"),
    "no JSON": ("{", "cannot be read as JSON"),
    "a token that is a number": ('{"bos_token": 5}', "config.json: bos_token is 5; expected"),
    "a token without content": ('{"bos_token": {"x": 1}}', "json: bos_token.content is missing; expected"),
    "a template that is a number": ('{"chat_template": 5}', "config.json: chat_template is 5; expected"),
    "templates without names": ('{"chat_template": [{"x": 1}]}', "template[0].name is missing; expected"),
    "a template of megabytes": (json.dumps({"chat_template": "x" * (5 << 20)}), "at most 4,194,304"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_cannot_be(copy, name):
    text, words = CONFIGS[name]
    (copy / "tokenizer_config.json").write_text(text)
    line = said(lambda: Tokenizer.load(copy))
    assert words in line and str(copy) in line, line


def test_others_are_served_after_one_was_stopped(copy, bpe):
    good = Tokenizer.load(bpe)
    ids, process = good.encode("hello"), GUARD.process_id
    spec = json.loads((copy / "tokenizer.json").read_text())
    TOKENIZERS["a pattern that takes a second at every place"][0](spec)
    (copy / "tokenizer.json").write_text(json.dumps(spec))
    said(lambda: Tokenizer.load(copy).encode("a" * 30_000))
    assert good.encode("hello") == ids and GUARD.process_id != process
    assert good.chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_no_file_that_is_missing(copy, name):
    """A pipe, a device and a dangling link are refused by name; nothing else takes their place."""
    for make, words in (
        (os.mkfifo, "is a pipe; expected a file"),
        (partial(os.symlink, "/dev/zero"), "is a device; expected a file"),
        (partial(os.symlink, "nowhere"), "no such file"),
    ):
        (copy / name).unlink(missing_ok=True)
        make(copy / name)
        with pytest.raises(InputError, match=f"{name}: {words}"):
            Tokenizer.load(copy)


def test_a_token_that_is_too_long_is_refused(copy):
    content = json.loads((copy / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "content": "a" * 5000, "id": 5000})
    (copy / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"tokenizer\.json: added token \d+ has 5,000 characters; expected"):
        Tokenizer.load(copy)


@pytest.mark.skipif(not Path("/proc/kmsg").exists(), reason="no file of the kernel that waits")
def test_a_file_that_waits_is_not_waited_for(copy):
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").symlink_to("/proc/kmsg")
    began = time.monotonic()
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        Tokenizer.load(copy)
    assert time.monotonic() - began < 5


def test_a_tokenizer_whose_files_change_is_not_loaded_again(copy):
    tokenizer = Tokenizer.load(copy)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "other"}))
    assert tokenizer.encode("x")
    GUARD.close()
    assert "the tokenizer's files have changed; start again" in said(lambda: tokenizer.encode("x"))


def handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_new_process_leaves_no_file_handles(bpe):
    tokenizer = Tokenizer.load(bpe)
    before = handles()
    for _ in range(5):
        GUARD.close()
        tokenizer.encode("x")
    assert handles() == before


# ---- sizes ----

TEXTS = (
    "The quick brown fox 123. ",
    "a", " ", "\n", "中文字", "e\u0301", "<|im_", "\0", "👩‍👩‍👧", "x1-", "K\u212a",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_is_refused_only_if_it_cannot_fit(bpe, sp, text):
    """Whatever the text, that it certainly does not fit is said only where it does not."""
    from tokens.spelling import TooLong

    for folder in (bpe, sp):
        tokenizer, long = Tokenizer.load(folder), text * 400
        chat = [{"role": "user", "content": long}]
        for ask in (partial(tokenizer.encode, long, bos=False), partial(tokenizer.chat, chat)):
            ids = ask()
            assert ask(at_most=len(ids)) == ids
            for room in (1, len(ids) // 2, len(ids) - 1):
                try:
                    assert ask(at_most=room) == ids
                except TooLong as e:
                    assert "has at least" in str(e)


def test_spaces_before_a_token_that_takes_them_cost_no_more_than_others(copy):
    content = json.loads((copy / "tokenizer.json").read_text())
    token = {**content["added_tokens"][0], "content": "<mask>", "lstrip": True, "id": 5000}
    content["added_tokens"].append(token)
    (copy / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(copy)
    for end, count in (("y", 0), ("<mask>y", 1)):
        ids = tokenizer.encode("x" + " " * 300_000 + end, bos=False, special=True)
        assert ids.count(tokenizer.control["<mask>"]) == count
    assert tokenizer.decode(tokenizer.encode("a  <mask> b", bos=False, special=True)) == "a b"


def test_a_prompt_of_megabytes_is_refused_without_the_work(bpe):
    """Also one that is full of what control tokens begin with, or of the characters that could hide them."""
    tokenizer, private = Tokenizer.load(bpe), "".join(map(chr, range(0x10FFFD, 0x100000, -1)))
    for text in ("The quick brown fox. " * 500_000, "1" * 10**7, "<" * 10**7, private * 160):
        began = os.times()
        with pytest.raises(InputError, match=r"has at least [\d,]+ tokens \(10,\d+,\d+ characters\)"):
            tokenizer.chat([{"role": "user", "content": text}], at_most=2047)
        took = os.times()
        assert took.user + took.system - began.user - began.system < 2
