"""Quantization: weights of fewer bits, made when a model is loaded or run as a checkpoint has them.

    LLM("smollm2", quantization="int8")    # numbers of the checkpoint, rounded to 8 bits
    LLM("smollm2-q4")                      # the blocks of a GGUF file, as they are

Here is who says how weights are held. How products with them are computed is the op sets' business, by the formats of
`headrace.core.interfaces.quantization`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headrace.core.plugin.hookspecs import hookimpl
from headrace.plugins.quantization.options import Options

if TYPE_CHECKING:
    from headrace.core.interfaces import QuantizationMethod
    from headrace.core.plugin.registry import Registrar

__all__ = ["Options", "headrace_api", "headrace_register", "name"]

name = "quantization"
headrace_api = ">=1,<2"


def _gguf() -> QuantizationMethod:
    from headrace.plugins.quantization.gguf import GGUFMethod

    return GGUFMethod()


def _compressed_tensors() -> QuantizationMethod:
    from headrace.plugins.quantization.compressed_tensors import CompressedTensorsMethod

    return CompressedTensorsMethod()


def _gptq() -> QuantizationMethod:
    from headrace.plugins.quantization.gptq import GPTQMethod

    return GPTQMethod()


def _awq() -> QuantizationMethod:
    from headrace.plugins.quantization.awq import AWQMethod

    return AWQMethod()


def _fp8() -> QuantizationMethod:
    from headrace.plugins.quantization.fp8 import FP8Method

    return FP8Method()


def _int8(options: Options) -> QuantizationMethod:
    from headrace.plugins.quantization.online import Int8

    return Int8(options)


def _int4(options: Options) -> QuantizationMethod:
    from headrace.plugins.quantization.online import Int4

    return Int4(options)


def _w8a8(options: Options) -> QuantizationMethod:
    from headrace.plugins.quantization.online import W8A8

    return W8A8(options)


@hookimpl
def headrace_register(registrar: Registrar, options: Options) -> None:
    """Register the methods; torch is imported when an engine asks for one."""
    registrar.quantization("gguf", _gguf)
    registrar.quantization("int8", partial(_int8, options))
    registrar.quantization("int4", partial(_int4, options))
    registrar.quantization("w8a8", partial(_w8a8, options))
    registrar.quantization("compressed-tensors", _compressed_tensors)
    registrar.quantization("gptq", _gptq)
    registrar.quantization("awq", _awq)
    registrar.quantization("fp8", _fp8)
