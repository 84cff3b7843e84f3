"""Which tokens a request may go on with: masks behind its last confirmed token, and behind each of its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core.errors import HeadraceError, RequestError
from headrace.core.interfaces import Grammar, GrammarMatcher

__all__ = ["Constrained", "Masks", "Turn", "make_masks"]

Masks = dict[tuple[str, int], NDArray[np.bool_]]
"""(request id, position of the token to be drawn) → [V], True where a token is forbidden."""


@dataclass
class Constrained:
    """One request under way. Whoever makes its masks owns it until they are made."""

    grammar: Future[Grammar]
    matcher: GrammarMatcher | None = None
    num_accepted: int = 0
    """Tokens of the answer that the matcher took."""
    error: HeadraceError | None = None
    """It cannot go on, and why."""

    def accept(self, token_id: int) -> bool:
        """Take a confirmed token of the answer; True: it was the last.

        Raises `RequestError` where it does not fit.
        """
        if self.matcher is None:
            self.matcher = self.grammar.result().matcher()
        if not self.matcher.accept(token_id):
            raise RequestError(
                f"token {token_id} is not what the request's structured option allows at place {self.num_accepted} "
                "of the answer; something behind the grammar's mask allowed it"
            )
        self.num_accepted += 1
        return self.matcher.is_ended


@dataclass(frozen=True)
class Turn:
    """What a step needs to know for one request."""

    request_id: str
    state: Constrained
    position: int
    """Of the token behind the last confirmed one."""
    unseen: Sequence[int]
    """Confirmed tokens of the answer that the matcher has not seen: after a preemption, all of them."""
    drafts: Sequence[int] = field(default=())


def make_masks(turns: Sequence[Turn], vocab_size: int) -> Masks:
    """Return the masks of a step; what fails is noted on the request's state. Runs beside the forward pass."""
    masks: Masks = {}
    words = torch.zeros((vocab_size + 31) // 32, dtype=torch.int32)
    for turn in turns:
        try:
            _turn(turn, words, vocab_size, masks)
        except HeadraceError as error:
            turn.state.error = error
        except Exception as error:  # noqa: BLE001 - isolation: a backend's call for one request fails that request
            turn.state.error = HeadraceError(f"the grammar backend failed: {type(error).__name__}: {error}")
    return masks


def _turn(turn: Turn, words: torch.Tensor, vocab_size: int, masks: Masks) -> None:
    state = turn.state
    for token_id in turn.unseen:
        state.accept(token_id)
    if state.matcher is None:
        state.matcher = state.grammar.result().matcher()
    matcher, taken = state.matcher, 0
    for place, draft in enumerate((*turn.drafts, None)):
        if matcher.is_ended:
            break  # what is drawn behind the end is dropped
        matcher.fill_mask(words)
        masks[turn.request_id, turn.position + place] = _forbidden(words, vocab_size)
        if draft is None or not matcher.accept(draft):
            break  # the mask forbids this draft, so nothing behind it counts
        taken += 1
    matcher.rollback(taken)


def _forbidden(words: torch.Tensor, vocab_size: int) -> NDArray[np.bool_]:
    bits: NDArray[np.uint8] = np.unpackbits(words.numpy().view(np.uint8), count=vocab_size, bitorder="little")
    return np.equal(bits, 0)
