"""What plugin authors test with: conformance suites for parts, and fakes for the rest of the engine.

Suites are base classes for pytest: subclass one, define `make`, and every test of the contract runs on your part.
Names are imported when they are first used, so that the fakes work without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.testing.attention import AttentionBackendSuite
    from headrace.testing.batches import PagedRun, run_case
    from headrace.testing.cases import AttentionCase, Chunk, random_case
    from headrace.testing.fakes import FakeExecutor, FakeProposer, fake_layout, fake_next_token
    from headrace.testing.ops import OpSetSuite
    from headrace.testing.parsing import Parsed, parsed, replay
    from headrace.testing.reference import reference_attention
    from headrace.testing.simulation import Simulation

__all__ = [
    "AttentionBackendSuite",
    "AttentionCase",
    "Chunk",
    "FakeExecutor",
    "FakeProposer",
    "OpSetSuite",
    "PagedRun",
    "Parsed",
    "Simulation",
    "fake_layout",
    "fake_next_token",
    "parsed",
    "random_case",
    "reference_attention",
    "replay",
    "run_case",
]

_HOMES = {
    "AttentionBackendSuite": "attention",
    "AttentionCase": "cases",
    "Chunk": "cases",
    "FakeExecutor": "fakes",
    "FakeProposer": "fakes",
    "OpSetSuite": "ops",
    "PagedRun": "batches",
    "Parsed": "parsing",
    "Simulation": "simulation",
    "fake_layout": "fakes",
    "fake_next_token": "fakes",
    "parsed": "parsing",
    "random_case": "cases",
    "reference_attention": "reference",
    "replay": "parsing",
    "run_case": "batches",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
