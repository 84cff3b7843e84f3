"""Token ids to text, a token at a time, without ever showing half a character.

Tokens are bytes and characters may span several of them, so bytes go through an incremental UTF-8 decoder: it
holds an unfinished character until it is complete or known to be bad. Each bad sequence becomes one U+FFFD.

A prompt given as ids may end inside a character. If the first bytes of the answer complete that character, it
is shown whole, as the answer's first one; else the answer is decoded as if it stood alone. Text that belongs
to the prompt is never shown either way.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from headrace.core.interfaces import Tokenizer

__all__ = ["IncrementalDetokenizer"]

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """One answer's text.

    Parameters
    ----------
    skip_special_tokens: hide the tokenizer's special and end tokens, wherever they stand.
    spaces_between_special_tokens: put a space between two of them that are shown one after the other.
    eos_token_ids: end tokens of this request that the tokenizer does not know as such; hidden with them.
    prompt_token_ids: what stands before the answer.

    Ids that the tokenizer does not know (a vocabulary padded by the model) have no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = False,
        eos_token_ids: Iterable[int] = (),
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._vocab_size = tokenizer.vocab_size
        self._hidden: frozenset[int] = frozenset()
        if skip_special_tokens:
            ends = {*tokenizer.eos_token_ids, *eos_token_ids}
            special = tokenizer.special_ids
            self._hidden = special if ends <= special else special | ends
        self._spaced: frozenset[int] = tokenizer.special_ids if spaces_between_special_tokens else frozenset()
        self._is_behind_spaced = False
        self._decoder = _utf8_decoder("replace")
        self._opened = _unfinished_character(tokenizer, prompt_token_ids)
        """Bytes of a character that the prompt began; empty as soon as its fate is known."""
        self._continuation = b""
        """The answer's bytes until then."""

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is certain now, often empty."""
        if token_id in self._hidden or not 0 <= token_id < self._vocab_size:
            return ""
        data = self._token_bytes(token_id)
        if self._spaced:
            data = b" " + data if self._is_behind_spaced and token_id in self._spaced else data
            self._is_behind_spaced = token_id in self._spaced
        if self._opened:
            data = self._cross_border(data)
        return self._decoder.decode(data)

    def flush(self) -> str:
        """End the text: return what was held, an unfinished character as one U+FFFD."""
        held, self._opened, self._continuation = self._continuation, b"", b""
        return self._decoder.decode(held, final=True)

    def _cross_border(self, data: bytes) -> bytes:
        """Return the bytes to decode, those of the prompt's last character included if they fit; none yet while
        that is open."""
        self._continuation += data
        character = self._opened + self._continuation
        length = _character_length(character[0])
        try:
            _utf8_decoder("strict").decode(character[:length])
        except UnicodeDecodeError:
            character = self._continuation
        else:
            if len(character) < length:
                return b""
        self._opened = self._continuation = b""
        return character


def _character_length(lead: int) -> int:
    """Return how many bytes a character with this first byte has; at least two, for it was left unfinished."""
    return 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


def _unfinished_character(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    """Return the bytes at the end of `token_ids` that begin a character without ending it."""
    data = b""
    for token_id in reversed(token_ids):
        if token_id in tokenizer.special_ids or not 0 <= token_id < tokenizer.vocab_size:
            break
        data = tokenizer.token_bytes(token_id) + data
        if len(data) >= 3:  # an unfinished character has at most three bytes
            break
    decoder = _utf8_decoder("replace")
    decoder.decode(data)
    return bytes(decoder.getstate()[0])
