"""What a request may ask, and what travels through the engine."""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import BaseModel, ConfigDict

from headrace.core.stash import StashKey

__all__ = ["EMBEDDING", "POOLING", "POOLING_TYPES", "Embedding", "Pooling", "PoolingOption", "PoolingType"]

PoolingType = Literal["mean", "cls", "last"]

POOLING_TYPES: tuple[PoolingType, ...] = ("mean", "cls", "last")


class PoolingOption(BaseModel):
    """The request option `pooling`; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: PoolingType | None = None
    """`mean` of all tokens, the first one (`cls`), or the `last`; None: what the checkpoint says, else `mean` for
    encoders and `last` for others."""
    normalize: bool = True
    """Scale the vector to length 1."""


class Pooling(msgspec.Struct, array_like=True, frozen=True):
    """What is to be done with a request's hidden states."""

    type: PoolingType
    normalize: bool


class Embedding(msgspec.Struct, array_like=True, frozen=True):
    """What was done."""

    pooling: str
    vector: list[float]
    """[C], values of float32."""


POOLING: StashKey[Pooling] = StashKey("pooling/request", Pooling, direction="request")

EMBEDDING: StashKey[Embedding] = StashKey("pooling/embedding", Embedding, direction="result")
"""Comes once with the step that ends the prompt; after a preemption again, with the same value."""
