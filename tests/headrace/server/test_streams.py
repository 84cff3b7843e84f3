"""Streams to the byte, and clients that vanish."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.core.errors import EngineError

pytestmark = pytest.mark.weights

LONG = {"prompt": "The river", "max_tokens": 120, "ignore_eos": True}


def normal(body: bytes) -> str:
    """A stream with its id and time made the same in every run."""
    text = re.sub(r'"id":"(cmpl|chatcmpl)-[0-9a-f]{32}"', r'"id":"\1-ID"', body.decode())
    text = re.sub(r'"created":\d{10}', '"created":TIME', text)
    return re.sub(r'"system_fingerprint":"[0-9a-f]{12}"', '"system_fingerprint":"FP"', text)


def test_a_completion_to_the_byte(server: Any) -> None:
    answer = server.complete(
        "The capital of France is", max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    assert answer.headers["cache-control"] == "no-cache"
    head = (
        'data: {"id":"cmpl-ID","object":"text_completion","created":TIME,"model":"smollm2",'
        '"system_fingerprint":"FP","choices":['
    )
    assert normal(answer.body) == (
        f'{head}{{"index":0,"text":" Paris","logprobs":null,"finish_reason":null,"stop_reason":null}}],'
        '"usage":null}\n\n'
        f'{head}{{"index":0,"text":".","logprobs":null,"finish_reason":"length","stop_reason":null}}],'
        '"usage":null}\n\n'
        f'{head}],"usage":{{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,'
        '"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
        "data: [DONE]\n\n"
    )


def test_a_chat_to_the_byte(server: Any) -> None:
    answer = server.chat("hi", max_tokens=2, stream=True)
    head = (
        'data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":TIME,"model":"smollm2",'
        '"system_fingerprint":"FP","choices":[{"index":0,"delta":'
    )
    assert normal(answer.body) == (
        f'{head}{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{"content":"Hello"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{"content":" there"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{}},"logprobs":null,"finish_reason":"length","stop_reason":null}}]}}\n\n'
        "data: [DONE]\n\n"
    )


def test_each_token_is_sent_when_it_is_there(server: Any) -> None:
    """Chunks arrive one by one, not at the end: a step is planned when the chunk of the last but one is there."""
    count = 0
    body = {"model": "", "prompt": "The river", "max_tokens": 40, "stream": True}
    server.pace.steps = threading.Semaphore(2)  # a step is planned while another is computed
    try:
        with server.client().completions.create(**body, extra_body={"ignore_eos": True}) as stream:
            for _ in stream:
                count += 1
                server.pace.steps.release()
    finally:
        server.pace.steps = None
    assert count == 40


def post(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request, and leave its answer to the caller."""
    client = socket.create_connection(("127.0.0.1", port))
    data = json.dumps(body).encode()
    client.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return client


@pytest.fixture
def slow(server: Any) -> Iterator[None]:
    """Answers that last for seconds, on any machine: what is to be seen in the middle of them is there to be seen."""
    server.pace.seconds = 0.05
    yield
    server.pace.seconds = 0.0


def wait_until(what: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def check_drained(server: Any) -> None:
    wait_until(lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0)
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.engine.num_unfinished == 0


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("more", "running"),
    [
        ({"stream": True}, 1),
        ({"stream": False}, 1),
        ({"stream": True, "n": 3}, 3),
        ({"prompt": ["a", "b", "c"], "n": 2}, 6),
        ({"prompt": ["a", "b", "c"], "stream": True}, 3),
    ],
    ids=str,
)
def test_a_client_that_vanishes_ends_all_its_requests(
    server: Any, more: dict[str, Any], running: int
) -> None:
    """Source: vllm-project/vllm#9428."""
    before = server.metric("generation_tokens")
    client = post(server.port, "/v1/completions", {**LONG, **more})
    wait_until(lambda: server.metric("num_requests_running") == running)
    client.close()
    check_drained(server)
    assert server.metric("generation_tokens") - before < 120 * running
    server.check_alive()


