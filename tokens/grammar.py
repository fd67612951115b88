"""JSON schemas and grammars as token masks, at every node of a draft tree.

llguidance computes the masks. A `Guide` has the state of the grammar after the committed tokens. For a tree
it advances along each path and rolls back.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from common.errors import InputError, library_errors, one_line, parse_json, read_json
from common.schema import InvalidValue
from engine.sampling import Sampling
from tokens.limits import LimitGuide, Limits, Pieces
from tokens.tokenizer import Tokenizer

# Without this limit, small models sometimes generate nothing but white space.
WHITESPACE = {"whitespace_pattern": r"[ \n\t]{0,12}"}
SCHEMA, GRAMMAR = "the JSON schema", "the grammar"
ANY_OBJECT = '{"type": "object"}'
MESSAGES = {  # pattern in llguidance's errors -> replacement
    r"Unimplemented keys: \[(.*)\]": r"\1 not supported", "Unknown format: (.*)": r"format \1 not supported",
    "Unsatisfiable schema: ": "no output satisfies it: ", "Invalid type: (.*)": r"type \1 unknown",
    "regex parse error.*?error: ": "regular expression: ",
    r"\n +\d+ \| .*": "",  # quoted lines of the grammar
}
MAX_SCHEMA_CHARS = 1 << 16  # characters of a schema or grammar


class Guide:
    """The tokens that a grammar allows next in a sequence. `Grammars.guide` makes one per request."""

    def __init__(self, matcher, stop_ids: frozenset[int], constraint: str):
        """matcher: an `llguidance.LLMatcher`. stop_ids: its tokenizer's. constraint: SCHEMA or GRAMMAR."""
        self._matcher, self._stop_ids, self._constraint = matcher, stop_ids, constraint

    @property
    def error(self) -> str | None:
        """The reason, on one line, why the output can no longer match the grammar; None if it can."""
        if not self._matcher.is_error():
            return None
        return f"{self._constraint} cannot be satisfied ({one_line(self._matcher.get_error())})"

    def advance(self, ids: Iterable[int]) -> None:
        """Append committed ids."""
        for token in ids:
            self._matcher.consume_token(token)

    def mask(self, tokens: list[int], parent: list[int], into: np.ndarray) -> None:
        """Write to `into` [T, ceil(V / 32)] int32 a bit per id: 1 if it may follow that node of a tree.

        tokens, parent: the nodes, each after its parent; the first is the root. Rows of nodes that the
        grammar forbids, and of nodes after a stop id, are not written.
        """
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(1, len(tokens)):
            children[parent[node]].append(node)
        self._descend(0, tokens, children, into)

    def _descend(self, node: int, tokens: list[int], children: list[list[int]], into: np.ndarray) -> None:
        row = into[node]
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        for child in children[node]:
            token = tokens[child]
            if token in self._stop_ids:  # a stopped matcher cannot roll back
                continue
            if row[token // 32] >> (token % 32) & 1 and self._matcher.consume_token(token):
                self._descend(child, tokens, children, into)
                self._matcher.rollback(1)


def grammar_of(text: str, tokenizer=None, constraint: str = SCHEMA) -> str:
    """Convert a JSON schema or grammar to llguidance's format. Raises InputError if it is invalid.

    tokenizer: an `llguidance.LLTokenizer`; None: skip the checks that need one.
    """
    from llguidance import LLMatcher  # few requests need it
    from llguidance.gbnf_to_lark import any_to_lark

    if len(text) > MAX_SCHEMA_CHARS:
        raise InputError(f"{constraint} has {len(text):,} characters, at most {MAX_SCHEMA_CHARS:,}")
    if constraint == SCHEMA and not text.lstrip().startswith("{"):
        raise InputError(f"{constraint} is {text[:60]!r}; expected an object, as JSON or a dictionary")
    with library_errors(f"{constraint} cannot be used"):
        if constraint == SCHEMA:
            parse_json(text, constraint)
            grammar = LLMatcher.grammar_from_json_schema(text, overrides=WHITESPACE)
        else:
            grammar = LLMatcher.grammar_from_lark(any_to_lark(text))
        problem = LLMatcher.validate_grammar(grammar, tokenizer)
    if problem:
        raise InputError(f"{constraint} cannot be used: {_explained(problem)}")
    return grammar


def _explained(problem: str) -> str:
    """Format an error of llguidance on one line, see MESSAGES."""
    for words, ours in MESSAGES.items():
        problem = re.sub(words, ours, problem, flags=re.DOTALL)
    return one_line(problem)


def grammar_of_choices(choices: Iterable[str]) -> str:
    """Return a grammar that allows exactly these texts."""
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)


