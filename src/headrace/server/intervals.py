"""Streams in larger chunks: so many tokens of an answer at a time, for clients that pay for each chunk."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.outputs import CompletionDelta, RequestUpdate

__all__ = ["Intervals"]

Placed = tuple[int, RequestUpdate]
"""The number of a prompt, and what is new of it."""


class Intervals:
    """Holds back what is new of each answer until enough is there; its first and last words come at once.

    tokens: of an answer in a chunk, at least 1, which holds back nothing.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._held: dict[tuple[int, int], CompletionDelta] = {}
        self._begun: set[tuple[int, int]] = set()

    def take(self, updates: Sequence[Placed]) -> Sequence[Placed]:
        """Return what is to be written now, in order."""
        if self._tokens == 1:
            return updates
        ready = []
        for place, update in updates:
            deltas = [due for delta in update.deltas if (due := self._due(place, delta)) is not None]
            if deltas:
                ready.append((place, RequestUpdate(update.output, deltas)))
        return ready

    def _due(self, place: int, delta: CompletionDelta) -> CompletionDelta | None:
        answer = (place, delta.index)
        held = self._held.pop(answer, None)
        whole = delta if held is None else _joined(held, delta)
        begins = answer not in self._begun
        if not begins and delta.finish_reason is None and len(whole.token_ids) < self._tokens:
            self._held[answer] = whole
            return None
        self._begun.add(answer)
        return whole


def _joined(first: CompletionDelta, second: CompletionDelta) -> CompletionDelta:
    logprobs = None
    if second.logprobs is not None or first.logprobs is not None:
        logprobs = [*(first.logprobs or []), *(second.logprobs or [])]
    return CompletionDelta(
        index=second.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        error=second.error,
        error_kind=second.error_kind,
    )
