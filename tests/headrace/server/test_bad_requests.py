"""Every bad request is answered in OpenAI's shape, shortly, and the server goes on."""

from __future__ import annotations

import json
import socket
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.weights

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look_up"}}
HUGE = "x" * 10_000_000

BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    # fields over {"prompt": "a"}, the param that is named, a part of the message
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": ["a", ""]}, "prompt", "prompt[1]"),
    ({"prompt": None}, "prompt", "required"),
    ({"prompt": {"text": "a"}}, "prompt", "must be a text"),
    ({"prompt": 7}, "prompt", "must be a text"),
    ({"prompt": [49152]}, "prompt", "49152"),
    ({"prompt": [50152]}, "prompt", "50152"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": [1099511627776]}, "prompt", "1099511627776"),
    ({"prompt": [3, "x"]}, "prompt", "'x'"),
    ({"prompt": [3, 1.5]}, "prompt", "1.5"),
    ({"prompt": [[1, 2], [49152]]}, "prompt", "prompt[1]"),
    ({"prompt": [True]}, "prompt", "True"),
    ({"prompt": ["a", [1]]}, "prompt", "mix"),
    ({"prompt": [["a"]]}, "prompt", "'a'"),
    ({"prompt": ["a"] * 17}, "prompt", "max_prompts"),
    ({"prompt": ["a"] * 16, "n": 2, "temperature": 1}, "n", "max_choices"),
    ({"n": 2, "temperature": 1, "best_of": 3}, "best_of", "not available"),
    ({"use_beam_search": True, "n": 2, "best_of": 3}, "best_of", "must equal n"),
    ({"use_beam_search": True, "stream": True}, "stream", "cannot be streamed"),
    ({"use_beam_search": True, "n": 0}, "n", "beam_width"),
    ({"use_beam_search": True, "n": 20}, "n", "at most 20"),
    ({"use_beam_search": True, "n": 25}, "n", "max_choices"),
    ({"use_beam_search": True, "n": "x"}, "n", "'x'"),
    ({"use_beam_search": True, "top_p": 0.5}, "top_p", "does not go with use_beam_search"),
    ({"use_beam_search": True, "stop": "x"}, "stop", "does not go with use_beam_search"),
    ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias", "does not go with use_beam_search"),
    ({"use_beam_search": True, "bad_words": ["x"]}, "bad_words", "does not go with use_beam_search"),
    ({"use_beam_search": True, "echo": True, "logprobs": 1}, "prompt_logprobs", "does not go"),
    ({"use_beam_search": True, "length_penalty": 11}, "length_penalty", "11"),
    ({"use_beam_search": "x"}, "use_beam_search", "'x'"),
    ({"length_penalty": 0.5}, "length_penalty", "use_beam_search"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
    ({"allowed_token_ids": [5, 49152]}, "allowed_token_ids", "49152"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "-1"),
    ({"allowed_token_ids": ["5"]}, "allowed_token_ids", "'5'"),
    ({"allowed_token_ids": 5}, "allowed_token_ids", "5"),
    ({"bad_words": "x"}, "bad_words", "'x'"),
    ({"bad_words": [""]}, "bad_words", "at least 1"),
    ({"bad_words": [7]}, "bad_words", "7"),
    ({"bad_words": ["w"] * 129}, "bad_words", "128"),
    ({"bad_words": [f"word{i}" for i in range(100)]}, "bad_words", "at most 128"),
    ({"logprob_token_ids": []}, "logprob_token_ids", "at least 1"),
    ({"logprob_token_ids": [49152]}, "logprob_token_ids", "49152"),
    ({"logprob_token_ids": [-1]}, "logprob_token_ids", "-1"),
    ({"logprob_token_ids": list(range(129))}, "logprob_token_ids", "128"),
    ({"logprobs_mode": "cooked"}, "logprobs_mode", "'cooked'"),
    ({"processors": {"none": {}}}, "processors", "'none'"),
    ({"processors": ["none"]}, "processors", "dictionary"),
    ({"truncation_side": "up"}, "truncation_side", "'up'"),
    ({"spaces_between_special_tokens": 1}, "spaces_between_special_tokens", "1"),
    ({"n": 0}, "n", "0"),
    ({"n": 20000, "temperature": 1}, "n", "20000"),
    ({"n": 2, "temperature": 0}, None, "temperature 0"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"temperature": 2.1}, "temperature", "2.1"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"temperature": True}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_k": 1.5}, "top_k", "1.5"),
    ({"max_tokens": -1}, "max_tokens", "-1"),
    ({"max_tokens": 0}, None, "max_tokens 0"),
    ({"max_tokens": 5.0}, "max_tokens", "5.0"),
    ({"max_tokens": 10**30}, "max_tokens", "10000"),
    ({"top_k": 10**30}, "top_k", "10000"),
    ({"min_tokens": 10**30}, "min_tokens", "10000"),
    ({"logprobs": 10**30}, "logprobs", "10000"),
    ({"prompt_logprobs": 10**30}, "prompt_logprobs", "10000"),
    ({"stop_token_ids": [10**30]}, "stop_token_ids", "10000"),
    ({"logit_bias": {"1" * 40: 1}}, "logit_bias", "11111"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "5000 digits"),
    ({"priority": 10**30}, "priority", "10000"),
    ({"prompt": [10**30]}, "prompt", "10000"),
    ({"seed": 2**63}, "seed", ""),
    ({"logprobs": 21}, "logprobs", "21"),
    ({"logprobs": -2}, "logprobs", "-2"),
    ({"logprobs": True}, "logprobs", "True"),
    ({"echo": "yes"}, "echo", "'yes'"),
    ({"stream": "yes"}, "stream", "'yes'"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": ["zzz", ""]}, "stop", "empty"),
    ({"stop": [7]}, "stop.0", "7"),
    ({"stop": ["s"] * 1000}, "stop", "256"),
    ({"stop_token_ids": [49152]}, "stop_token_ids", "49152"),
    ({"stop_token_ids": "x"}, "stop_token_ids", "'x'"),
    ({"logit_bias": {"49152": 5}}, "logit_bias", "49152"),
    ({"logit_bias": {"50052": -100}}, "logit_bias", "50052"),
    ({"logit_bias": {"-1": 5}}, "logit_bias", "-1"),
    ({"logit_bias": {"abc": 1}}, "logit_bias", "abc"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "'x'"),
    ({"logit_bias": [1]}, "logit_bias", ""),
    ({"logit_bias": {HUGE: 1}}, "logit_bias", "token id"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage", "'x'"),
    ({"stream": True, "stream_options": []}, "stream_options", ""),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
    ({"suffix": "end"}, "suffix", "middle"),
    ({"priority": 1}, "priority", "priority"),
    ({"priority": "x"}, "priority", "'x'"),
    ({"model": 7}, "model", "7"),
    ({"temperature": HUGE}, "temperature", "xxx"),
    ({"add_special_tokens": "no"}, "add_special_tokens", "'no'"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-2"),
    ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens", "'5'"),
    ({"response_format": {"type": "json_objects"}}, "response_format.type", "json_objects"),
]

BAD_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": None}, "messages", "required"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": ["hi"]}, "messages.0", "dict"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "role"),
    ({"messages": [{"role": 7, "content": "hi"}]}, "messages[0].role", "7"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "None"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        "text",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "None"),
    ({"messages": [{"role": "user", "content": "x" * 500_000}]}, "prompt", "max_model_len"),
    ({"messages": [{**HI[0], "name": 1}]}, "messages[0].name", "1"),
    ({"messages": [HI[0], {**HI[0], "tool_call_id": []}]}, "messages[1].tool_call_id", "[]"),
    ({"messages": [{**HI[0], "tool_calls": "x"}]}, "messages[0].tool_calls", "'x'"),
    ({"messages": [{**HI[0], "tool_calls": ["x"]}]}, "messages[0].tool_calls", "'x'"),
    ({"messages": [{**HI[0], "tool_calls": [{"function": 1}], "content": 1}]}, "messages[0].content", "1"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "-1"),
    ({"logprobs": 1}, "logprobs", "1"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "-1"),
    ({"max_tokens": 0}, None, "max_tokens 0"),
    ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.name",
        "required",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "required",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}},
        "response_format.json_schema.schema",
        "[]",
    ),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "'yaml'"),
    ({"response_format": {"type": "no_such"}}, "response_format.type", "'no_such'"),
    ({"response_format": "json"}, "response_format", "'json'"),
    ({"response_format": []}, "response_format", "[]"),
    ({"tools": "x"}, "tools", "'x'"),
    ({"tools": []}, "tools", "at least 1"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
    ({"tools": [TOOL]}, "tool_choice", "--tool-call-parser"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice", "--tool-call-parser"),
    ({"tools": [TOOL, TOOL]}, "tools.1.function.name", "twice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
        "tool_choice",
        "there is no tool 'nope'; there are: 'look_up'",
    ),
    (
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
        "an answer has one form",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "'no'"),
    ({"include_reasoning": 1}, "include_reasoning", "1"),
    ({"reasoning_effort": ""}, "reasoning_effort", "''"),
    ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice", "'perhaps'"),
    ({"tool_choice": "auto"}, "tool_choice", "tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "tools"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "must be"),
    ({"use_beam_search": True, "stream": True}, "stream", "cannot be streamed"),
    ({"use_beam_search": True, "min_p": 0.1}, "min_p", "does not go with use_beam_search"),
    ({"use_beam_search": True, "tools": [TOOL], "tool_choice": "required"}, "structured", "does not go"),
    ({"length_penalty": 2}, "length_penalty", "use_beam_search"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "not trusted"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "variable"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self", "variable"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "[]"),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "add_generation_prompt",
    ),
]


def named(case: Any) -> str:
    return str(case)[:60] if isinstance(case, dict) else ""


@pytest.mark.parametrize(("fields", "param", "text"), BAD_COMPLETIONS, ids=named)
def test_completions(server: Any, fields: dict[str, Any], param: str | None, text: str) -> None:
    answer = server.ask("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 2, **fields})
    assert answer.status == 400, answer.body[:300]
    error = answer.error
    assert (error["type"], error["code"]) == ("invalid_request_error", None)
    assert error["param"] == param
    assert text in error["message"]
    assert len(answer.body) < 2500


@pytest.mark.parametrize(("fields", "param", "text"), BAD_CHATS, ids=named)
def test_chats(server: Any, fields: dict[str, Any], param: str | None, text: str) -> None:
    answer = server.ask("POST", CHAT, {"messages": HI, "max_tokens": 2, **fields})
    assert answer.status == 400, answer.body[:300]
    error = answer.error
    assert (error["type"], error["code"]) == ("invalid_request_error", None)
    assert error["param"] == param
    assert text in error["message"]
    assert len(answer.body) < 2500


def test_the_server_goes_on(server: Any) -> None:
    """After the tables above, with nothing left behind in the engine."""
    server.check_alive()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert server.metric(name) == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[]",
        b'"text"',
        b"null",
        b"{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": ' + b"[" * 190 + b"]" * 190 + b', "messages": 1, "tokens": 1}',
        b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b', "messages": 1, "tokens": 1}',
        b'{"model": "' + b"y" * 10_000_000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: str(body[:24]),
)
def test_bodies_that_are_no_request(server: Any, path: str, body: bytes) -> None:
    answer = server.ask("POST", path, body)
    assert answer.status == 400, answer.body[:300]
    assert answer.error["message"]
    server.check_alive()


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x" * 9000]
)
def test_what_is_not_said_to_be_json(server: Any, kind: str) -> None:
    error = server.ask("POST", COMPLETIONS, b'{"prompt": "a"}', Content_Type=kind).error
    assert "application/json" in error["message"]


