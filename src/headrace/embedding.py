"""Embeddings, as a caller asks for them and gets them. The work is done by the plugin `pooling`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import RequestError
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import StashKey
from headrace.outputs import RequestOutput

__all__ = ["EmbeddingOutput", "embedding_outputs", "embedding_params"]

_EMBEDDING: StashKey[Any] = StashKey("pooling/embedding", direction="result")
"""The plugin's key, by its name: a value has `pooling` and `vector`."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt's vector."""

    request_id: str
    prompt_token_ids: list[int]
    embedding: list[float]
    """As many as the model's hidden size, values of float32."""
    pooling: str
    """`"mean"`, `"cls"` or `"last"`: how it was made."""


def embedding_params(pooling: str | None = None, *, normalize: bool = True) -> SamplingParams:
    """Return the parameters of a request for an embedding; they are checked when the request is made."""
    return SamplingParams(max_tokens=0, pooling={"type": pooling, "normalize": normalize})


def embedding_outputs(outputs: Sequence[RequestOutput]) -> list[EmbeddingOutput]:
    """Take the vectors out of finished requests. Raises `RequestError` naming the first that has none, and why."""
    return [_embedding(index, output) for index, output in enumerate(outputs)]


def _embedding(index: int, output: RequestOutput) -> EmbeddingOutput:
    found = output.outputs[0].stash.get(_EMBEDDING)
    if found is None or output.error is not None:
        raise RequestError(
            f"prompt {index} has no embedding: {output.error or output.outputs[0].finish_reason}"
        )
    return EmbeddingOutput(output.request_id, output.prompt_token_ids, list(found.vector), found.pooling)
