"""What this room brings to an engine, by name. Factories import when called: registering imports neither torch
nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from headrace.core.interfaces import ModelDefinition, ModelSource, Tokenizer, WeightLoader
    from headrace.core.plugin.registry import Registrar

__all__ = ["headrace_api", "headrace_register", "name"]

name = "models"
headrace_api = ">=1,<2"


def _path_source() -> ModelSource:
    from headrace.models.sources.path import PathSource

    return PathSource()


def _package_source() -> ModelSource:
    from headrace.models.sources.package import PackageSource

    return PackageSource()


def _hub_source() -> ModelSource:
    from headrace.models.sources.hub import HubSource

    return HubSource()


def _gguf_loader() -> WeightLoader:
    from headrace.models.gguf.loader import GGUFLoader

    return GGUFLoader()


def _safetensors_loader() -> WeightLoader:
    from headrace.models.safetensors.loader import SafetensorsLoader

    return SafetensorsLoader()


def _tokenizer_json(data: Mapping[str, Any]) -> Tokenizer:
    from headrace.models.tokenizers.tokenizer_json import build_json_tokenizer

    return build_json_tokenizer(data)


def _gguf_bpe(data: Mapping[str, Any]) -> Tokenizer:
    from headrace.models.tokenizers.gguf_bpe import build_bpe_tokenizer

    return build_bpe_tokenizer(data)


def _gguf_sentencepiece(data: Mapping[str, Any]) -> Tokenizer:
    from headrace.models.tokenizers.gguf_sentencepiece import build_sentencepiece_tokenizer

    return build_sentencepiece_tokenizer(data)


def _llama() -> ModelDefinition:
    from headrace.models.llama import LlamaDefinition

    return LlamaDefinition()


def _mistral() -> ModelDefinition:
    from headrace.models.mistral import MistralDefinition

    return MistralDefinition()


def _qwen2() -> ModelDefinition:
    from headrace.models.qwen2 import Qwen2Definition

    return Qwen2Definition()


def _qwen3() -> ModelDefinition:
    from headrace.models.qwen3 import Qwen3Definition

    return Qwen3Definition()


def _gemma2() -> ModelDefinition:
    from headrace.models.gemma2 import Gemma2Definition

    return Gemma2Definition()


def _gemma3() -> ModelDefinition:
    from headrace.models.gemma3 import Gemma3Definition

    return Gemma3Definition()


def _ministral() -> ModelDefinition:
    from headrace.models.mistral import MinistralDefinition

    return MinistralDefinition()


def _phi3() -> ModelDefinition:
    from headrace.models.phi3 import Phi3Definition

    return Phi3Definition()


def _granite() -> ModelDefinition:
    from headrace.models.granite import GraniteDefinition

    return GraniteDefinition()


def _olmo2() -> ModelDefinition:
    from headrace.models.olmo2 import Olmo2Definition

    return Olmo2Definition()


def _olmo3() -> ModelDefinition:
    from headrace.models.olmo2 import Olmo3Definition

    return Olmo3Definition()


def _smollm3() -> ModelDefinition:
    from headrace.models.smollm3 import SmolLM3Definition

    return SmolLM3Definition()


def _bert() -> ModelDefinition:
    from headrace.models.bert import BertDefinition

    return BertDefinition()


def _transformers() -> ModelDefinition:
    from headrace.models.bridge.definition import BridgeDefinition

    return BridgeDefinition()


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register sources, loaders, tokenizers and architectures."""
    registrar.model_source("path", _path_source)
    registrar.model_source("pypi", _package_source)
    registrar.model_source("hf", _hub_source)
    registrar.weight_loader("gguf", _gguf_loader)
    registrar.weight_loader("safetensors", _safetensors_loader)
    registrar.tokenizer("tokenizer_json", _tokenizer_json)
    registrar.tokenizer("gguf_gpt2", _gguf_bpe)
    registrar.tokenizer("gguf_llama", _gguf_sentencepiece)
    registrar.model("llama", _llama)
    registrar.model("bert", _bert)
    registrar.model("mistral", _mistral)
    registrar.model("qwen2", _qwen2)
    registrar.model("qwen3", _qwen3)
    registrar.model("ministral", _ministral)
    registrar.model("phi3", _phi3)
    registrar.model("granite", _granite)
    registrar.model("olmo2", _olmo2)
    registrar.model("olmo3", _olmo3)
    registrar.model("smollm3", _smollm3)
    registrar.model("gemma2", _gemma2)
    registrar.model("gemma3", _gemma3)
    registrar.model("transformers", _transformers)
