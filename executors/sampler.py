"""The sampler: rows of logits in, one token each out. A function of the rows; it keeps no state but processors.

In order, for the rows of one slice:

1. a row with NaN or +inf from the model fails its request;
2. raw logits are set aside where logprobs are asked for: logprobs speak of the model, before any change;
3. runner listeners change logits (`on_logits`), all rows at once;
4. logits processors, a row at a time, in order of registration. Built in, in this order: min_tokens, logit_bias,
   penalties (repetition, then frequency and presence);
5. temperature 0: the largest logit, ties by lower id. Otherwise temperature, min_p, top_k, top_p, and the draw.

A row is processed alone and single-threaded, so its token depends on nothing else in the batch. Logits are
looked at on the host: a slice on another device is copied once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.core.errors import PluginCallError, RequestError
from headrace.core.interfaces import LogitsProcessor, LogitsRow, ProcessorFactory, RunnerListener
from headrace.core.logprobs import TokenLogprobs
from headrace.core.plan import NewRequest
from headrace.executors.candidates import draw
from headrace.executors.scoring import row_logprobs

__all__ = ["Sampled", "Sampler"]


@dataclass(frozen=True)
class Sampled:
    """What one row gave."""

    token_id: int
    """-1 where the row failed."""
    logprobs: TokenLogprobs | None = None
    """If the request asked: the token, then the likeliest ones."""
    error: str | None = None
    """The row's request failed, and why."""


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
    listeners: runner listeners, in order; only their `on_logits` is called here.
    vocab_size: V.
    """

    def __init__(
        self,
        processors: Sequence[tuple[str, ProcessorFactory, str]],
        listeners: Sequence[RunnerListener],
        vocab_size: int,
    ) -> None:
        self._factories = tuple(processors)
        # The base class changes nothing: asking only those who do keeps rows without changes on the short way.
        self._listeners = [
            listener for listener in listeners if type(listener).on_logits is not RunnerListener.on_logits
        ]
        self._vocab_size = vocab_size
        self._processors: dict[str, list[_Processor]] = {}

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

    def remove(self, request_id: str) -> None:
        """A request left; unknown ones are no error."""
        self._processors.pop(request_id, None)

    def sample(self, rows: Sequence[LogitsRow], logits: torch.Tensor) -> list[Sampled]:
        """Draw a token for each of `rows` from its row of `logits` [S, V] float32, S ≤ 64, changed in place.

        Raises `PluginCallError` where a listener raised: it is called for the step, not for a request.
        """
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(f"logits must be [{len(rows)}, {self._vocab_size}], got {list(logits.shape)}")
        logits = logits.cpu()
        best = _best(logits)
        damaged = [not value < np.inf for value in best.values]
        # Only rows that ask, and only where somebody may change them.
        raw = [
            logits[i].clone()
            if row.params.logprobs is not None and (self._listeners or row.request_id in self._processors)
            else logits[i]
            for i, row in enumerate(rows)
        ]
        if self._listeners:
            self._tell(rows, logits)
            best = _best(logits)
        return [
            Sampled(-1, error="the model gave logits that hold NaN or infinity for this request")
            if damaged[i]
            else self._sample_row(row, logits[i], raw[i], int(best.ids[i]), float(best.values[i]))
            for i, row in enumerate(rows)
        ]

    def _tell(self, rows: Sequence[LogitsRow], logits: torch.Tensor) -> None:
        for listener in self._listeners:
            try:
                listener.on_logits(rows, logits)
            except Exception as error:  # isolation: the step fails by the plugin's name
                raise PluginCallError(
                    f"runner listener {listener.name!r} failed in on_logits: {type(error).__name__}: {error}",
                    plugin=listener.name,
                ) from error

    def _sample_row(
        self, row: LogitsRow, logits: torch.Tensor, raw: torch.Tensor, best_id: int, best_value: float
    ) -> Sampled:
        """Process one row; `best_id` and `best_value` are its largest logit's, before processors."""
        for processor in self._processors.get(row.request_id, ()):
            try:
                logits = _checked(processor.fn(row, logits), logits)
            except Exception as error:  # noqa: BLE001 - isolation: a plugin's call for one request fails that request
                return Sampled(-1, error=_plugin_failed(processor.name, processor.plugin, error))
        values = logits.numpy()
        if row.request_id in self._processors:
            best_id = int(values.argmax())
            best_value = float(values[best_id])
        if np.isnan(best_value):
            return Sampled(-1, error="a plugin put NaN into this request's logits")
        if best_value == -np.inf:
            return Sampled(
                -1, error="no token can be chosen: the masks asked for leave none of the vocabulary"
            )
        params = row.params
        if params.temperature == 0:
            token_id = best_id
        elif params.seed is None:
            return Sampled(-1, error="this request samples but has no seed")
        else:
            token_id = draw(values, params, params.seed, row.position)
        if params.logprobs is None:
            return Sampled(token_id)
        return Sampled(token_id, row_logprobs(raw, token_id, params.logprobs))


@dataclass(frozen=True)
class _Best:
    ids: np.ndarray[tuple[int], np.dtype[np.int64]]
    """[S]: of the largest logit, the lowest among equals; of a NaN where there is one."""
    values: np.ndarray[tuple[int], np.dtype[np.float32]]


def _best(logits: torch.Tensor) -> _Best:
    # numpy's argmax is single-threaded, takes the first of equals and stops at NaN, all in one pass.
    values = logits.numpy()
    ids = values.argmax(axis=1)
    return _Best(ids, np.take_along_axis(values, ids[:, None], axis=1)[:, 0])


def _checked(result: object, logits: torch.Tensor) -> torch.Tensor:
    if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
        got = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise TypeError(f"a logits processor must return a tensor {list(logits.shape)}, got {got}")
    return result.detach().to("cpu", torch.float32)


def _plugin_failed(name: str, plugin: str, error: Exception) -> str:
    return f"logits processor {name!r} of plugin {plugin!r} failed: {type(error).__name__}: {error}"
