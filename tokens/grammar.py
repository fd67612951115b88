"""JSON schemas as masks over the tokens, at every node of a tree.

llguidance makes the masks. A `Guide` keeps the state of the grammar where its text ends. For a tree it walks
down and back up.
"""
from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from common.errors import InputError, library_errors, one_line
from common.files import read_json
from tokens.tokenizer import Tokenizer

# Small models that may write any amount of white space sometimes write nothing else.
WHITESPACE = {"whitespace_pattern": r"[ \n\t]{0,12}"}
UNUSABLE = "the JSON schema cannot be used"
ANY_OBJECT = '{"type": "object"}'
LONGEST_SCHEMA = 1 << 16  # characters of a schema


class Guide:
    """The tokens that a grammar allows after a text. `Grammars.guide` makes one per text."""

    def __init__(self, matcher, stop_ids: frozenset[int]):
        """matcher: a `llguidance.LLMatcher`. stop_ids: of its tokenizer; they end a text."""
        self._matcher, self._stop_ids = matcher, stop_ids

    @property
    def error(self) -> str | None:
        """The reason, on one line, why the text cannot follow the grammar any more; None if it can."""
        if not self._matcher.is_error():
            return None
        return f"the JSON schema cannot be followed ({one_line(self._matcher.get_error())})"

    def take(self, ids: Iterable[int]) -> None:
        """Append these ids to the text."""
        for token in ids:
            self._matcher.consume_token(token)

    def mask(self, tokens: list[int], parent: list[int], into: np.ndarray) -> None:
        """Fill `into` [T, words] int32 with one bit per id: set if the id may follow that node of a tree.

        tokens, parent: the nodes, each after its parent. The first is the root, where the text ends. Rows of
        nodes that the grammar forbids, and of nodes after the end, do not change: nothing uses them.
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
            if token in self._stop_ids:  # a matcher that has stopped cannot go back
                continue
            if row[token // 32] >> (token % 32) & 1 and self._matcher.consume_token(token):
                self._descend(child, tokens, children, into)
                self._matcher.rollback(1)


def grammar_of(schema: str, tokenizer=None) -> str:
    """Return llguidance's grammar of a JSON schema. Raises InputError if it cannot be used.

    tokenizer: a `llguidance.LLTokenizer`; without one, everything is checked that does not depend on it.
    """
    from llguidance import LLMatcher  # few requests need it

    if len(schema) > LONGEST_SCHEMA:
        raise InputError(f"the JSON schema has {len(schema):,} characters, at most {LONGEST_SCHEMA:,}")
    with library_errors(UNUSABLE):
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=WHITESPACE)
        problem = LLMatcher.validate_grammar(grammar, tokenizer)
    if problem:
        raise InputError(f"{UNUSABLE} ({one_line(problem)})")
    return grammar


def read_schema(path: str | None) -> str:
    """Return the JSON schema of a file, by default that of any object. Raises InputError as `grammar_of`."""
    schema = json.dumps(read_json(path)) if path else ANY_OBJECT
    grammar_of(schema)
    return schema


class Grammars:
    """Makes guides for the texts of one tokenizer.

    vocabulary: the number of ids of the model; those without bytes are never allowed. stop_ids: they end an
    output, where the grammar lets it end.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stop_ids: list[int]):
        import llguidance  # few requests need it

        class Wrapped:
            """A tokenizer as llguidance's TokenizerWrapper needs it."""

            eos_token_id, bos_token_id = stop_ids[0], tokenizer.bos_id
            tokens = tuple(map(tokenizer.spelled, range(vocabulary)))
            special_token_ids = tuple(i for i in tokenizer.control.values() if i < vocabulary)

            def __call__(self, text: bytes | str) -> list[int]:
                return tokenizer.encode(text if isinstance(text, str) else text.decode(), bos=False)

        self._matcher, self._stop_ids = llguidance.LLMatcher, frozenset(stop_ids)
        self._vocabulary = vocabulary
        wrapped = llguidance.TokenizerWrapper(Wrapped())
        self._tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=vocabulary, eos_token=stop_ids)

    def guide(self, schema: str) -> Guide:
        """Return a guide for a text in JSON that fits a schema. Raises InputError if no text can."""
        grammar = grammar_of(schema, self._tokenizer)
        with library_errors(UNUSABLE):
            matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InputError(f"{UNUSABLE} ({one_line(matcher.get_error())})")
        guide = Guide(matcher, self._stop_ids)
        # Some schemas, such as one that refers to itself alone, fail only here.
        guide.mask([0], [0], np.empty((1, -(-self._vocabulary // 32)), np.int32))
        if guide.error:
            raise InputError(f"{guide.error}; no text fits one that refers to itself alone")
        return guide
