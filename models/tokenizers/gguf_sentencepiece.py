"""SentencePiece BPE from a GGUF file (`tokenizer.ggml.model` is `llama`): Llama 2, Mistral, TinyLlama.

A space is spelt `▁`. Two neighbours are joined where the result is a token, the one with the highest score first;
characters that are no tokens become their bytes, spelt `<0xE2>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, models

from headrace.core.errors import CheckpointError
from headrace.models.tokenizers.gguf import BYTE, NORMAL, UNKNOWN, GGUFTokenizer, Vocabulary

__all__ = ["build_sentencepiece_tokenizer"]

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def build_sentencepiece_tokenizer(data: Mapping[str, Any]) -> GGUFTokenizer:
    """Build it from the keys below `tokenizer.ggml.`. Raises `CheckpointError` naming file and key."""
    vocabulary = Vocabulary.read(data, add_bos=True)
    scores = data.get("scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{vocabulary.path}: tokenizer.ggml.scores must hold a number for each of {len(vocabulary.tokens)} tokens"
        )
    prefix = _SPACE if data.get("add_space_prefix", True) else ""
    engine = Tokenizer(_merging(vocabulary, scores))

    def encode_text(text: str) -> list[int]:
        ids: list[int] = engine.encode(prefix + text.replace(" ", _SPACE), add_special_tokens=False).ids
        return ids

    def spell(token: str) -> bytes:
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()

    return GGUFTokenizer(vocabulary, encode_text, spell)


def _merging(vocabulary: Vocabulary, scores: list[float]) -> models.BPE:
    """Turn scores into an order of merges: every way to make a token of two others, by the token's score."""
    kinds = (NORMAL, BYTE, UNKNOWN)
    ids = {token: at for at, token in enumerate(vocabulary.tokens) if vocabulary.types[at] in kinds}
    found: list[tuple[float, int, int, str, str]] = []
    for token, at in ids.items():
        if vocabulary.types[at] != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[at], left, right, token[:cut], token[cut:]))
    found.sort()
    unknown = next(
        (t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == UNKNOWN), None
    )
    return models.BPE(
        ids,
        [(left, right) for *_, left, right in found],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
