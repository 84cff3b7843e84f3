"""Quantization: weights of fewer bits, made when a model is loaded or run as a checkpoint has them.

    LLM("smollm2", quantization="int8")    # numbers of the checkpoint, rounded to 8 bits
    LLM("smollm2-q4")                      # the blocks of a GGUF file, as they are

Here is who says how weights are held. How products with them are computed is the op sets' business, by the formats of
`headrace.core.interfaces.quantization`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from headrace.core.interfaces import QuantizationMethod
    from headrace.core.plugin.registry import Registrar

__all__ = ["headrace_api", "headrace_register", "name"]

name = "quantization"
headrace_api = ">=1,<2"


def _gguf() -> QuantizationMethod:
    from headrace.plugins.quantization.gguf import GGUFMethod

    return GGUFMethod()


def _int8() -> QuantizationMethod:
    from headrace.plugins.quantization.online import Int8

    return Int8()


def _w8a8() -> QuantizationMethod:
    from headrace.plugins.quantization.online import W8A8

    return W8A8()


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the methods; torch is imported when an engine asks for one."""
    registrar.quantization("gguf", _gguf)
    registrar.quantization("int8", _int8)
    registrar.quantization("w8a8", _w8a8)
