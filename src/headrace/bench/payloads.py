"""How a request of a workload is put to a server, by the kind of its API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["API", "APIS", "Prompt", "body"]


@dataclass(frozen=True)
class API:
    """One way to ask for a completion."""

    endpoint: str
    takes_text: bool
    """Whether it wants text; else token ids, which make a prompt of a known length."""


APIS = {
    "openai": API("/v1/completions", False),
    "openai-chat": API("/v1/chat/completions", True),
}
"""By the name of vLLM's `--backend`."""


@dataclass(frozen=True)
class Prompt:
    """What is sent, and what is known of it."""

    content: str | list[int]
    """Text or token ids, as the API takes it."""
    num_tokens: int
    """As far as the client knows; a server that reports usage knows better, a chat template included."""
    max_tokens: int


def body(api: API, model: str, prompt: Prompt, options: Mapping[str, Any]) -> bytes:
    """Return a streamed request's JSON, whose last chunk reports how many tokens there were.

    options: more fields, such as temperature.
    """
    if api.takes_text:
        asked = {
            "messages": [{"role": "user", "content": prompt.content}],
            "max_completion_tokens": prompt.max_tokens,
        }
    else:
        asked = {"prompt": prompt.content, "max_tokens": prompt.max_tokens}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({"model": model, **asked, **streamed, **options}).encode()