def test_a_client_that_vanishes_while_it_waits(server: Any) -> None:
    """More requests than run at once; those in the queue go as well."""
    most = server.engine.config.scheduler.max_num_seqs
    prompts = [f"{number}" for number in range(16)]
    rounds = most // (16 * 1) + 1
    clients = [
        post(server.port, "/v1/completions", {**LONG, "prompt": prompts, "stream": bool(i % 2)})
        for i in range(rounds)
    ]
    wait_until(lambda: server.metric("num_requests_waiting") > 0)
    for client in clients:
        client.close()
    check_drained(server)
    server.check_alive()


@pytest.mark.usefixtures("slow")
def test_a_request_ended_from_elsewhere_is_an_error(server: Any) -> None:
    """What ends requests when the server stops: nobody waits for ever."""
    for stream in (False, True):
        client = post(server.port, "/v1/completions", {**LONG, "stream": stream})
        begun = begin(server, client, stream)

        async def end() -> None:
            server.engine.fail_all(EngineError("the server is shutting down"))

        server.run(end())
        answer = begun + read_all(client)
        assert "the server is shutting down" in answer
        if stream:
            assert answer.startswith("HTTP/1.1 200 ")
            assert 'data: {"error":{"message":"the server is shutting down"' in answer
            assert answer.rstrip("\r\n0").endswith("data: [DONE]")
            assert '"finish_reason":"' not in answer
        else:
            assert answer.startswith("HTTP/1.1 503 ")
    check_drained(server)


@pytest.mark.usefixtures("slow")
def test_an_abort_from_elsewhere_is_an_error(server: Any) -> None:
    client = post(server.port, "/v1/completions", {**LONG, "stream": True})
    begun = begin(server, client, stream=True)

    async def end() -> None:
        server.engine.abort(list(server.engine._streams))

    server.run(end())
    answer = begun + read_all(client)
    assert '"type":"service_unavailable_error"' in answer
    assert answer.rstrip("\r\n0").endswith("data: [DONE]")


def begin(server: Any, client: socket.socket, stream: bool) -> str:
    """Wait until an answer has begun; return what came of it."""
    wait_until(lambda: server.metric("num_requests_running") == 1)
    return client.recv(1).decode() if stream else ""


def read_all(client: socket.socket) -> str:
    """Read until the server closes, or the answer is complete."""
    client.settimeout(60)
    data = b""
    while b"\r\n0\r\n\r\n" not in data and not (b"HTTP/1.1 503" in data and data.endswith(b"}}")):
        part = client.recv(65536)
        if not part:
            break
        data += part
    client.close()
    return data.decode()


def test_ids_that_callers_choose_may_clash(server: Any) -> None:
    """Source: vllm-project/vllm#15041."""
    first, second = (
        server.client().completions.create(
            model="", prompt="a", max_tokens=20, stream=True, extra_headers={"X-Request-Id": "same"}
        )
        for _ in range(2)
    )
    ids = {chunk.id for stream in (first, second) for chunk in stream}
    assert len(ids) == 2
    again = server.ask("POST", "/v1/completions", {"prompt": "a"}, X_Request_Id="same")
    assert again.status == 200
    assert again.headers["x-request-id"] == "same"
    check_drained(server)


def test_many_streams_at_once_are_not_mixed_up(server: Any) -> None:
    prompts = [f"Number {number} is" for number in range(12)]
    alone = [server.complete(prompt, max_tokens=12).json["choices"][0]["text"] for prompt in prompts]

    async def ask(prompt: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = json.dumps({"prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        told = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        events = re.findall(r"^data: (\{.*\})\r?$", told, re.MULTILINE)
        assert "data: [DONE]" in told
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    async def ask_all() -> list[str]:
        return await asyncio.gather(*map(ask, prompts))

    assert asyncio.run(ask_all()) == alone
