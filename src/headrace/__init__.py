"""Headrace: an LLM inference engine in which every part is a plugin.

    from headrace import LLM, SamplingParams

Names resolve when they are first used, so that `import headrace` is quick and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headrace.core.plugin.hookspecs import API_VERSION, hookimpl

if TYPE_CHECKING:
    from headrace.async_llm import AsyncLLM
    from headrace.beams import BeamSearchParams
    from headrace.core.config import EngineConfig
    from headrace.core.sampling_params import SamplingParams
    from headrace.embedding import EmbeddingOutput
    from headrace.llm import LLM
    from headrace.outputs import CompletionOutput, RequestOutput

    __version__: str

__all__ = [
    "API_VERSION",
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "hookimpl",
]

_HOMES = {
    "AsyncLLM": "headrace.async_llm",
    "BeamSearchParams": "headrace.beams",
    "LLM": "headrace.llm",
    "SamplingParams": "headrace.core.sampling_params",
    "EngineConfig": "headrace.core.config",
    "RequestOutput": "headrace.outputs",
    "CompletionOutput": "headrace.outputs",
    "EmbeddingOutput": "headrace.embedding",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # slow to import, and seldom asked for

        return version("headrace")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; there are: {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(home), name)
