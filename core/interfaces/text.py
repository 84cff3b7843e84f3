"""The front end's contracts: text to tokens and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from headrace.core.request import BlockKey
    from headrace.core.sampling_params import SamplingParams
    from headrace.core.stash import Stash

__all__ = ["InputProcessor", "ProcessedInput", "Tokenizer"]


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back. Thread-safe."""

    vocab_size: int
    """Ids it knows: [0, vocab_size)."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_ids: frozenset[int]
    """Ids whose text is hidden by `skip_special_tokens`."""

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """Return ids. `add_special_tokens`: the start token, where the model wants one.

        `parse_special`: special tokens spelt out in `text` become their ids (a rendered chat template);
        otherwise they are ordinary text.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; those of a special token are its spelling. Joined and decoded as
        UTF-8 they give the text."""
        ...


@dataclass
class ProcessedInput:
    """A prompt on its way through the chain; each processor fills or changes what is its own."""

    prompt: str | Mapping[str, Any] | Sequence[int]
    params: SamplingParams
    stash: Stash
    text: str | None = None
    token_ids: list[int] | None = None
    block_keys: list[BlockKey] = field(default_factory=list)
    reads_prefix_cache: bool = True
    """See `EngineRequest.reads_prefix_cache`; a processor may only turn it off."""
    is_chat: bool = False
    """The text is a rendered chat template: its special tokens count, and none is added."""


@runtime_checkable
class InputProcessor(Protocol):
    """One link of the chain from a prompt to an `EngineRequest`; runs in the front end, thread-safe."""

    name: str

    def process(self, item: ProcessedInput) -> None:
        """Change `item` in place. Raises `RequestError` for that request alone."""
        ...
