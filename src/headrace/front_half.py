"""The front half of an engine: what turns prompts into requests. It is made from facts alone, and imports no torch.

The core half opens the checkpoint and tells `ModelFacts`; the front half is built from them, in the same process or
in another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.config import EngineConfig
from headrace.core.interfaces import InputProcessor, ModelVariants, Tokenizer
from headrace.core.interfaces.build import FrontContext
from headrace.core.plugin.registry import Registry
from headrace.generation_defaults import GenerationDefaults
from headrace.models.opening import build_tokenizer

__all__ = ["FrontHalf", "ModelFacts", "build_front", "generation_defaults"]


class ModelFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What a front half has to know of a model that was loaded; plain values, so that it may cross processes."""

    path: str
    """The checkpoint, a file or a folder."""
    tokenizer: dict[str, Any] | None
    """As `Checkpoint.tokenizer`."""
    chat_template: Any
    generation_config: dict[str, Any]
    vocab_size: int
    max_model_len: int
    causal: bool
    """False: the model is an encoder."""
    fingerprint: str
    """Names everything that decides the last bit of an answer: kernels, tier, formats, sizes."""


@dataclass(frozen=True)
class FrontHalf:
    """What requests are made with."""

    config: EngineConfig
    registry: Registry
    facts: ModelFacts
    shared: Mapping[str, Any]
    """See `FrontContext.shared`."""
    tokenizer: Tokenizer | None
    input_processors: tuple[InputProcessor, ...]
    eos_token_ids: tuple[int, ...]
    """Ids that end an answer, the tokenizer's first."""
    defaults: GenerationDefaults
    """The model's own sampling defaults."""
    variants: tuple[ModelVariants, ...] = ()
    """Names beside the model's own."""

    @property
    def vocab_size(self) -> int:
        """Ids the model knows: [0, vocab_size)."""
        return self.facts.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self.facts.max_model_len

    @property
    def causal(self) -> bool:
        """False: the model is an encoder."""
        return self.facts.causal


def build_front(
    config: EngineConfig, registry: Registry, facts: ModelFacts, shared: Mapping[str, Any]
) -> FrontHalf:
    """Make tokenizer and input processors. Raises `CheckpointError` for a tokenizer that cannot be made.

    shared: see `FrontContext.shared`.
    """
    tokenizer = build_tokenizer(facts.tokenizer, registry)
    eos = _eos_ids(facts, tokenizer)
    context = FrontContext(
        config=config,
        registry=registry,
        tokenizer=tokenizer,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        chat_template=facts.chat_template,
        eos_token_ids=eos,
        causal=facts.causal,
        model_path=Path(facts.path),
        shared=shared,
    )
    return FrontHalf(
        config=config,
        registry=registry,
        facts=facts,
        shared=shared,
        tokenizer=tokenizer,
        input_processors=tuple(entry.factory(context) for entry in registry.entries("input_processor")),
        eos_token_ids=eos,
        defaults=generation_defaults(config, facts.generation_config),
        variants=tuple(entry.factory(context) for entry in registry.entries("model_variants")),
    )


def generation_defaults(config: EngineConfig, generation_config: dict[str, Any]) -> GenerationDefaults:
    """Return the model's own sampling defaults, as far as they are wanted."""
    return GenerationDefaults(generation_config if config.generation_config == "auto" else {})


def _eos_ids(facts: ModelFacts, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids that end an answer, the tokenizer's first."""
    stated = facts.generation_config.get("eos_token_id") or []
    more = [stated] if isinstance(stated, int) else list(stated)
    return tuple(dict.fromkeys([*(tokenizer.eos_token_ids if tokenizer else ()), *more]))
