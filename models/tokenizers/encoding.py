"""Text to ids by the `tokenizers` library, without keeping other threads waiting while a long text is worked on."""

from __future__ import annotations

from tokenizers import Tokenizer

__all__ = ["encode_ids"]

LONG_TEXT = 2000
"""Characters: below, a text takes less than a millisecond."""


def encode_ids(engine: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return a text's ids."""
    if len(text) < LONG_TEXT:
        ids: list[int] = engine.encode(text, add_special_tokens=add_special_tokens).ids
        return ids
    # Of the library's calls this one lets go of the interpreter's lock; a single text's encode keeps it.
    [encoding] = engine.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    long_ids: list[int] = encoding.ids
    return long_ids
