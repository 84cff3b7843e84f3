"""Which proposer runs, at most one; one that fails is switched off, and requests go on without drafts."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from headrace.core.errors import ConfigError
from headrace.core.interfaces import (
    DraftDistribution,
    KVCacheLayout,
    KVCacheSpec,
    Model,
    Proposer,
    RunnerBatch,
)
from headrace.core.interfaces.build import WorkerContext
from headrace.core.plan import NewRequest, StepResult

__all__ = ["Proposing", "build_proposer"]

logger = logging.getLogger("headrace")


def build_proposer(context: WorkerContext) -> Proposer | None:
    """Ask every registered proposer whether the configuration wants it. Raises `ConfigError` if two say yes."""
    wanted: list[Proposer] = [
        proposer
        for entry in context.registry.entries("proposer")
        if (proposer := entry.factory(context)) is not None
    ]
    if len(wanted) > 1:
        raise ConfigError(
            f"two proposers are configured, {wanted[0].name!r} and {wanted[1].name!r}; one can run at a time"
        )
    return wanted[0] if wanted else None


class Proposing:
    """Speaks to the proposer, if there is one. What it raises while requests run costs them its drafts, no more.

    Parameters
    ----------
    vocab_size: drafts are ids below it.
    """

    def __init__(self, proposer: Proposer | None, vocab_size: int) -> None:
        self._proposer = proposer
        self._vocab_size = vocab_size
        self.lookahead = proposer.lookahead if proposer else 0
        """KV slots it writes behind a request's last token."""

    @property
    def name(self) -> str | None:
        """Who drafts; None: nobody."""
        return self._proposer.name if self._proposer else None

    @property
    def token_equal(self) -> bool:
        """Whether tokens are those of a run without drafts."""
        return self._proposer is None or self._proposer.token_equal

    @property
    def active(self) -> bool:
        """Whether somebody drafts."""
        return self._proposer is not None

    def tap(self, model: Model) -> None:
        """Have the model return the hidden states that the proposer needs.

        Raises `ConfigError` where the model cannot.
        """
        taps = frozenset(self._proposer.taps) if self._proposer else frozenset()
        if not taps:
            return
        if not hasattr(model, "taps"):
            raise ConfigError(
                f"proposer {self.name!r} needs the hidden states of layers {sorted(taps)}, and "
                f"{type(model).__name__} gives none but the last; choose another speculative_method"
            )
        model.taps = taps

    def kv_specs(self) -> Mapping[str, KVCacheSpec]:
        """Layers of its own that need KV."""
        return self._proposer.kv_specs() if self._proposer else {}

    def allocate_kv(self, layout: KVCacheLayout, num_blocks: int) -> None:
        """Let it make its KV memory; a failure here stops the start."""
        if self._proposer is not None:
            self._proposer.allocate_kv(layout, num_blocks)

    def on_add(self, request: NewRequest) -> None:
        """A request came."""
        if self._proposer is not None:
            self._call("on_add", self._proposer.on_add, request)

    def on_remove(self, request_id: str) -> None:
        """A request left."""
        if self._proposer is not None:
            self._call("on_remove", self._proposer.on_remove, request_id)

    def propose(
        self, batch: RunnerBatch, hidden: torch.Tensor, taps: Mapping[int, torch.Tensor], result: StepResult
    ) -> Mapping[str, list[int]]:
        """Return drafts by request id, checked; of some requests, or none."""
        if self._proposer is None:
            return {}
        return self._call("propose", self._checked, self._proposer, batch, hidden, taps, result) or {}

    def distributions(self, request_id: str) -> Sequence[DraftDistribution]:
        """What the last drafts of a request were drawn from; empty: they are verified by drawing."""
        if self._proposer is None:
            return ()
        return self._call("distributions", self._proposer.distributions, request_id) or ()

    def _checked(self, proposer: Proposer, *step: Any) -> dict[str, list[int]]:
        return {name: self._ids(drafts) for name, drafts in proposer.propose(*step).items() if len(drafts)}

    def _ids(self, drafts: Sequence[int]) -> list[int]:
        ids = [operator.index(token) for token in drafts]
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise ValueError(f"drafts must be ids from 0 to {self._vocab_size - 1}, got {ids}")
        return ids

    def _call(self, method: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - isolation point: drafts are only a help, so go on without
            logger.warning(
                "proposer %r failed in %s and is switched off; requests go on without drafts: %s: %s",
                self.name,
                method,
                type(error).__name__,
                error,
            )
            self._proposer = None
            return None
