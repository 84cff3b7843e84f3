"""Which tokens a request may go on with: masks behind its last confirmed token, and behind each of its drafts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core.errors import HeadraceError, RequestError
from headrace.core.interfaces import Grammar, GrammarMatcher
from headrace.plugins.structured.cache import backend_failed

__all__ = ["Constrained", "Mask", "MaskMaker", "Masks", "Turn", "failing_alone"]

MASKS_KEPT = 256
"""Of the latest; most take a few kB, the largest 200 kB in a vocabulary of 50,000."""


@dataclass(frozen=True)
class Mask:
    """Which tokens may come next, told by the fewer: those that may, or those that may not.

    Nearly all masks allow next to nothing (between strings) or nearly everything (inside one), so a few ids are
    quicker to put on logits than a flag a token.
    """

    ids: NDArray[np.int64]
    allows: bool
    """True: `ids` may come, and nothing else. False: all may come but `ids`."""

    @classmethod
    def of(cls, packed: bytes, vocab_size: int) -> Mask:
        """Read bits as `GrammarMatcher.fill_mask` sets them."""
        words = np.frombuffer(packed, np.int32)
        allows = bool(np.count_nonzero(words) <= np.count_nonzero(~words))
        chosen = words if allows else ~words
        places = np.flatnonzero(chosen)
        bits = np.unpackbits(chosen[places].view(np.uint8), bitorder="little").reshape(-1, 32)
        word, bit = np.nonzero(bits)
        ids = places[word] * 32 + bit
        return cls(ids[ids < vocab_size], allows)

    def put_on(self, logits: NDArray[np.float32]) -> None:
        """Forbid by select, in place; logits [V]."""
        if self.allows:
            kept = logits[self.ids]
            logits.fill(-np.inf)
            logits[self.ids] = kept
        else:
            logits[self.ids] = -np.inf


Masks = dict[tuple[str, int], Mask]
"""By request id and position of the token to be drawn."""


@dataclass
class Constrained:
    """One request under way. Whoever makes its masks owns it until they are made."""

    grammar: Future[Grammar]
    after_ids: tuple[int, ...] = ()
    """The grammar begins behind them; what comes before is free. Empty: it has begun."""
    opening_id: int | None = None
    """None, or the token an answer must begin with for anything to be free; the grammar need not allow it."""
    matcher: GrammarMatcher | None = None
    num_accepted: int = 0
    """Tokens of the answer that were taken, free ones and those that the matcher took."""
    error: HeadraceError | None = None
    """It cannot go on, and why."""
    guess: int | None = None
    """A token the matcher took, which is not confirmed yet."""
    _latest: tuple[int, ...] = ()
    """The last free tokens, as many as `after_ids`; once these are equal, no token is free."""

    @property
    def may_open(self) -> bool:
        """Whether the next token may be `opening_id`."""
        return self.opening_id is not None and not self.num_accepted

    def begun(self) -> GrammarMatcher:
        """Return the matcher. Raises what compiling raised."""
        if self.matcher is None:
            self.matcher = self.grammar.result().matcher()
        return self.matcher

    def num_free(self, drafts: Sequence[int]) -> int:
        """Return how many of the next tokens are free, of those at the drafts' places and the one behind them.

        The first counts as one if it is `opening_id`.
        """
        if self.may_open and list(drafts[:1]) != [self.opening_id]:
            return 0
        known = list(self._latest)
        for place, draft in enumerate((*drafts, None)):
            if tuple(known[-len(self.after_ids) :]) == self.after_ids:
                return place
            if draft is not None:
                known.append(draft)
        return len(drafts) + 1

    def may_come(self, token_id: int) -> bool:
        """Whether a token may be the next one."""
        self.withdraw()
        if self.num_free((token_id,)):
            return True
        if not self.begun().accept(token_id):
            return False
        self.guess = token_id
        return True

    def withdraw(self) -> None:
        """Bring the matcher back to the confirmed tokens."""
        if self.guess is not None:
            self.guess = None
            self.begun().rollback(1)

    def accept(self, token_id: int) -> bool:
        """Take a confirmed token of the answer; True: it was the last.

        Raises `RequestError` where it does not fit.
        """
        known = self.guess == token_id
        if known:
            self.guess = None
        self.withdraw()
        if self.num_free((token_id,)):
            self._latest = (*self._latest, token_id)[-len(self.after_ids) :]
            self.num_accepted += 1
            return False
        self.after_ids = self._latest = ()
        matcher = self.begun()
        if not known and not matcher.accept(token_id):
            raise RequestError(
                f"token {token_id} is not what the request's structured option allows at place {self.num_accepted} "
                "of the answer; something behind the grammar's mask allowed it"
            )
        self.num_accepted += 1
        return matcher.is_ended


@dataclass(frozen=True)
class Turn:
    """What a step needs to know for one request."""

    request_id: str
    state: Constrained
    position: int
    """Of the token behind the last confirmed one."""
    unseen: Sequence[int] = ()
    """Confirmed tokens of the answer that the matcher has not seen: after a preemption, all of them."""
    drafts: Sequence[int] = ()


@contextlib.contextmanager
def failing_alone(state: Constrained) -> Iterator[None]:
    """Note on a request's state what fails in here."""
    try:
        yield
    except HeadraceError as error:
        state.error = error
    except Exception as error:  # noqa: BLE001 - isolation: a backend's call for a request fails that request
        state.error = backend_failed(error)


class MaskMaker:
    """Makes the masks of a step. One thread at a time uses it."""

    def __init__(self, vocab_size: int) -> None:
        self._words = torch.zeros((vocab_size + 31) // 32, dtype=torch.int32)
        self._packed = self._words.numpy()
        # Few masks differ: the inside of a string is the same in all answers.
        self._mask_of = lru_cache(MASKS_KEPT)(partial(Mask.of, vocab_size=vocab_size))

    def make(self, turns: Sequence[Turn]) -> Masks:
        """Return the masks; what fails is noted on the request's state. Runs beside the forward pass."""
        masks: Masks = {}
        for turn in turns:
            with failing_alone(turn.state):
                self._make(turn, masks)
        return masks

    def _make(self, turn: Turn, masks: Masks) -> None:
        state = turn.state
        state.withdraw()
        for token_id in turn.unseen:
            state.accept(token_id)
        free = state.num_free(turn.drafts)
        if free and state.may_open:
            masks[turn.request_id, turn.position] = self._mask(state.begun(), state.opening_id)
        if free > len(turn.drafts):
            return
        matcher, taken = state.begun(), 0
        for place, draft in enumerate((*turn.drafts[free:], None), free):
            if matcher.is_ended:
                break  # what is drawn behind the end is dropped
            also = state.opening_id if place == 0 and state.may_open else None
            masks[turn.request_id, turn.position + place] = self._mask(matcher, also)
            if draft is None or not matcher.accept(draft):
                break  # the mask forbids this draft, so nothing behind it counts
            taken += 1
        matcher.rollback(taken)

    def _mask(self, matcher: GrammarMatcher, also: int | None) -> Mask:
        """Return what a matcher allows, and the token `also`."""
        matcher.fill_mask(self._words)
        if also is not None:
            self._packed.view(np.uint32)[also // 32] |= np.uint32(1 << also % 32)
        return self._mask_of(self._packed.tobytes())
