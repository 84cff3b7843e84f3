"""SentencePiece BPE from a GGUF file (`tokenizer.ggml.model` is `llama`): Llama 2, Mistral, TinyLlama, Gemma.

A space is spelt `▁`. Two neighbours are joined where the result is a token, the one with the highest score first and
of equals the leftmost; characters that are no tokens become their bytes, spelt `<0xE2>`.

The joins are looked up as they come up: a table of all of them, which tokenizer libraries want, would take longer to
make than a small model takes to load.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any

from headrace.core.errors import CheckpointError
from headrace.models.tokenizers.gguf import BYTE, NORMAL, UNKNOWN, GGUFTokenizer, Vocabulary

__all__ = ["build_sentencepiece_tokenizer"]

WORDS_KEPT = 1 << 16
"""How many words' ids are remembered."""
LONG_WORD = 64
"""Characters: longer ones are not."""

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD = re.compile(f"{_SPACE}*[^{_SPACE}]+|{_SPACE}+")
_SPACE_WITHIN = re.compile(f"[^\0{_SPACE}]{_SPACE}")


def build_sentencepiece_tokenizer(data: Mapping[str, Any]) -> GGUFTokenizer:
    """Build it from the keys below `tokenizer.ggml.`. Raises `CheckpointError` naming file and key."""
    vocabulary = Vocabulary.read(data, add_bos=True)
    scores = data.get("scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{vocabulary.path}: tokenizer.ggml.scores must hold a number for each of {len(vocabulary.tokens)} tokens"
        )
    prefix = _SPACE if data.get("add_space_prefix", True) else ""
    merged = _merging(vocabulary, scores)

    def encode_text(text: str) -> list[int]:
        return merged(prefix + text.replace(" ", _SPACE))

    def spell(token: str) -> bytes:
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()

    return GGUFTokenizer(vocabulary, encode_text, spell)


def _merging(vocabulary: Vocabulary, scores: list[float]) -> Callable[[str], list[int]]:
    """Return what turns text, its spaces spelt, into ids; thread-safe."""
    kinds = vocabulary.types
    ids = {token: at for at, token in enumerate(vocabulary.tokens) if kinds[at] == NORMAL}
    spelt = _fallback(vocabulary)

    def word_ids(word: str) -> tuple[int, ...]:
        found: list[int] = []
        for part in _joined(word, ids, scores):
            known = ids.get(part)
            found += spelt(part) if known is None else (known,)
        return tuple(found)

    remembered = lru_cache(WORDS_KEPT)(word_ids)
    # No token has a space behind something else: nothing is ever joined over the beginning of a word.
    words_stand_alone = _SPACE_WITHIN.search("\0".join(ids)) is None

    def encode(text: str) -> list[int]:
        found: list[int] = []
        for word in _WORD.findall(text) if words_stand_alone else (text,):
            found += remembered(word) if len(word) <= LONG_WORD else word_ids(word)
        return found

    return encode


def _fallback(vocabulary: Vocabulary) -> Callable[[str], tuple[int, ...]]:
    """Return what spells a character that is no token: by its bytes, or by the unknown token where one is missing."""
    of_byte: dict[int, int] = {}
    unknown: tuple[int, ...] = ()
    for at, kind in enumerate(vocabulary.types):
        if kind == BYTE and (byte := _BYTE.fullmatch(vocabulary.tokens[at])):
            of_byte[int(byte[1], 16)] = at
        elif kind == UNKNOWN and not unknown:
            unknown = (at,)

    def spelt(character: str) -> tuple[int, ...]:
        found = tuple(of_byte.get(byte, -1) for byte in character.encode())
        return unknown if -1 in found else found

    return spelt


def _joined(word: str, ids: Mapping[str, int], scores: list[float]) -> list[str]:
    """Return the parts a word ends up in."""
    parts = list(word)
    end = len(parts)
    before, after = list(range(-1, end)), list(range(1, end + 1))
    joins: list[tuple[float, int, str]] = []
    for at in range(end - 1):
        text = parts[at] + parts[at + 1]
        if text in ids:
            joins.append((-scores[ids[text]], at, text))
    heapify(joins)
    while joins:
        _, left, text = heappop(joins)
        right = after[left]
        # One of the two may have been joined with another neighbour since.
        if right == end or not parts[left] or parts[left] + parts[right] != text:
            continue
        parts[left], parts[right] = text, ""
        after[left] = after[right]
        before[after[left]] = left
        for at in (before[left], left):
            if at >= 0 and after[at] < end:
                text = parts[at] + parts[after[at]]
                if text in ids:
                    heappush(joins, (-scores[ids[text]], at, text))
    return [part for part in parts if part]
