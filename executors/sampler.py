"""The sampler: rows of logits in, one token each out. A function of the rows; it keeps no state but processors.

In order, for the rows of one slice:

1. a row with NaN or +inf from the model fails its request;
2. raw logits are set aside where log-probabilities of the model are asked for, before any change;
3. runner listeners change logits (`on_logits`), all rows at once;
4. logits processors, a row at a time, in order of registration. Built in, in this order: allowed_token_ids,
   bad_words, min_tokens, logit_bias, penalties (repetition, then frequency and presence). Plugins' own follow;
5. temperature 0: the largest logit, ties by lower id. Otherwise temperature, min_p, top_k, top_p, and the draw
   (or, where rejection sampling was chosen, the judgement of a draft);
6. log-probabilities of what was drawn: of the model, or of what the token was drawn from.

A row whose token is that of the largest score, whichever others are forbidden, is drawn before step 3: at temperature
0, or with nothing but a temperature, without processors and without log-probabilities of what is drawn from. Step 3
is for those of them alone whose token a listener refuses (`on_drawn`); these are drawn again.

A row is worked on alone, by one thread, so its token depends on nothing else in the batch. Logits are looked at on
the host: a slice on another device is copied once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core.errors import PluginCallError, RequestError
from headrace.core.interfaces import LogitsProcessor, LogitsRow, ProcessorFactory, RunnerListener
from headrace.core.logprobs import LogprobsMode, TokenLogprobs
from headrace.core.plan import NewRequest
from headrace.core.sampling_params import SamplingParams
from headrace.executors.drawing import Draw, Drawing
from headrace.executors.logprobs import LogprobsReport
from headrace.executors.rejection import accept_or_recover
from headrace.executors.scoring import Score, score

__all__ = ["Sampled", "Sampler", "SamplingOps"]


@dataclass(frozen=True)
class SamplingOps:
    """What an op set computes for the sampler; see `headrace.core.interfaces.ops`."""

    draw: Callable[..., torch.Tensor] | None = None
    """None: `headrace.executors.candidates` draws."""
    score: Score = score


class Sampled(NamedTuple):
    """What one row gave."""

    token_id: int
    """-1 where the row failed."""
    logprobs: TokenLogprobs | None = None
    """If the request asked: the token, then the likeliest ones."""
    error: str | None = None
    """The row's request failed, and why."""

    @property
    def error_kind(self) -> str:
        """`HeadraceError.kind` of the error: masks that exclude each other are the request's own."""
        return RequestError.kind if self.error == _NOTHING_LEFT else "engine"


@dataclass(frozen=True)
class _Processor:
    name: str
    plugin: str
    fn: LogitsProcessor


