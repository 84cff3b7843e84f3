"""The contract of grammar backends: a description of what may be said becomes masks over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    import torch

__all__ = ["Grammar", "GrammarBackend", "GrammarKind", "GrammarMatcher", "GrammarSpec", "Vocabulary"]

GrammarKind = Literal["json", "regex", "choice", "grammar"]


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must be. Equal specs mean equal grammars, so it is the key they are kept by."""

    kind: GrammarKind
    text: str
    """json: a JSON schema, an object. regex: an expression that the whole answer matches. choice: a JSON list of
    texts, one of which the answer is. grammar: rules in Lark's or GBNF's notation."""
    whitespace: int = 0
    """json: most white-space characters between two tokens of JSON."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that masks are over."""

    tokens: Sequence[bytes]
    """By id, one for each column of the model's logits; padding has no bytes, and is never allowed."""
    special_ids: frozenset[int]
    """Not text, whatever bytes they have: never allowed inside an answer."""
    end_ids: tuple[int, ...]
    """They end an answer, and are allowed where it is complete."""
    encode: Callable[[str], list[int]]
    """Text to ids, as the model is used to; thread-safe."""


class GrammarMatcher(Protocol):
    """Where one answer is in its grammar: a function of the tokens accepted so far. One thread at a time uses it."""

    def fill_mask(self, mask: torch.Tensor) -> None:
        """Set bit i % 32 of word i // 32 where token i may come next; mask is int32 [ceil(V / 32)], contiguous.

        At least one bit is set. Called where `is_ended` is False. Raises `RequestError` where the grammar cannot go
        on: too large a state, or nothing fits.
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Take a token; False: it does not fit, and nothing has changed. Raises as `fill_mask` does."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens, an end token among them or not."""
        ...

    @property
    def is_ended(self) -> bool:
        """The answer is complete and nothing can follow, or an end token came."""
        ...


class Grammar(Protocol):
    """A compiled grammar. Thread-safe, and kept for requests to come."""

    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the beginning of an answer; cheap."""
        ...


@runtime_checkable
class GrammarBackend(Protocol):
    """Compiles grammars."""

    name: str
    kinds: tuple[str, ...]
    """The kinds of `GrammarSpec` it knows."""

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> Grammar:
        """Compile; called on threads, several at once, and may take seconds. Keep what is made of a vocabulary.

        Raises `RequestError` saying which part is wrong or not supported, also where no answer fits. It must bound
        the time and the memory that a hostile spec costs.
        """
        ...
