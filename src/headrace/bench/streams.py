"""One streamed answer, read by bytes: when each token came, and how many there were.

The client shares a machine with the server it measures, so a chunk costs a few searches in its bytes. JSON is decoded
once an answer, for the usage; texts are put together when the run is over. A search for `"name":` is exact: within a
JSON string the quotes would be escaped, and no string is followed by a colon unless it is a name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

__all__ = ["Answer", "EventReader"]

DATA = b"data:"
DONE = b"[DONE]"
NO_CHOICES = (b'"choices":[]', b'"choices": []')
EMPTY_CONTENT = (b'"content":""', b'"content": ""', b'"content":null', b'"content": null')
EMPTY_DELTA = (b'"delta":{}', b'"delta": {}')


@dataclass
class Answer:
    """What one request came to; times are in seconds on the clock of `time.perf_counter`."""

    start_time: float
    """When it was sent."""
    queue_time: float
    """How long it waited in the client for a place among those that run."""
    prompt_tokens: int
    """As the server counts, else as the client does."""
    output_tokens: int = 0
    """As the server counts, else the number of chunks; 0 where it failed."""
    times: list[float] = field(default_factory=list)
    """When each chunk with a token came."""
    chunks: list[bytes] = field(default_factory=list)
    """Those chunks, where texts are asked for."""
    error: str = ""
    """Why it failed; empty where it did not."""

    @property
    def ttft(self) -> float:
        """Time to the first token; 0 where there is none."""
        return self.times[0] - self.start_time if self.times else 0.0

    @property
    def latency(self) -> float:
        """Time to the last token; 0 where there is none."""
        return self.times[-1] - self.start_time if self.times else 0.0

    @property
    def itls(self) -> list[float]:
        """Times between chunks."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def text(self) -> str:
        """The text of all chunks kept."""
        return "".join(_text(json.loads(chunk)) for chunk in self.chunks)


@dataclass
class EventReader:
    """Takes the bytes of a server-sent event stream as they come, and fills in an `Answer`."""

    answer: Answer
    keep_chunks: bool = False
    done: bool = False
    """Whether the stream said that it is complete."""
    _rest: bytes = b""

    def feed(self, data: bytes, now: float) -> None:
        """Take what arrived at a moment; an event cut in two waits for its other half.

        Sets the answer's `error` where the stream carries one. Raises `ValueError` for what is no JSON.
        """
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            if not event.startswith(DATA):
                event = next((line for line in event.split(b"\n") if line.startswith(DATA)), b"")
            if payload := event[len(DATA) :].strip():
                self._take(payload, now)

    def _take(self, payload: bytes, now: float) -> None:
        if payload == DONE:
            self.done = True
        elif b'"choices":' not in payload or any(mark in payload for mark in NO_CHOICES):
            self._take_rest(json.loads(payload))
        elif not _carries_no_token(payload):
            self.answer.times.append(now)
            if self.keep_chunks:
                self.answer.chunks.append(payload)

    def _take_rest(self, content: Any) -> None:
        """An error, or the usage of the whole answer."""
        fields = content if isinstance(content, dict) else {}
        if "error" in fields:
            self.answer.error = f"the stream carries an error: {fields['error']!r:.300}"
        usage = fields.get("usage") or {}
        self.answer.output_tokens = usage.get("completion_tokens") or self.answer.output_tokens
        self.answer.prompt_tokens = usage.get("prompt_tokens") or self.answer.prompt_tokens


def _carries_no_token(payload: bytes) -> bool:
    """Whether a chat's chunk only opens the answer, with a role, or closes it, with a reason."""
    if b'"role":' in payload:
        return b'"content":' not in payload or any(mark in payload for mark in EMPTY_CONTENT)
    return any(mark in payload for mark in EMPTY_DELTA)


def _text(chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
