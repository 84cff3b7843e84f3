"""A full queue, a long wait, a deadline: what a client is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROMPT = [5, 6, 7]
LONG = {"max_tokens": 20_000, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def narrow(
    http_server: Callable[..., Any], tiny_gguf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """One request runs, one waits."""
    path = tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", {"llama.context_length": 32768})
    options = {"max_num_seqs": 1, "max_num_queued_requests": 1, "queue_timeout": 1.0}
    with http_server({}, str(path), **options) as server:
        yield server


def begin(server: Any, into: list[Any], **body: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: into.append(server.complete(PROMPT, **{**LONG, **body})))
    thread.start()
    return thread


def wait_for(server: Any, name: str, value: float) -> None:
    deadline = time.monotonic() + 10
    while server.metric(name) != value:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_and_a_long_wait_are_503(narrow: Any, stream: bool) -> None:
    running: list[Any] = []
    waiting: list[Any] = []
    first = begin(narrow, running, stream=True, timeout=2.5)
    wait_for(narrow, "num_requests_running", 1)
    second = begin(narrow, waiting, stream=stream)
    wait_for(narrow, "num_requests_waiting", 1)
    for prompt in (PROMPT, [PROMPT, PROMPT]):
        answer = narrow.complete(prompt, **LONG, stream=stream)
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.error["type"] == "service_unavailable_error"
        assert "max_num_queued_requests is 1" in answer.error["message"]
    second.join(10)
    assert waiting[0].status == 503
    assert waiting[0].headers["retry-after"] == "1"
    assert "queue_timeout" in waiting[0].error["message"]
    first.join(10)
    [*_, last] = running[0].chunks
    assert last["choices"][0]["finish_reason"] == "timeout"
    assert narrow.engine.num_unfinished == 0


def test_a_deadline_keeps_what_there_is(narrow: Any) -> None:
    answer = narrow.complete(PROMPT, **LONG, timeout=0.3)
    [choice] = answer.json["choices"]
    assert choice["finish_reason"] == "timeout"
    assert 0 < len(choice["token_ids"]) == answer.json["usage"]["completion_tokens"]
    assert narrow.complete(PROMPT, max_tokens=1).status == 200


def test_a_part_of_a_batch_that_fails_ends_the_rest(narrow: Any) -> None:
    """Three prompts, and places for two: none of them goes on."""
    assert narrow.complete([PROMPT] * 3, **LONG).status == 503
    stream = narrow.complete([PROMPT] * 3, **LONG, stream=True)
    # The first prompt's first token may be there before the third one is refused.
    told = stream.error if stream.status == 503 else stream.chunks[-1]["error"]
    assert "max_num_queued_requests" in told["message"]
    wait_for(narrow, "num_requests_running", 0)
    assert narrow.engine.num_unfinished == 0
