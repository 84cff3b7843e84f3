"""The contract of recorded passes: what a model does is noted once and then run without Python in between.

A recorded pass is right for every step because nothing a forward reads changes its address between steps: inputs are
copied to where the recording found them, and `AttentionBackend.prepare(..., into=md)` overwrites the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

__all__ = ["Graph", "GraphRecorder", "RecordError"]

Result = TypeVar("Result")


class RecordError(Exception):
    """A pass cannot be recorded; the message says why. It runs as it is, only slower."""


@runtime_checkable
class Graph(Protocol):
    """A recorded pass."""

    def replay(self, num_rows: int) -> None:
        """Run it over the first `num_rows` rows of its inputs, at most as many as it was recorded with."""
        ...


@runtime_checkable
class GraphRecorder(Protocol):
    """Records passes on one kind of device."""

    def record(self, run: Callable[[], Result], num_rows: int) -> tuple[Graph, Result]:
        """Call `run` once, over inputs of `num_rows` rows, and return the recorded pass and what `run` returned.

        Tensors made on the way, results among them, stay where they are and are filled by each `replay`; what they
        hold before the first is not said. Raises `RecordError`.
        """
        ...

    def including(self, parts: Sequence[Any]) -> GraphRecorder:
        """Return one that notes calls of other op sets, too: `parts` are `Op.recorded` of their ops.

        Raises `RecordError` for a part it cannot note.
        """
        ...
