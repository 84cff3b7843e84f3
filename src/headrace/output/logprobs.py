"""Log-probabilities as the sampler sends them, turned into what a caller reads."""

from __future__ import annotations

from headrace.core.interfaces import Tokenizer
from headrace.core.logprobs import PromptLogprobs, TokenLogprobs
from headrace.outputs import Logprob

__all__ = ["PromptLogprobsBuilder", "TokenTexts", "readable"]


class TokenTexts:
    """The text of single tokens, remembered: at most one entry an id of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """Return a token's own text: parts of characters as U+FFFD, nothing for an id the tokenizer lacks."""
        text = self._texts.get(token_id)
        if text is None:
            known = 0 <= token_id < self._tokenizer.vocab_size
            data = self._tokenizer.token_bytes(token_id) if known else b""
            text = self._texts[token_id] = data.decode("utf-8", "replace")
        return text


def readable(entry: TokenLogprobs, texts: TokenTexts | None) -> dict[int, Logprob]:
    """Return a position's candidates by id: the token that stands there first, then the likeliest by rank, then those
    that were asked for by id."""
    own, *others = entry.token_ids
    candidates = {own: Logprob(entry.logprobs[0], entry.rank, texts(own) if texts else None)}
    for rank, (token_id, logprob) in enumerate(zip(others, entry.logprobs[1:], strict=True), start=1):
        if token_id != own:
            candidates[token_id] = Logprob(logprob, rank, texts(token_id) if texts else None)
    for token_id, logprob, rank in entry.more:
        candidates.setdefault(token_id, Logprob(logprob, rank, texts(token_id) if texts else None))
    return candidates


class PromptLogprobsBuilder:
    """Collects a prompt's log-probabilities, which come chunk by chunk and again after a preemption."""

    def __init__(self, prompt_length: int, texts: TokenTexts | None) -> None:
        self._entries: list[dict[int, Logprob] | None] = [None] * prompt_length
        self._missing = prompt_length - 1  # the first token has nothing before it
        self._texts = texts

    def add(self, part: PromptLogprobs) -> None:
        """Take positions [start, start + len(entries)); those known already are passed over."""
        for position, entry in enumerate(part.entries, start=part.start):
            if self._entries[position] is None:
                self._entries[position] = readable(entry, self._texts)
                self._missing -= 1

    @property
    def complete(self) -> list[dict[int, Logprob] | None] | None:
        """All entries, or None while some are missing."""
        return self._entries if self._missing == 0 else None
