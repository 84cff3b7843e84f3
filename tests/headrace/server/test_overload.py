"""A full queue, a long wait, a deadline: what a client is told."""

from __future__ import annotations

import contextlib
import http.client
import json
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
    """One request runs, one waits, and no test waits until its time is over."""
    path = tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", {"llama.context_length": 32768})
    options = {"max_num_seqs": 1, "max_num_queued_requests": 1, "queue_timeout": 600.0}
    with http_server({}, str(path), **options) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(
    http_server: Callable[..., Any], tiny_gguf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """One request runs, and the others wait for a moment."""
    path = tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", {"llama.context_length": 32768})
    with http_server({}, str(path), max_num_seqs=1, queue_timeout=0.3) as server:
        yield server


@contextlib.contextmanager
def held(server: Any, **body: Any) -> Iterator[None]:
    """A long request that is there until the client leaves."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    data = json.dumps({"prompt": PROMPT, "temperature": 0, **LONG, **body})
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        yield


@contextlib.contextmanager
def place_taken(server: Any) -> Iterator[None]:
    """The one place is taken, by a request whose steps are slow: it lasts longer than any test."""
    server.pace.seconds = 0.02
    try:
        with held(server, stream=True):
            wait_for(server, "num_requests_running", 1)
            yield
        wait_for(server, "num_requests_running", 0)
    finally:
        server.pace.seconds = 0.0
    assert server.engine.num_unfinished == 0


def wait_for(server: Any, name: str, value: float) -> None:
    deadline = time.monotonic() + 30
    while server.metric(name) != value:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_503(narrow: Any, stream: bool) -> None:
    with place_taken(narrow):
        with held(narrow, stream=stream):
            wait_for(narrow, "num_requests_waiting", 1)
            for prompt in (PROMPT, [PROMPT, PROMPT]):
                answer = narrow.complete(prompt, **LONG, stream=stream)
                assert answer.status == 503
                assert answer.headers["retry-after"] == "1"
                assert answer.error["type"] == "service_unavailable_error"
                assert "max_num_queued_requests is 1" in answer.error["message"]
        wait_for(narrow, "num_requests_waiting", 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_wait_is_503(impatient: Any, stream: bool) -> None:
    with place_taken(impatient):
        answer = impatient.complete(PROMPT, **LONG, stream=stream)
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert "queue_timeout" in answer.error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_keeps_what_there_is(narrow: Any, stream: bool) -> None:
    """The first token has two seconds, and the last one would come after minutes."""
    narrow.pace.seconds = 0.02
    answer = narrow.complete(PROMPT, **LONG, timeout=2, stream=stream)
    narrow.pace.seconds = 0.0
    choices = [chunk["choices"][0] for chunk in answer.chunks] if stream else answer.json["choices"]
    assert choices[-1]["finish_reason"] == "timeout"
    ids = [token for choice in choices for token in choice.get("token_ids", ())]
    assert ids
    assert stream or len(ids) == answer.json["usage"]["completion_tokens"]
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