class Sampler:
    """Samples the rows of every request of a runner.

    Parameters
    ----------
    processors: (name, factory, plugin) of the registered logits processors, in order.
    listeners: runner listeners, in order; only their `on_logits` and `on_drawn` are called here.
    vocab_size: V.
    ops: of the op set in use.
    logprobs_mode: for requests that do not choose one.
    """

    def __init__(
        self,
        processors: Sequence[tuple[str, ProcessorFactory, str]],
        listeners: Sequence[RunnerListener],
        vocab_size: int,
        ops: SamplingOps | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        ops = ops or SamplingOps()
        self._drawing = Drawing(ops.draw)
        self._report = LogprobsReport(ops.score, logprobs_mode)
        self._factories = tuple(processors)
        # The base class changes nothing: asking only those who do keeps rows without changes on the short way.
        self._listeners = [
            listener for listener in listeners if type(listener).on_logits is not RunnerListener.on_logits
        ]
        self._all_judge = bool(self._listeners) and all(
            type(listener).on_drawn is not RunnerListener.on_drawn for listener in self._listeners
        )
        self._vocab_size = vocab_size
        self._processors: dict[str, list[_Processor]] = {}
        self._first: set[str] = set()
        """Requests whose tokens are drawn before anything is forbidden."""

    def add(self, request: NewRequest) -> None:
        """A request came: make its processors.

        Raises `PluginCallError` where a factory raised, `RequestError` where a draw would have no seed; the
        request is not known then, and fails alone.
        """
        params = request.params
        if params.temperature > 0 and params.seed is None:
            raise RequestError(
                f"request {request.request_id!r} samples with temperature {params.temperature} but reached the "
                "worker without a seed; one is chosen in the front end where none is given",
                param="seed",
            )
        made = []
        for name, factory, plugin in self._factories:
            try:
                fn = factory(params)
            except Exception as error:  # isolation: a plugin's call for one request fails that request
                raise PluginCallError(_plugin_failed(name, plugin, error), plugin=plugin) from error
            if fn is not None:
                made.append(_Processor(name, plugin, fn))
        if made:
            self._processors[request.request_id] = made
        elif (
            self._all_judge and _largest_score_decides(params) and not self._report.asks(params, "processed")
        ):
            self._first.add(request.request_id)

    def remove(self, request_id: str) -> None:
        """A request left; unknown ones are no error."""
        self._processors.pop(request_id, None)
        self._first.discard(request_id)

    def draws_first(self, request_id: str) -> bool:
        """Whether a request's tokens may be drawn before listeners forbid any."""
        return request_id in self._first

    def sample(self, rows: Sequence[LogitsRow], logits: torch.Tensor) -> list[Sampled]:
        """Draw a token for each of `rows` from its row of `logits` [S, V] float32, S ≤ 64, changed in place.

        Raises `PluginCallError` where a listener raised: it is called for the step, not for a request.
        """
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(f"logits must be [{len(rows)}, {self._vocab_size}], got {list(logits.shape)}")
        logits = logits.cpu().contiguous()
        best = _best(logits)
        errors = [None if value < math.inf else _DAMAGED for value in best.values.tolist()]
        raw = self._report.set_aside(rows, logits, self._changes)
        if self._tell(rows, logits, [i for i, row in enumerate(rows) if not row.drawn_first]):
            best = _best(logits)
        for i, row in enumerate(rows):
            if row.request_id in self._processors and errors[i] is None:
                errors[i] = self._process(row, logits[i], i, best)
        tokens = [-1] * len(rows)
        self._draw(range(len(rows)), rows, logits, best, tokens, errors)
        first = [i for i, row in enumerate(rows) if row.drawn_first and errors[i] is None]
        refused = self._refused(rows, tokens, first) if first else []
        if refused and self._tell(rows, logits, refused):
            for i in refused:
                best.look_again(i, logits[i])
            self._draw(refused, rows, logits, best, tokens, errors)
        logprobs = self._report.of(rows, raw, logits, tokens)
        return [Sampled(tokens[i], logprobs.get(i), errors[i]) for i in range(len(rows))]

    def _changes(self, request_id: str) -> bool:
        """Whether a request's logits may be changed before its token is drawn."""
        return bool(self._listeners) or request_id in self._processors

    def _tell(self, rows: Sequence[LogitsRow], logits: torch.Tensor, indices: Sequence[int]) -> bool:
        """Let listeners change logits of the rows at `indices`; return whether one did."""
        if len(indices) == len(rows):
            parts = [(rows, logits)]
        else:  # rows of their own, since their logits lie apart
            parts = [(rows[i : i + 1], logits[i : i + 1]) for i in indices]
        changed = False
        for listener in self._listeners:
            for some, own in parts:
                with _named(listener, "on_logits"):
                    changed = listener.on_logits(some, own) is not False or changed
        return changed

    def _refused(self, rows: Sequence[LogitsRow], tokens: Sequence[int], first: Sequence[int]) -> list[int]:
        """Return those rows of `first` whose token a listener refuses."""
        refused: set[int] = set()
        for listener in self._listeners:
            some = [i for i in first if i not in refused]
            with _named(listener, "on_drawn"):
                places = listener.on_drawn([rows[i] for i in some], [tokens[i] for i in some])
                refused.update(some[place] for place in places)
        return sorted(refused)

    def _draw(
        self,
        indices: Sequence[int],
        rows: Sequence[LogitsRow],
        logits: torch.Tensor,
        best: _Best,
        tokens: list[int],
        errors: list[str | None],
    ) -> None:
        """Draw the tokens of the rows at `indices`, or note what fails them."""
        ids, values = best.ids.tolist(), best.values.tolist()
        draws: list[Draw] = []
        for i in indices:
            row, seed = rows[i], rows[i].params.seed
            errors[i] = errors[i] or _unusable(values[i])
            tokens[i] = ids[i] if errors[i] is None else -1
            if errors[i] is not None or row.params.temperature == 0:
                continue
            if seed is None:
                errors[i], tokens[i] = "this request samples but has no seed", -1
            elif row.draft is None or row.draft_distribution is None:
                draws.append(Draw(i, row.params, seed, row.position))
            else:
                tokens[i] = accept_or_recover(
                    logits[i].numpy(), row.params, seed, row.position, row.draft, row.draft_distribution
                )
        for i, token in self._drawing.tokens(draws, logits, best.ids):
            tokens[i] = token

    def _process(self, row: LogitsRow, own: torch.Tensor, index: int, best: _Best) -> str | None:
        """Let processors change logits `own` [V], and bring `best` up to date; return what fails the request."""
        for processor in self._processors[row.request_id]:
            try:
                result = processor.fn(row, own)
                if result is not own:
                    own.copy_(_checked(result, own))
            except Exception as error:  # noqa: BLE001 - isolation: a plugin's call for one request fails that request
                return _plugin_failed(processor.name, processor.plugin, error)
        best.look_again(index, own)
        return None


@contextlib.contextmanager
def _named(listener: RunnerListener, method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # isolation: the step fails by the plugin's name
        raise PluginCallError(
            f"runner listener {listener.name!r} failed in {method}: {type(error).__name__}: {error}",
            plugin=listener.name,
        ) from error


def _largest_score_decides(params: SamplingParams) -> bool:
    """Whether forbidding other tokens leaves a draw as it is: no filter looks at all scores together."""
    return params.temperature == 0 or (params.top_k <= 0 and params.top_p >= 1 and params.min_p <= 0)


_NOTHING_LEFT = "no token can be chosen: the masks asked for leave none of the vocabulary"
_DAMAGED = "the model gave logits that hold NaN or infinity for this request"


@dataclass(frozen=True)
class _Best:
    ids: NDArray[np.int64]
    """[S]: of the largest logit, the lowest among equals; of a NaN where there is one."""
    values: NDArray[np.float32]

    def look_again(self, index: int, logits: torch.Tensor) -> None:
        """Row `index` was changed, to `logits` [V]."""
        values = logits.numpy()
        self.ids[index] = values.argmax()
        self.values[index] = values[self.ids[index]]


def _best(logits: torch.Tensor) -> _Best:
    # numpy's argmax is single-threaded, takes the first of equals and stops at NaN, all in one pass.
    values = logits.numpy()
    ids = values.argmax(axis=1)
    return _Best(ids, values[np.arange(len(ids)), ids])


def _unusable(largest: float) -> str | None:
    """Why no token can be chosen where `largest` is the largest logit; None: one can."""
    if math.isnan(largest):
        return "a plugin put NaN into this request's logits"
    if largest == -math.inf:
        return _NOTHING_LEFT
    return None


def _checked(result: object, logits: torch.Tensor) -> torch.Tensor:
    if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
        got = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise TypeError(f"a logits processor must return a tensor {list(logits.shape)}, got {got}")
    return result.detach().to("cpu", torch.float32)


def _plugin_failed(name: str, plugin: str, error: Exception) -> str:
    return f"logits processor {name!r} of plugin {plugin!r} failed: {type(error).__name__}: {error}"
