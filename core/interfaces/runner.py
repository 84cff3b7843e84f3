"""The worker-side contracts: what touches tokens between the forward pass and the step's result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from headrace.core.interfaces.kv_cache import KVCacheLayout, KVCacheSpec
    from headrace.core.plan import NewRequest, StepResult
    from headrace.core.sampling_params import SamplingParams
    from headrace.core.stash import Stash

__all__ = [
    "BatchRow",
    "DraftDistribution",
    "LogitsProcessor",
    "LogitsRow",
    "ProcessorFactory",
    "Proposer",
    "RunnerBatch",
    "RunnerListener",
    "SelectableProcessor",
]


class BatchRow(msgspec.Struct, frozen=True):
    """One request in a step, on the worker."""

    request_id: str
    params: SamplingParams
    stash: Stash
    num_prompt_tokens: int
    start: int
    count: int
    tokens: Sequence[int]
    """Ids up to position start + count, prompt first; drafts at the end are tentative. Read only."""
    num_drafts: int
    """So many ids at the end of `tokens` are drafts that this step verifies."""
    block_ids: Sequence[Sequence[int]] = ()
    """A KV group: the blocks of positions from 0 on, lookahead included. Read only."""
    drawn_first: bool = False
    """Its token is drawn before listeners forbid any, and judged by `RunnerListener.on_drawn`."""

    @property
    def num_confirmed(self) -> int:
        """`tokens[:num_confirmed]` are confirmed; those that this step confirms come behind them."""
        return self.start + self.count - self.num_drafts


class RunnerBatch(Protocol):
    """A step, as listeners and proposers see it."""

    @property
    def step(self) -> int:
        """The plan's number."""
        ...

    @property
    def started(self) -> float:
        """When the worker began the step, in seconds of `time.perf_counter`."""
        ...

    @property
    def stash(self) -> Stash:
        """The plan's stash."""
        ...

    @property
    def rows(self) -> Sequence[BatchRow]:
        """The requests of the step."""
        ...


@dataclass(frozen=True)
class DraftDistribution:
    """What a draft was drawn from, for proposers whose drafts are accepted by rejection sampling."""

    ids: torch.Tensor
    """[K] int64 on the host, rising: all ids with a chance, the draft among them."""
    probabilities: torch.Tensor
    """[K] float64 on the host, their sum is 1."""


class LogitsRow(msgspec.Struct, frozen=True):
    """One row of logits and what the token drawn from it depends on."""

    request_id: str
    params: SamplingParams
    stash: Stash
    num_prompt_tokens: int
    position: int
    """Of the token to be drawn."""
    tokens: Sequence[int]
    """All ids before `position`: prompt, output, and drafts where this row checks a later draft. Read only."""
    num_confirmed: int
    """`tokens[num_confirmed:]` are unconfirmed."""
    draft: int | None = None
    """The draft for `position`; told only where it is to be judged by rejection sampling."""
    draft_distribution: DraftDistribution | None = None
    """What `draft` was drawn from."""
    drawn_first: bool = False
    """As `BatchRow.drawn_first`; the request has no other row in the step."""


LogitsProcessor = Callable[[LogitsRow, "torch.Tensor"], "torch.Tensor"]
"""(row, logits [V] float32) -> logits [V]. A function of the row's tokens and parameters and nothing else: caches
are allowed, state is not, so that it is right for draft rows too. It may write into `logits` and return it."""


