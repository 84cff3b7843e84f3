"""The worker's half: masks are made beside the forward pass, and answers end with their grammar."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from headrace.core.errors import HeadraceError
from headrace.core.interfaces import BatchRow, LogitsRow, RunnerBatch, RunnerListener
from headrace.core.plan import NewRequest, RequestResult, StepResult
from headrace.plugins.structured.cache import GrammarCache
from headrace.plugins.structured.masks import Constrained, MaskMaker, Masks, Turn, failing_alone
from headrace.plugins.structured.options import STRUCTURED

__all__ = ["GrammarListener"]


class GrammarListener(RunnerListener):
    """Holds answers to their grammars.

    A matcher is a function of the confirmed tokens: a preempted request comes back as new, and its matcher reads them
    again.
    """

    name = "structured"

    def __init__(self, cache: GrammarCache, vocab_size: int) -> None:
        self._cache = cache
        self._maker = MaskMaker(vocab_size)
        self._requests: dict[str, Constrained] = {}
        self._thread = ThreadPoolExecutor(1, "headrace-masks")
        self._job: Future[Masks] | None = None
        """The masks of this step, if any are made ahead; until it is done, matchers belong to its thread."""

    def on_add(self, request: NewRequest) -> None:
        """Begin. In a process without the core's half the grammar is compiled here, beside the first forward pass."""
        wanted = request.stash.get(STRUCTURED)
        if wanted is not None:
            self._requests[request.request_id] = Constrained(
                self._cache.get(wanted), wanted.after_ids, wanted.opening_id
            )

    def on_remove(self, request_id: str) -> None:
        """Forget."""
        self._requests.pop(request_id, None)

    def on_batch(self, batch: RunnerBatch) -> None:
        """Start to make this step's masks: of rows that are not drawn first, or whose matcher has tokens to read."""
        self._job = None
        if not self._requests:
            return
        turns = [self._turn(row) for row in batch.rows if self._made_ahead(row)]
        if turns:
            self._job = self._thread.submit(self._maker.make, turns)

    def _made_ahead(self, row: BatchRow) -> bool:
        state = self._requests.get(row.request_id)
        if state is None or row.start + row.count < row.num_prompt_tokens:
            return False
        has_read = state.num_accepted == row.num_confirmed - row.num_prompt_tokens
        return not (row.drawn_first and state.matcher is not None and has_read)

    def _turn(self, row: BatchRow) -> Turn:
        state = self._requests[row.request_id]
        confirmed = row.start + row.count - row.num_drafts
        return Turn(
            row.request_id,
            state,
            position=confirmed,
            unseen=[int(one) for one in row.tokens[row.num_prompt_tokens + state.num_accepted : confirmed]],
            drafts=[int(one) for one in row.tokens[confirmed:]],
        )

    def on_logits(self, rows: Sequence[LogitsRow], logits: torch.Tensor) -> bool:
        """Take forbidden tokens away, by select; False: no row is under a grammar."""
        masks = self._made()
        late = [
            Turn(row.request_id, self._requests[row.request_id], row.position)
            for row in rows
            if row.drawn_first and row.request_id in self._requests
            if (row.request_id, row.position) not in masks
        ]
        masks |= self._maker.make(late)
        changed = False
        for index, row in enumerate(rows):
            mask = masks.get((row.request_id, row.position))
            if mask is not None:
                mask.put_on(logits[index].numpy())
                changed = True
        return changed

    def on_drawn(self, rows: Sequence[LogitsRow], tokens: Sequence[int]) -> Sequence[int]:
        """Refuse what does not fit: taking a token costs a sixth of a mask, and less with warm caches."""
        self._made()
        refused = []
        for place, (row, token_id) in enumerate(zip(rows, tokens, strict=True)):
            state = self._requests.get(row.request_id)
            if state is not None and state.error is None:
                with failing_alone(state):
                    if not state.may_come(token_id):
                        refused.append(place)
        return refused

    def _made(self) -> Masks:
        return self._job.result() if self._job is not None else {}

    def on_tokens(self, batch: RunnerBatch, result: StepResult) -> None:
        """Move matchers on; an answer that is complete ends here, whatever else the request says of its end."""
        self._made()
        self._job = None
        for row in batch.rows if self._requests else ():
            state, outcome = self._requests.get(row.request_id), result.requests[row.request_id]
            if state is not None and outcome.error is None and outcome.tokens:
                _take(state, outcome)


def _take(state: Constrained, outcome: RequestResult) -> None:
    try:
        if state.error is not None:
            raise state.error
        for place, token_id in enumerate(outcome.tokens):
            if state.accept(token_id):
                del outcome.tokens[place + 1 :]
                outcome.finish_reason = "stop"
                return
    except HeadraceError as error:
        outcome.error, outcome.error_kind = str(error), error.kind