def test_json_by_other_names(server: Any) -> None:
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        assert server.ask("POST", COMPLETIONS, b'{"prompt": "a"}', Content_Type=kind).status == 200


def test_a_body_over_the_limit(server: Any) -> None:
    body = json.dumps({"prompt": "a" * 13_000_000}).encode()
    answer = server.ask("POST", COMPLETIONS, body)
    assert answer.status == 413
    assert "max_body_bytes" in answer.error["message"]
    server.check_alive()


def test_a_body_over_the_limit_that_does_not_say_so(server: Any) -> None:
    """Chunked, without a Content-Length: answered while it is still being sent."""
    with (
        server.variant(max_body_bytes=10_000) as other,
        socket.create_connection(("127.0.0.1", other.port)) as client,
    ):
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(3):
            client.sendall(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_model_that_is_not_there(server: Any) -> None:
    for answer in (
        server.complete("a", model="gpt-4"),
        server.chat("a", model="gpt-4"),
        server.ask("POST", "/tokenize", {"prompt": "a", "model": "gpt-4"}),
        server.ask("GET", "/v1/models/gpt-4"),
    ):
        assert answer.status == 404
        error = answer.error
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "'gpt-4'" in error["message"]
        assert "smollm2" in error["message"]
    for name in (None, "", "smollm2"):
        assert server.complete("a", model=name, max_tokens=1).json["model"] == "smollm2"


def test_a_route_that_is_not_there(server: Any) -> None:
    for path in (
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/completions/",
        "/nope",
        "//v1/completions",
    ):
        answer = server.ask("POST", path, {"model": "smollm2"})
        assert answer.status == 404
        assert "POST /v1/chat/completions" in answer.error["message"]
        assert "GET /v1/models" in answer.error["message"]
    assert len(server.ask("GET", "/" + "a" * 30_000).error["message"]) < 1000


def test_a_method_that_a_route_does_not_take(server: Any) -> None:
    for method in ("GET", "PUT", "DELETE"):
        answer = server.ask(method, COMPLETIONS)
        assert answer.status == 405
        assert answer.headers["allow"] == "POST"
        assert "POST" in answer.error["message"]


def test_the_official_client_knows_the_errors(server: Any) -> None:
    client = server.client()
    body: Any = {"model": "smollm2", "messages": HI}
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.chat.completions.create(**{**body, "model": "no"})
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(**body, temperature="hot")
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model="smollm2", prompt=[5] * 1000)
    with pytest.raises(openai.NotFoundError, match="/v1/responses"):
        client.responses.create(model="smollm2", input="hi")


