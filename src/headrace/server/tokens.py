"""How tokens are written in answers: their text, their bytes, and where they stand in a text."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from headrace.core.interfaces import Tokenizer
from headrace.outputs import Logprob
from headrace.server.answers import (
    ChatLogprobs,
    ChatToken,
    CompletionLogprobs,
    PromptLogprobs,
    TokenAlternative,
)

__all__ = ["Candidates", "CompletionTokens", "TokenWriter", "prompt_logprobs"]

LEAST = -9999.0
"""Stands for minus infinity, which JSON has no number for."""

Candidates = dict[int, Logprob]
"""The token that stands at a position first, then the likeliest."""

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TokenWriter:
    """Writes tokens of one model.

    as_ids: `token_id:N` in place of a text; so it is where the model has no tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokenizer's special tokens."""
        return frozenset() if self._tokenizer is None else self._tokenizer.special_ids

    def data(self, token_id: int) -> bytes:
        """Return a token's bytes; none for an id that the tokenizer does not know."""
        known = self._tokenizer is not None and 0 <= token_id < self._tokenizer.vocab_size
        return self._tokenizer.token_bytes(token_id) if self._tokenizer is not None and known else b""

    def text(self, token_id: int) -> str:
        """Return a token as an answer shows it; a part of a character as `bytes:\\xe2\\x80`."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def prompt_text(self, token_ids: Iterable[int]) -> str:
        """Return the text of a prompt that was given as ids."""
        return b"".join(map(self.data, token_ids)).decode("utf-8", "replace")

    def chat(
        self, entries: list[Candidates], num_top: int, also: Collection[int] = frozenset()
    ) -> ChatLogprobs:
        """Return a chat's log-probabilities, with the `num_top` likeliest tokens at each position.

        also: ids that are told besides.
        """
        content = []
        for candidates in entries:
            token_id, own = next(iter(candidates.items()))
            ranked = sorted(candidates.items(), key=lambda item: item[1].rank)
            top = [
                TokenAlternative(token=self.text(i), logprob=_finite(c.logprob), bytes=list(self.data(i)))
                for i, c in ranked
                if c.rank <= num_top or i in also
            ]
            content.append(
                ChatToken(
                    token=self.text(token_id),
                    logprob=_finite(own.logprob),
                    bytes=list(self.data(token_id)),
                    top_logprobs=top,
                )
            )
        return ChatLogprobs(content)


class CompletionTokens:
    """Log-probabilities of one answer of /v1/completions, piece by piece.

    A token's offset is the number of characters before the one that its first byte belongs to. Hidden tokens take
    up no place.

    hidden: ids that the answer's text does not show.
    spaced: ids that have a space between them where one follows another.
    """

    def __init__(
        self, writer: TokenWriter, hidden: Collection[int], spaced: Collection[int] = frozenset()
    ) -> None:
        self._writer = writer
        self._hidden = hidden
        self._spaced = spaced
        self._is_behind_spaced = False
        self._decoder = _utf8_decoder("replace")
        self._num_characters = 0

    def prompt(self, text: str, token_ids: list[int], entries: list[Candidates | None]) -> CompletionLogprobs:
        """Return those of the prompt that `text` shows. To be called before any token of the answer.

        entries: one a token, the first None.
        """
        data, place = text.encode(), 0
        decoder, offset = _utf8_decoder("replace"), 0
        offsets = []
        for token_id in token_ids:
            own = self._writer.data(token_id)
            offsets.append(offset)
            for piece in (own, own.removeprefix(b" ")):  # some tokenizers put a space before a text
                if data.startswith(piece, place):
                    place += len(piece)
                    offset += len(decoder.decode(piece))
                    break
        self._num_characters = len(text)
        return self._lists(token_ids, entries, offsets)

    def answer(self, token_ids: list[int], entries: list[Candidates]) -> CompletionLogprobs:
        """Return those of the next tokens of the answer."""
        offsets = []
        for token_id in token_ids:
            if token_id not in self._hidden:
                self._num_characters += self._is_behind_spaced and token_id in self._spaced
                self._is_behind_spaced = token_id in self._spaced
            offsets.append(self._num_characters)
            if token_id not in self._hidden:
                self._num_characters += len(self._decoder.decode(self._writer.data(token_id)))
        return self._lists(token_ids, list(entries), offsets)

    def _lists(
        self, token_ids: list[int], entries: list[Candidates | None], offsets: list[int]
    ) -> CompletionLogprobs:
        top: list[dict[str, float] | None] = []
        logprobs: list[float | None] = []
        for candidates in entries:
            if candidates is None:
                logprobs.append(None)
                top.append(None)
                continue
            logprobs.append(_finite(next(iter(candidates.values())).logprob))
            top.append({self._writer.text(i): _finite(c.logprob) for i, c in candidates.items()})
        return CompletionLogprobs([self._writer.text(i) for i in token_ids], logprobs, top, offsets)


def prompt_logprobs(entries: list[Candidates | None] | None) -> PromptLogprobs | None:
    """Return a prompt's log-probabilities as the field of that name has them."""
    if entries is None:
        return None
    return [
        None
        if candidates is None
        else {
            str(token_id): {"logprob": _finite(c.logprob), "rank": c.rank, "decoded_token": c.decoded_token}
            for token_id, c in candidates.items()
        }
        for candidates in entries
    ]


def _finite(logprob: float) -> float:
    """Return a number that JSON can hold."""
    return max(LEAST, logprob)