class RunnerListener:
    """Touches a token before it is confirmed. Override what you need; raising fails the request or the step."""

    name = "runner_listener"

    def on_add(self, request: NewRequest) -> None:
        """A request came to this worker."""

    def on_remove(self, request_id: str) -> None:
        """A request left this worker: finished, aborted or preempted."""

    def on_batch(self, batch: RunnerBatch) -> None:
        """Before the forward pass; slow preparation may start a thread here."""

    def on_embed(self, batch: RunnerBatch, x: torch.Tensor) -> torch.Tensor:
        """After the embedding, x [N, C]; return what the model gets."""
        return x

    def on_hidden(self, batch: RunnerBatch, hidden: torch.Tensor) -> None:
        """After the forward pass, hidden [N, C]: the tokens of `batch.rows`, row after row, `count` of each."""

    def on_logits(self, rows: Sequence[LogitsRow], logits: torch.Tensor) -> bool | None:
        """Change logits [S, V] float32 in place, S ≤ 64; row i of both belong together.

        Return False where nothing was changed: rows of others are spared some work then.
        """
        return False

    def on_drawn(self, rows: Sequence[LogitsRow], tokens: Sequence[int]) -> Sequence[int]:
        """Return the places of `tokens` [S] that may not be: their rows go to `on_logits`, and are drawn anew.

        For listeners whose `on_logits` does nothing but forbid tokens by -inf; overriding this says so. The token of
        the largest score stays that of the largest score when others are forbidden, so where nothing else decides a
        draw, it comes first, and whoever can judge a token more cheaply than all tokens is spared the latter. What
        was judged need not be what is drawn in the end: another listener may refuse it.
        """
        return ()

    def on_tokens(self, batch: RunnerBatch, result: StepResult) -> None:
        """Tokens were drawn; may set `finish_reason`, drop tokens from an end, or add to a stash."""


class Proposer(ABC):
    """Guesses the next tokens of each request, to be verified in the next step. Override what you need.

    Guesses decide how fast tokens come and never which: a draft stays only where it is the token that is drawn
    anyway. A proposer that raises, or drafts what is no token, is switched off and reported; requests go on without.
    """

    name = "proposer"
    lookahead: int = 0
    """KV slots it writes behind a request's last token; near the request's longest length fewer are granted."""
    taps: tuple[int, ...] = ()
    """Layers whose hidden states it needs."""
    token_equal: bool = True
    """False: drafts are accepted by rejection sampling (`distributions`), and tokens are not those of a plain run."""

    def kv_specs(self) -> Mapping[str, KVCacheSpec]:
        """Layers of its own that need KV, by name; they share the pool's blocks with the model's, never memory."""
        return {}

    def allocate_kv(self, layout: KVCacheLayout, num_blocks: int) -> None:
        """Make KV memory of its layers for block ids [0, num_blocks], of which 0 is the null block."""

    def on_add(self, request: NewRequest) -> None:
        """A request came to this worker."""

    def on_remove(self, request_id: str) -> None:
        """A request left this worker: finished, aborted or preempted."""

    @abstractmethod
    def propose(
        self, batch: RunnerBatch, hidden: torch.Tensor, taps: Mapping[int, torch.Tensor], result: StepResult
    ) -> Mapping[str, Sequence[int]]:
        """Return drafts by request id; called each step, prefill chunks included. hidden is [N, C].

        What `result` confirmed for a row belongs behind the row's `tokens[:num_confirmed]`. Drafts of a request that
        got no token in this step are dropped, and so are those beyond its longest length.
        """

    def distributions(self, request_id: str) -> Sequence[DraftDistribution]:
        """Return what the last drafts of a request were drawn from, one a draft, to have them accepted by rejection.

        By default nothing: drafts are verified by drawing, and tokens are those of a plain run. With rejection
        sampling they are only distributed alike (Leviathan, Kalman and Matias 2023), so it must be asked for by name.
        """
        return ()


ProcessorFactory = Callable[["SamplingParams"], "LogitsProcessor | None"]
"""What a `logits_processor` plugin registers: called once a request on each worker, returns its processor, or None
where the parameters ask for nothing."""


@dataclass(frozen=True)
class SelectableProcessor:
    """A logits processor for those requests that select it: `SamplingParams(processors={name: {…}})`.

    It is a `ProcessorFactory` itself, made by `Registrar.logits_processor(name, factory, parameters=Model)`.
    """

    name: str
    parameters: type[BaseModel]
    """What a request gives is validated by it: in the front end, and again on each worker."""
    factory: Callable[[SamplingParams, Any], LogitsProcessor | None]
    """Called with the request's parameters and an instance of `parameters`."""

    def __call__(self, params: SamplingParams) -> LogitsProcessor | None:
        """Return the processor, or None for a request that did not select it."""
        given = (params.options.get("processors") or {}).get(self.name)
        return None if given is None else self.factory(params, self.parameters.model_validate(given))
