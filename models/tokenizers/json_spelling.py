"""How a tokenizer.json spells its tokens: from a token of the vocabulary to the bytes it stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headrace.models.tokenizers.gguf_bpe import byte_alphabet

__all__ = ["speller"]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece spells a space."""


def speller(file: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Return the function that spells, by the file's decoder, or by its model where it has none.

    file: the parsed tokenizer.json. Words whose tokens do not hold the space between them (WordPiece, WordLevel)
    begin with one, as those of SentencePiece do.
    """
    decoders = {str(part.get("type")): part for part in _parts(file.get("decoder"))}
    model = file["model"]
    if "ByteLevel" in decoders:
        return _byte_level()
    if "WordPiece" in decoders or model.get("type") == "WordPiece":
        prefix = decoders.get("WordPiece", {}).get("prefix") or model.get("continuing_subword_prefix") or "##"
        return _word_pieces(str(prefix))
    if "BPEDecoder" in decoders:
        suffix = str(decoders["BPEDecoder"].get("suffix", "</w>"))
        return lambda token: token.replace(suffix, " ").encode()
    if model.get("type") == "WordLevel":
        return lambda token: f" {token}".encode()
    return _sentence_pieces(str(decoders.get("Metaspace", {}).get("replacement", _SPACE)))


def _parts(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a decoder's parts, those of sequences one by one."""
    if isinstance(decoder, Mapping):
        yield decoder
        for part in decoder.get("decoders", ()):
            yield from _parts(part)


def _byte_level() -> Callable[[str], bytes]:
    to_byte = {ord(character): byte for character, byte in byte_alphabet().items()}

    def spell(token: str) -> bytes:
        try:
            return token.translate(to_byte).encode("latin-1")
        except UnicodeEncodeError:  # not in the alphabet: spelt as it is
            return token.encode()

    return spell


def _word_pieces(prefix: str) -> Callable[[str], bytes]:
    def spell(token: str) -> bytes:
        inside = token.startswith(prefix) and len(token) > len(prefix)
        return (token.removeprefix(prefix) if inside else f" {token}").encode()

    return spell


def _sentence_pieces(space: str) -> Callable[[str], bytes]:
    def spell(token: str) -> bytes:
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(space, " ").encode()

    return spell
