"""How the tokens of a vocabulary spell bytes, and how few of them a text can have."""
from __future__ import annotations

import re
from typing import NamedTuple

from common.errors import InputError

SPACE = "▁"  # how sentencepiece spells a space
NO_WORD = bytes(b for b in range(256) if not chr(b).isalnum() or b > 127)


def byte_alphabet() -> dict[str, int]:
    """Character -> byte, as byte-level BPE spells them (GPT-2, https://github.com/openai/gpt-2, encoder.py).

    Visible Latin-1 characters stand for themselves, U+0100 and up for the other bytes.
    """
    visible = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b]
    others = sorted({*range(256)} - {*visible})
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(others)}


BYTES = byte_alphabet()


def spelled(how: str, token: str) -> bytes:
    """The bytes of a token.

    how: "byte-level"; "fallback", sentencepiece's with bytes such as `<0xE2>`; "plain", the same without
    these; "latin-1", in which characters are bytes.
    """
    if how == "latin-1":
        return token.encode("latin-1")
    if how == "byte-level":
        return bytes(BYTES[c] for c in token) if BYTES.keys() >= set(token) else token.encode()
    return (how == "fallback" and fallback_byte(token)) or token.replace(SPACE, " ").encode()


def fallback_byte(piece: str) -> bytes:
    """b"\\xe2" of the byte-fallback piece `<0xE2>`, nothing of any other."""
    return bytes([int(piece[3:5], 16)]) if re.fullmatch("<0x[0-9A-F]{2}>", piece) else b""


class TooLong(InputError, ValueError):
    """A text has more tokens than there is room for. The message says how many, without a subject."""


class Shape(NamedTuple):
    """What the longest tokens hold, which bounds how few a text can have.

    size: bytes, None if white space may be left out. letters: ASCII letters and digits. composes: the text is
    brought to Unicode's normal form C first. lost: bytes that no token stands for; they are left out.
    """

    size: int | None
    letters: int
    composes: bool
    lost: bytes

    @classmethod
    def of(cls, how: str, tokens: list[str], strips: bool, composes: bool) -> Shape:
        """Of a tokenizer with these tokens, that leaves nothing out that a token stands for.

        strips: tokens may take in the white space beside them.
        """
        known = [spelled(how, token) for token in tokens]
        single = {token[0] for token in known if len(token) == 1}
        lost = bytes(b for b in range(256) if b not in single)
        letters = max((len(token.translate(None, NO_WORD)) for token in known), default=1)
        size = None if strips else max(map(len, known), default=1)
        return cls(size, max(1, letters), composes, lost)

    def fewest(self, text: str) -> int:
        """How many tokens the text has at least."""
        if self.composes and not text.isascii():
            # What is composed disappears in another character. All that may be is not counted.
            text = re.sub(r".[\u0300-\U0010ffff]+", "", text, flags=re.DOTALL)
        data = text.encode("utf-8", "replace").translate(None, self.lost)
        fewest = -(-len(data.translate(None, NO_WORD)) // self.letters)
        return max(fewest, -(-len(data) // self.size) if self.size else 0)
