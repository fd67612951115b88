"""Outputs of a form: a JSON schema as a mask over the tokens, at every node of a tree.

The masks are llguidance's. A `Guide` stands where its text ends; for a tree it walks down and back up again.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from common.cli import on_one_line
from common.errors import InputError, is_panic
from tokens.schema import LONGEST
from tokens.tokenizer import Tokenizer

Result = TypeVar("Result")
# Small models that may write any amount of white space sometimes write nothing else.
WHITESPACE = {"whitespace_pattern": r"[ \n\t]{0,12}"}


class Guide:
    """Which tokens may follow a text, by a grammar. Made by `Grammars.guide`, for one text."""

    def __init__(self, matcher, stop_ids: frozenset[int]):
        """matcher: a `llguidance.LLMatcher`. stop_ids: of its tokenizer; they end a text."""
        self._matcher, self._stop_ids = matcher, stop_ids

    @property
    def error(self) -> str | None:
        """Why the text cannot be kept to the grammar any more, such as that this takes too long; one line."""
        if not self._matcher.is_error():
            return None
        return f"the JSON schema cannot be followed ({on_one_line(self._matcher.get_error())})"

    def take(self, ids: Iterable[int]) -> None:
        """The text goes on with these ids."""
        for token in ids:
            self._matcher.consume_token(token)

    def mask(self, tokens: list[int], parent: list[int], into: np.ndarray) -> None:
        """Fill into [T, words] int32 with a bit for each id that may follow each node of a tree.

        tokens, parent: the nodes, each after its parent, the root, at which the text ends, first. Nodes that
        the grammar forbids themselves, and those where the text is over, keep what `into` holds: nothing that
        follows them counts.
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
            if token in self._stop_ids:  # a matcher that has stopped does not go back to where it was
                continue
            if row[token // 32] >> (token % 32) & 1 and self._matcher.consume_token(token):
                self._descend(child, tokens, children, into)
                self._matcher.rollback(1)


def grammar_of(schema: str, tokenizer=None) -> str:
    """llguidance's grammar of a JSON schema, which it has judged. Raises InputError if it cannot be used.

    tokenizer: a `llguidance.LLTokenizer`; without one all is judged that does not depend on it.
    """
    from llguidance import LLMatcher  # which few requests need

    if len(schema) > LONGEST:
        raise InputError(f"the JSON schema has {len(schema):,} characters, at most {LONGEST:,}")
    grammar = _within_llguidance(lambda: LLMatcher.grammar_from_json_schema(schema, overrides=WHITESPACE))
    if problem := _within_llguidance(lambda: LLMatcher.validate_grammar(grammar, tokenizer)):
        raise _unusable(problem)
    return grammar


def _within_llguidance(action: Callable[[], Result]) -> Result:
    """What an action returns. Raises InputError where llguidance refuses, or panics."""
    try:
        return action()
    except BaseException as e:
        if not isinstance(e, ValueError) and not is_panic(e):
            raise
        raise _unusable(str(e)) from None


def _unusable(problem: str) -> InputError:
    return InputError(f"the JSON schema cannot be used ({on_one_line(problem)})")


class Grammars:
    """Makes guides for the texts of one tokenizer.

    vocabulary: ids that the model knows, of which those without bytes are never allowed. stop_ids: they end
    an output, where the grammar lets it end.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stop_ids: list[int]):
        import llguidance  # which few requests need

        control = {i: text.encode() for text, i in tokenizer.control.items() if i < vocabulary}

        class Wrapped:
            """What llguidance asks of a tokenizer."""

            eos_token_id, bos_token_id = next(iter(stop_ids)), tokenizer.bos_id
            tokens = tuple(control.get(i) or tokenizer.piece(i) for i in range(vocabulary))
            special_token_ids = tuple(control)

            def __call__(self, text: bytes | str) -> list[int]:
                return tokenizer.encode(text if isinstance(text, str) else text.decode(), bos=False)

        self._matcher, self._stop_ids = llguidance.LLMatcher, frozenset(stop_ids)
        self._vocabulary = vocabulary
        wrapped = llguidance.TokenizerWrapper(Wrapped())
        self._tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=vocabulary, eos_token=list(stop_ids))

    def guide(self, schema: str) -> Guide:
        """A guide for a text in JSON that fits a schema. Raises InputError if the schema is none."""
        grammar = grammar_of(schema, self._tokenizer)
        matcher = _within_llguidance(lambda: self._matcher(self._tokenizer, grammar, log_level=0))
        if matcher.is_error():
            raise _unusable(matcher.get_error())
        guide = Guide(matcher, self._stop_ids)
        # Some schemas, such as one that refers to itself alone, show only here that nothing can follow them.
        guide.mask([0], [0], np.empty((1, -(-self._vocabulary // 32)), np.int32))
        if guide.error:
            raise InputError(f"{guide.error}; no text fits one that refers to itself alone")
        return guide
