"""Structured answers: JSON that fits a schema, a regular expression, one of several texts, or a grammar.

`SamplingParams(structured={"json": {...}})` asks for one. The front half checks what can be seen without compiling,
the core's half parks the request while threads compile its grammar, and the worker's half masks logits, drafts
included, and ends the answer with its grammar. Grammar backends are plugins of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.core.plugin.hookspecs import hookimpl
from headrace.plugins.structured.options import STRUCTURED, StructuredOption, StructuredSection

if TYPE_CHECKING:
    from headrace.core.interfaces import Constraint, InputProcessor, RunnerListener
    from headrace.core.interfaces.build import CoreContext, FrontContext, WorkerContext
    from headrace.core.plugin.registry import Registrar

__all__ = ["headrace_api", "headrace_register", "name"]

name = "structured"
headrace_api = ">=1,<2"


def _front(context: FrontContext) -> InputProcessor:
    from headrace.plugins.structured.front import StructuredInput

    return StructuredInput(context)


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register option, section, one part a room, and what travels between them."""
    from headrace.plugins.structured.cache import SharedCache

    shared = SharedCache()

    def core(context: CoreContext) -> Constraint:
        from headrace.plugins.structured.waiting import GrammarWait

        return GrammarWait(shared.of(context), context.wake)

    def worker(context: WorkerContext) -> RunnerListener:
        from headrace.plugins.structured.runner import GrammarListener

        return GrammarListener(shared.of(context), context.vocab_size)

    registrar.config_section(name, StructuredSection)
    registrar.request_option(name, StructuredOption)
    registrar.stash_key(STRUCTURED)
    registrar.input_processor(name, _front)
    registrar.constraint(name, core)
    registrar.runner_listener(name, worker)
