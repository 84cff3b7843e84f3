"""Registers the executors. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.core.metrics import Metric
from headrace.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from headrace.core.interfaces import Executor
    from headrace.core.interfaces.build import ExecutorBuild
    from headrace.core.plugin.registry import Registrar

__all__ = ["headrace_api", "headrace_register", "name"]

name = "executors"
headrace_api = ">=1,<2"


def _uniproc(build: ExecutorBuild) -> Executor:
    from headrace.executors.uniproc import UniprocExecutor

    return UniprocExecutor(build)


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register `uniproc`, and what executors tell of themselves."""
    registrar.executor("uniproc", _uniproc)
    registrar.metric("weights_bytes", lambda: Metric("gauge", "Memory that the weights take, in bytes."))
