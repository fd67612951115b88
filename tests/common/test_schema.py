"""Every record of a file: whatever the file holds, it is taken or refused in one line that names the key.

hypothesis draws the files, always the same ones, for so many seconds a test.
"""
import json
import math
import time
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.folder import FOLDER, HEADS, MEASURED, check_config
from checkpoint.gguf import METADATA
from checkpoint.published import GENERATION, INDEX, PUBLISHED, TOKENIZER
from common import schema
from common.errors import InputError
from common.schema import (
    Among,
    Digits,
    Either,
    Flag,
    Kind,
    List,
    Map,
    Name,
    Null,
    Number,
    Record,
    Sha256,
    Text,
    Whole,
    Wrong,
    in_words,
    record_of,
)
from drafters.rest import STORE
from engine.costs import KEPT
from evaluation.answers import Answer
from kernels.quantized import Scheme
from model import ROPE, ModelArgs, RopeScaling, inverse_frequencies
from tokens.files import TOKENIZER_CONFIG

SECONDS = 1.0  # a test
LEAST = 30  # examples, however slow the machine is
RECORDS = {
    "config.json of ours": FOLDER, "of a target": record_of(ModelArgs), "quantization": record_of(Scheme),
    **{f"of a {kind} head": record_of(head.Args) for kind, head in HEADS.items()},
    "config.json of others": PUBLISHED, "generation_config.json": GENERATION, "index": INDEX,
    "tokenizer_config.json": TOKENIZER_CONFIG, "tokenizer.json": TOKENIZER, "metadata of a GGUF": METADATA,
    "calibration.json": MEASURED, "costs.json": KEPT, "answers.jsonl": record_of(Answer), "store.json": STORE,
}
LEAVES = (
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.integers(-3, 70) | st.floats() | st.text()
    | st.sampled_from(("", "64", "\x1b[31mred\n", "a" * 9999, 2**31, 2**62, 10**30, 10**400))
    | st.sampled_from((math.nan, math.inf, -math.inf, 1e-320, 1e308))
)
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def values(kind: Kind) -> st.SearchStrategy:
    """Values that are of a kind."""
    match kind:
        case Null():
            return st.none()
        case Flag():
            return st.booleans()
        case Whole():
            near = st.integers(kind.low, min(kind.high, kind.low + 100))
            return near | st.sampled_from((kind.low, kind.high)) | st.integers(kind.low, kind.high)
        case Number():
            low = kind.low if kind.above is None else kind.above
            inner = st.floats(low, kind.high, exclude_min=kind.above is not None)
            return inner | st.just(kind.high)
        case Among():
            return st.sampled_from(kind.choices)
        case Text():
            return st.sampled_from(kind.choices) if kind.choices else st.text(max_size=min(kind.most, 20))
        case Digits():
            return st.integers(0, 10**8 - 1).map(str)
        case Sha256():
            return st.text("0123456789abcdef", min_size=64, max_size=64)
        case Name():
            return st.sampled_from(("mt_bench", "lookup+eagle3", "Größe", "a" * 200))
        case Either():
            return st.one_of(map(values, kind.kinds))
        case List():
            sizes = {"min_size": kind.least, "max_size": max(kind.least, min(kind.most, 4))}
            if kind.ascending:
                return st.lists(values(kind.kind), **sizes, unique=True).map(sorted)
            return st.lists(values(kind.kind), **sizes)
        case Map():
            names = st.text(max_size=9) if kind.keys.words == "anything" else values(kind.keys)
            return st.dictionaries(names, values(kind.kind), max_size=3)
        case Record():
            needed = {name: values(inner) for name, inner in kind.needed.items()}
            optional = {name: values(inner) for name, inner in kind.optional.items()}
            return st.fixed_dictionaries(needed, optional=optional)
        case RopeScaling():
            return st.one_of(values(record).map(lambda v, name=name: {**v, "rope_type": name})
                             for name, record in ROPE.items() if name != "llama3")
    return ANYTHING


def drawn(*strategies: st.SearchStrategy):
    """A decorator: the test is run on the same values every time, for so many seconds."""

    def decorate(test):
        def run(*known) -> None:
            end, count = time.monotonic() + SECONDS, 0

            @settings(max_examples=200, derandomize=True, deadline=None, database=None,
                      suppress_health_check=list(HealthCheck))
            @given(st.tuples(*strategies))
            def once(values) -> None:
                nonlocal count
                if time.monotonic() < end or count < LEAST:
                    count += 1
                    test(*known, *values)

            once()
            assert count >= LEAST

        return run

    return decorate


