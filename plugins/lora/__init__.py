"""LoRA: many fine-tunes of one model on one engine, each request with the adapter it names.

The front half turns a name into a version of an adapter, the core's half loads it beside the running steps and holds
a step to so many adapters, and the worker's half adds to each product what the adapters of its rows say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import StrictStr

from headrace.core.metrics import Metric
from headrace.core.plugin.hookspecs import hookimpl
from headrace.plugins.lora.options import LORA, LoraSection

if TYPE_CHECKING:
    from headrace.core.interfaces import Constraint, LinearWrapper, OpSet
    from headrace.core.interfaces.build import CoreContext, FrontContext, HttpContext
    from headrace.core.interfaces.wrapping import WrapContext
    from headrace.core.plugin.registry import Registrar
    from headrace.plugins.lora.front import LoraFront

__all__ = ["headrace_api", "headrace_register", "name"]

name = "lora"
headrace_api = ">=1,<2"


def _front(context: FrontContext) -> LoraFront:
    from headrace.plugins.lora.front import LoraFront

    return LoraFront(context)


def _routes(context: HttpContext) -> None:
    from headrace.plugins.lora.routes import add_lora_routes

    add_lora_routes(context)


def _native() -> OpSet:
    from headrace.plugins.lora.ops import NativeLora

    return NativeLora()


def _reference() -> OpSet:
    from headrace.plugins.lora.ops import TorchLora

    return TorchLora()


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register options, parts of every room, and what travels between them."""
    from headrace.plugins.lora.shared import SharedStore

    shared = SharedStore()

    def core(context: CoreContext) -> Constraint:
        from headrace.core.interfaces import Constraint
        from headrace.plugins.lora.waiting import LoraAdapters

        section = context.config.section(name, LoraSection)
        return LoraAdapters(context, section, shared.get()) if section.is_on else Constraint()

    def worker(context: WrapContext) -> LinearWrapper | None:
        from headrace.plugins.lora.wrapper import LoraWrapper

        section = context.config.section(name, LoraSection)
        return LoraWrapper(context, section, shared.get()) if section.is_on else None

    registrar.config_section(name, LoraSection)
    registrar.request_option(name, StrictStr)
    registrar.stash_key(LORA)
    registrar.op_set("lora", _native)
    registrar.op_set("lora_torch", _reference)
    registrar.input_processor(name, _front)
    registrar.model_variants(name, _front)
    registrar.constraint(name, core)
    registrar.linear_wrapper(name, worker)
    registrar.http_route(name, _routes)
    registrar.metric("lora_adapters", lambda: Metric("gauge", "Adapters by name."))
    registrar.metric("lora_adapters_in_memory", lambda: Metric("gauge", "Adapters kept in memory."))
