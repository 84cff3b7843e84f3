"""What the formats of both compute routes share: the head of an answer, the events of a stream, the usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headrace.outputs import RequestOutput, RequestUpdate
from headrace.server.answers import CompletionTokensDetails, PromptTokensDetails, Usage
from headrace.server.errors import ApiError
from headrace.server.protocol import StreamOptions

__all__ = ["DONE", "AnswerFormat", "EventWriter", "Head", "error_event", "usage_of"]

DONE = b"data: [DONE]\n\n"
"""The last event of every stream."""


@dataclass(frozen=True)
class Head:
    """What all chunks of an answer have in common."""

    id: str
    created: int
    """Seconds since the epoch."""
    model: str
    """As the request called it."""
    system_fingerprint: str


class AnswerFormat(Protocol):
    """How one request is answered."""

    def whole(self, outputs: Sequence[RequestOutput]) -> msgspec.Struct:
        """Return the answer; outputs are finished, one a prompt."""
        ...

    def write(self, place: int, update: RequestUpdate, events: list[bytes]) -> None:
        """Append the events of a stream that say what is new of prompt `place`.

        Raises `ApiError` for an answer that failed; what went before is appended then.
        """
        ...

    def end(self) -> bytes:
        """Return what comes after the last event and before `[DONE]`."""
        ...


class EventWriter:
    """Writes a stream's chunks: everything that is the same in each is encoded once.

    Parameters
    ----------
    object_name: the field `object` of a chunk.
    num_prompts: engine requests the stream is made of.
    """

    def __init__(
        self, head: Head, object_name: str, options: StreamOptions | None, num_prompts: int = 1
    ) -> None:
        self._with_usage = bool(options and options.include_usage)
        self._continuous = self._with_usage and bool(options and options.continuous_usage_stats)
        fields = {
            "id": head.id,
            "object": object_name,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
        }
        self._encoder = msgspec.json.Encoder()
        self._start = b"data: " + self._encoder.encode(fields)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if self._with_usage else b"]}\n\n"
        self._prompt_tokens = [0] * num_prompts
        self._cached_tokens = [0] * num_prompts
        self._completion_tokens = 0
        self.reasoning_tokens: int | None = None
        """Of all answers so far; None: nobody counts them."""

    def count(self, place: int, update: RequestUpdate) -> None:
        """Take an update's tokens into the usage."""
        self._completion_tokens += sum(len(delta.token_ids) for delta in update.deltas)
        self._prompt_tokens[place] = len(update.output.prompt_token_ids)
        self._cached_tokens[place] = update.output.num_cached_tokens

    def event(self, choice: msgspec.Struct) -> bytes:
        """Return the event of a chunk with one choice."""
        if self._continuous:
            return self._start + self._encoder.encode(choice) + b'],"usage":' + self._usage()
        return self._start + self._encoder.encode(choice) + self._end

    def end(self) -> bytes:
        """Return the event with the usage, if it was asked for."""
        return self._start + b'],"usage":' + self._usage() if self._with_usage else b""

    def _usage(self) -> bytes:
        usage = _usage(
            sum(self._prompt_tokens),
            self._completion_tokens,
            sum(self._cached_tokens),
            self.reasoning_tokens,
        )
        return self._encoder.encode(usage) + b"}\n\n"


def usage_of(outputs: Sequence[RequestOutput], reasoning_tokens: int | None = None) -> Usage:
    """Return the usage of a whole request.

    reasoning_tokens: None: nobody counts them.
    """
    return _usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(answer.token_ids) for output in outputs for answer in output.outputs),
        sum(output.num_cached_tokens for output in outputs),
        reasoning_tokens,
    )


def error_event(error: ApiError) -> bytes:
    """Return the event of a stream that breaks off."""
    return b"data: " + error.to_json() + b"\n\n"


def _usage(prompt: int, completion: int, cached: int, reasoning: int | None) -> Usage:
    usage = Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
    if reasoning is not None:
        usage.completion_tokens_details = CompletionTokensDetails(reasoning)
    return usage