def refusal(check, *arguments) -> Wrong | None:
    """What `check` raises, which may be nothing but one line of a sensible length; None if it takes them."""
    try:
        check(*arguments)
    except Wrong as e:
        line = str(e)
        assert "\n" not in line and line.isprintable() and len(line) < 1200, line
        assert e.key and e.expected and "; expected " in line
        return e
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_what_is_no_file_of_the_kind_is_refused(name):
    drawn(ANYTHING)(lambda value: refusal(RECORDS[name].check, value))()


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_a_good_file_is_taken_and_a_bad_value_in_it_is_named(name):
    record = RECORDS[name]
    taken = refused = 0

    def check(good, odd, choice) -> None:
        nonlocal taken, refused
        assert refusal(record.check, good) is None
        names = sorted(record.needed | record.optional)
        key = names[choice % len(names)]
        error = refusal(record.check, {**good, key: odd})
        assert error is None or error.key.startswith((key, f"a name in {key}")), (key, str(error))
        taken, refused = taken + (error is None), refused + (error is not None)
        for lost in record.needed:
            assert refusal(record.check, {k: v for k, v in good.items() if k != lost}).key == lost

    drawn(values(record), ANYTHING, st.integers(0, 99))(check)()
    assert refused > 2  # of LEAST, on a slow machine


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_what_is_taken_can_be_written_and_is_taken_again(name):
    """As JSON, but for what JSON does not have: surrogates are written as escapes."""
    record = RECORDS[name]
    drawn(values(record))(lambda good: record.check(json.loads(json.dumps(good))))()


SMALL = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), st.integers(1, 64)),
    "num_layers": st.integers(1, 9), "num_heads": st.integers(1, 8), "num_kv_heads": st.integers(1, 2),
    "head_dim": st.sampled_from((2, 3, 8, 16, 64)), "num_experts": st.just(0),
    "experts_per_token": st.integers(0, 4),
}


def test_whatever_shape_is_taken_has_frequencies():
    """Finite ones, however strange its rope; and numbers that are multiples of each other where they must be.
    """
    record, count = record_of(ModelArgs), 0
    optional = {name: values(kind) for name, kind in record.optional.items() if name not in SMALL}

    def check(config) -> None:
        nonlocal count
        if refusal(ModelArgs.from_config, config):
            return
        args = ModelArgs.from_config(config)
        count += 1
        assert args.num_heads % args.num_kv_heads == 0 and args.head_dim % 2 == 0
        assert inverse_frequencies(args).shape == (args.head_dim // 2,)
        assert bool(inverse_frequencies(args).isfinite().all()) and math.isfinite(args.rope_factor), config

    drawn(st.fixed_dictionaries(SMALL, optional=optional))(check)()
    assert count > 10


def test_ids_are_below_the_vocabulary():
    config = {"kind": "target", **{f.name: 8 for f in fields(ModelArgs)[:7]}}

    def check(stop_ids, bos_id) -> None:
        error = refusal(check_config, config | {"stop_ids": stop_ids, "bos_id": bos_id})
        assert (error is None) == (max([*stop_ids, bos_id or 0]) < 8)
        assert error is None or error.key.startswith(("stop_ids[", "bos_id"))

    drawn(st.lists(st.integers(0, 12), max_size=3), st.none() | st.integers(0, 12))(check)()


@pytest.mark.parametrize("value", ("a" * 63, "a" * 65, "A" * 64, "g" * 64, "\u0661" * 64, " " + "a" * 63, 64))
def test_what_is_no_sha256(value):
    Sha256().check("0123456789abcdef" * 4, "sha256")
    with pytest.raises(Wrong, match=r"^sha256 is .*; expected a sha256, 64 of the digits 0 to 9 and a to f$"):
        Sha256().check(value, "sha256")


@pytest.mark.parametrize("scheme, words", [
    (("w8a8", 64, "w8a8"), "group is 64; expected 0: int4 or w4a8 has groups of inputs, others none"),
    (("int8", 32, None), "group is 32; expected 0:"), (("fp8", 128, True), "group is 128; expected 0:"),
    (("int4", 0, "int8"), "group is 0; expected 32 or 64 or 128: int4 or w4a8 has groups"),
    (("int8", 0, "w4a8"), "group is 0; expected 32 or 64 or 128:"), (("int8", 32, "int4"), None),
    (("w4a8", 64, None), None), (("w8a8", 0, False), None),
])
def test_groups_of_a_quantisation(scheme, words):
    config = dict(zip(("mode", "group", "lm_head"), scheme))
    error = refusal(Scheme.read, config)
    assert (error and str(error).startswith(f"quantization.{words}")) or error is words


@pytest.mark.parametrize("value, words", [
    (None, "null"), (True, "true"), (3, "3"), (10**30, "a whole number of 31 digits"), (math.nan, "nan"),
    ("a\x1b\n", r"'a\x1b\n'"), ((1, 2), "[1, 2]"),
])
def test_values_are_shown_on_one_line(value, words):
    assert in_words(value) == words


def test_kinds_say_what_they_expect():
    """The words of each kind, which a reader has to understand."""
    for kind, words in (
        (Whole(1, 3000), "a whole number from 1 to 3,000"), (Text("a", "b"), "'a' or 'b'"),
        (Number(above=0, high=1), "a number above 0 to 1"), (schema.maybe(Flag()), "null or true or false"),
        (List(Flag(), 1, 4, ascending=True), "a list of 1 to 4, ascending; in it true or false"),
        (Among(0, 32), "0 or 32"), (Map(Flag()), "an object"),
        (List(Flag(), 2, 2), "a list of 2; in it true or false"),
    ):
        assert kind.words == words
    line = r"^there/x\.json: a\.b is missing; expected true or false; do so$"
    with pytest.raises(InputError, match=line):
        Record({"a": Record({"b": Flag()})}).require({"a": {}}, "there/x.json", "do so")
