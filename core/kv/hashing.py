"""Chained block hashes: a block's content is named by its tokens, its keys and everything before it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from headrace.core.request import BlockKey

__all__ = ["block_hash"]


def block_hash(parent: bytes, token_ids: Sequence[int], keys: Sequence[BlockKey], start: int) -> bytes:
    """Return SHA-256 of (parent, tokens, keys that meet the block's span).

    32 bytes of a collision-free hash: two contents with one name are not to be met with, so a hit is not compared
    token by token. The same in every process.

    parent: the hash of the block before, `b""` for the first. start: position of the block's first token.
    """
    end = start + len(token_ids)
    digest = hashlib.sha256(parent)
    digest.update(array("q", token_ids).tobytes())
    for key in keys:
        if key.start < end and (key.end is None or key.end > start):
            # Relative to the block, so that the same image further down a prompt is the same content only if
            # it lies the same way in the block; the parent's hash fixes the absolute place.
            span = array("q", (key.start - start, -1 if key.end is None else key.end - start, len(key.value)))
            digest.update(span.tobytes())
            digest.update(key.value)
    return digest.digest()
