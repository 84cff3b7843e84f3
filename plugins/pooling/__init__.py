"""Embeddings: what the model makes of a prompt, pooled into one vector.

`SamplingParams(max_tokens=0, pooling={"type": "mean"})` asks for one, and `LLM.embed` says so for you. The front
half settles what the request left open, the worker's half pools hidden states as chunks of the prompt come by, and
the vector travels in the stash of the result. Encoders are given their prompts whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.core.plugin.hookspecs import hookimpl
from headrace.plugins.pooling.options import EMBEDDING, POOLING, PoolingOption

if TYPE_CHECKING:
    from headrace.core.interfaces import Constraint, InputProcessor, RunnerListener
    from headrace.core.interfaces.build import CoreContext, FrontContext, WorkerContext
    from headrace.core.plugin.registry import Registrar

__all__ = ["headrace_api", "headrace_register", "name"]

name = "pooling"
headrace_api = ">=1,<2"


def _front(context: FrontContext) -> InputProcessor:
    from headrace.plugins.pooling.front import PoolingInput

    return PoolingInput(context)


def _core(context: CoreContext) -> Constraint:
    from headrace.plugins.pooling.whole_prompts import WholePrompts

    return WholePrompts(context)


def _worker(context: WorkerContext) -> RunnerListener:
    from headrace.plugins.pooling.runner import PoolingListener

    return PoolingListener()


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the request option, one part a room, and what travels between them."""
    registrar.request_option(name, PoolingOption)
    registrar.stash_key(POOLING)
    registrar.stash_key(EMBEDDING)
    registrar.input_processor(name, _front)
    registrar.constraint(name, _core)
    registrar.runner_listener(name, _worker)
