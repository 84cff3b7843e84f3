"""Streams in larger chunks say what single tokens say."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.weights

PROMPTS = [
    "The capital of France is",
    "źdźbło 🙂 漢字 ďábel: źdźbło 🙂 漢字 ďábel: źdźbło 🙂",
    "สวัสดี 🇫🇷👩‍👩‍👧 こんにちは 🙂🙂🙂 ",
]


@pytest.mark.parametrize("interval", range(1, 8))
@pytest.mark.parametrize("prompt", PROMPTS)
def test_joined_deltas_are_the_whole_text_at_every_interval(server: Any, prompt: str, interval: int) -> None:
    asked = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2, "temperature": 0.8, "seed": 3, "n": 2}
    whole = server.complete(prompt, **asked).json
    chunks = server.complete(prompt, stream=True, stream_interval=interval, **asked).chunks
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            joined = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
            assert joined == values, name
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        # The first token comes at once, then so many at a time.
        assert len(parts) == 1 + -(-23 // interval)


def test_stop_strings_and_chats_at_an_interval(server: Any) -> None:
    whole = server.chat("Count to nine.", max_tokens=40, stop=["5"]).json["choices"][0]
    chunks = server.chat("Count to nine.", max_tokens=40, stop=["5"], stream=True, stream_interval=4).chunks
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("interval", [1, 4])
def test_logprobs_of_a_chat_are_the_same_both_ways(server: Any, interval: int) -> None:
    """Sources: sgl-project/sglang#39260, #30188."""
    asked = {"logprobs": True, "top_logprobs": 3, "max_tokens": 30}
    whole = server.chat("Tell me of the sea.", **asked).json["choices"][0]
    chunks = server.chat("Tell me of the sea.", stream=True, stream_interval=interval, **asked).chunks
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["delta"].get("content") or "" for part in parts) == whole["message"]["content"]
    joined = [token for part in parts if part["logprobs"] for token in part["logprobs"]["content"]]
    assert joined == whole["logprobs"]["content"]
    assert len(joined) == 30
    assert len({str(token["top_logprobs"]) for token in joined}) > 10, "each has its own"


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", 10_000])
def test_wrong_intervals_are_refused(server: Any, wrong: Any) -> None:
    error = server.complete("a", stream=True, stream_interval=wrong).error
    assert error["param"] == "stream_interval"
    assert str(wrong) in json.dumps(error["message"])