def grammar_of_regex(pattern: str) -> str:
    """Return the grammar of texts that a regular expression matches completely."""
    inner = re.sub(r"(?<!\\)((?:\\\\)*)\$$", r"\1", pattern.removeprefix("^"))
    escaped = re.sub(r"\\.|/|\n", lambda m: {"/": r"\/", "\n": r"\n"}.get(m[0], m[0]), inner, flags=re.DOTALL)
    return f"start: /{escaped}/"


def read_schema(option: str | None) -> str:
    """Return a JSON schema, passed inline or as a file; None: that of any object.

    Raises InputError like `grammar_of`.
    """
    option = option or ANY_OBJECT
    is_inline = option.lstrip().startswith(("{", "[", '"'))
    schema = option if is_inline else json.dumps(read_json(option))
    grammar_of(schema)
    return schema


class Grammars:
    """Makes guides for a tokenizer.

    vocab_size: the model's; ids without bytes are never allowed. stop_ids: allowed where the grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: list[int]):
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, stop_ids

    @cached_property
    def _wrapped(self):
        """The tokenizer, adapted to llguidance."""
        import llguidance  # few requests need it

        tokenizer, vocab_size, stop_ids = self._tokenizer, self._vocab_size, self._stop_ids

        class Wrapped:
            """Adapter for llguidance's TokenizerWrapper."""

            eos_token_id, bos_token_id = stop_ids[0], tokenizer.bos_id
            tokens = tuple(map(tokenizer.piece_or_name, range(vocab_size)))
            special_token_ids = tuple(i for i in tokenizer.control.values() if i < vocab_size)

            def __call__(self, text: bytes | str) -> list[int]:
                return tokenizer.encode(text if isinstance(text, str) else text.decode(), bos=False)

        wrapped = llguidance.TokenizerWrapper(Wrapped())
        return llguidance.LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=stop_ids)

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self._tokenizer, self._vocab_size)

    def guide_of(self, sampling: Sampling) -> Guide | LimitGuide:
        """Return the guide of a request. Raises InputError if no output can match it."""
        schema, limits, guide = sampling.json_schema, sampling.limits, None
        if schema is not None:
            guide = self.guide(schema)
        if limits is None:
            return guide
        if not isinstance(limits, Limits):
            raise InvalidValue("limits", limits, "a tokens.limits: Limits")
        if limits.min_tokens > sampling.max_new_tokens:
            most = sampling.max_new_tokens
            raise InputError(f"min_tokens {limits.min_tokens}: must be at most max_tokens, {most}")
        if limits.grammar is not None:
            if guide:
                raise InputError("a JSON schema and a grammar: pass only one of them")
            guide = self.guide(limits.grammar, GRAMMAR)
        return LimitGuide(self._pieces, self._stop_ids, limits, guide)

    def guide(self, text: str, constraint: str = SCHEMA) -> Guide:
        """Return the guide of a JSON schema or grammar. Raises InputError if no output can match it."""
        from llguidance import LLMatcher

        grammar = grammar_of(text, self._wrapped, constraint)
        with library_errors(f"{constraint} cannot be used"):
            matcher = LLMatcher(self._wrapped, grammar, log_level=0)
        if matcher.is_error():
            raise InputError(f"{constraint} cannot be used: {_explained(matcher.get_error())}")
        guide = Guide(matcher, frozenset(self._stop_ids), constraint)
        # Some schemas, such as {"$ref": "#"}, fail only at the first mask.
        guide.mask([0], [0], np.empty((1, -(-self._vocab_size // 32)), np.int32))
        if guide.error:
            raise InputError(f"{guide.error}; a schema that is only a reference to itself matches no output")
        return guide
