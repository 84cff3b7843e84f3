"""Streams of a served model while other clients are busy."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator

import pytest

from headrace.testing.serving import Server, serving

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), "--max-num-seqs", "32") as server:
        yield server


def chunk_times(
    server: Server, max_tokens: int, begun: threading.Event, enough: threading.Event
) -> list[float]:
    """Stream a completion and note when each event arrives; leave when somebody has seen enough."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"prompt": "The river", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    times = []
    while not enough.is_set() and (line := answer.readline()):
        if line.startswith(b"data: {"):
            times.append(time.monotonic())
            if len(times) == 8:
                begun.set()
    connection.close()
    return times


def test_a_token_is_a_chunk(server: Server) -> None:
    assert len(chunk_times(server, 24, threading.Event(), threading.Event())) == 24


def test_a_very_long_prompt_of_another_client_does_not_stall_a_stream(server: Server) -> None:
    begun, enough = threading.Event(), threading.Event()
    times: list[float] = []
    # It goes on until the other one has its answer, however long that takes.
    stream = threading.Thread(target=lambda: times.extend(chunk_times(server, 4000, begun, enough)))
    stream.start()
    assert begun.wait(60)
    sent = time.monotonic()
    status, answer = server.complete(prompt="The quick brown fox jumps over the lazy dog. " * 24_000)
    refused = time.monotonic()
    enough.set()
    stream.join()
    assert status == 400
    assert "240001 tokens" in answer["error"]["message"]
    during = [moment for moment in times if sent <= moment <= refused]
    # It takes a good while to tokenize; without a thread for it nothing would come meanwhile.
    assert len(during) >= 5, (refused - sent, len(during))


def test_streams_beside_each_other_are_those_that_run_alone(server: Server) -> None:
    """Source: InternLM/lmdeploy#1232: clients with other stop strings, temperatures and logprobs."""
    shapes = [
        {},
        {"stop": ["."]},
        {"stop": ["\n", "the", "zz", "and"]},
        {"stop": ["é🙂漢字"], "logprobs": 3},
        {"stop_token_ids": [30, 42], "temperature": 0.9, "seed": 4},
        {"temperature": 1.2, "seed": 7, "top_p": 0.8, "min_p": 0.05},
        {"repetition_penalty": 1.3, "n": 2, "temperature": 0.7, "seed": 1},
        {"echo": True, "logprobs": 1},
    ]
    bodies = [
        {"prompt": f"Number {place}: once upon a time", "max_tokens": 24, **shape}
        for place, shape in enumerate(shapes * 3)
    ]

    def told(body: str) -> list[object]:
        return [(choice["text"], choice["logprobs"]) for choice in json.loads(body)["choices"]]

    together = [server.begin(**body) for body in bodies]
    answers = [told(opened.wait(120).body) for opened in together]
    for body, answer in zip(bodies, answers, strict=True):
        assert told(json.dumps(server.complete(**body)[1])) == answer, body
    server.wait_drained()