def test_unknown_fields_are_named(server: Any) -> None:
    """Source: drumih/turbo-fieldfare#168."""
    answer = server.complete("a", max_token=4, temperatur=0.1, stream=False)
    assert answer.status == 200
    assert answer.headers["x-headrace-ignored"] == "max_token, temperatur"
    stream = server.chat("a", max_tokens=1, stream=True, goal={}, stream_options={"obfuscate": True})
    assert stream.headers["x-headrace-ignored"] == "goal, stream_options.obfuscate"
    assert stream.chunks
    odd = server.complete("a", max_tokens=1, **{"a\r\nSet-Cookie: x": 1, "é,": 1, "": 1, "l" * 9999: 1})
    assert odd.headers["x-headrace-ignored"] == f"a??Set-Cookie:?x, ??, '', {'l' * 64}"
    assert "set-cookie" not in odd.headers
    many = server.complete("a", max_tokens=1, **{f"field{i}": 1 for i in range(1000)})
    assert many.headers["x-headrace-ignored"].endswith("field19, and 980 more")


def test_unknown_fields_are_refused_where_that_is_asked_for(server: Any) -> None:
    with server.variant(strict=True) as other:
        error = other.complete("a", max_token=4, zzz=1).error
        assert error["code"] == "unknown_field"
        assert error["param"] == "max_token"
        assert "max_token (did you mean 'max_tokens'?)" in error["message"]
        assert "zzz" in error["message"]
        assert other.chat("a", stream=True, stream_options={"x": 1}).error["param"] == "stream_options.x"
        assert other.ask("POST", "/tokenize", {"prompt": "a", "x": 1}).error["code"] == "unknown_field"
        assert other.complete("a", max_tokens=1, add_special_tokens=False).status == 200
