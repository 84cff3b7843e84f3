"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.weights

TEMPLATE_TOKENS = 30
"""What SmolLM2's template puts around a message of one token: its own system message, and turns."""


def content_of(chunks: list[Any], index: int = 0) -> str:
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(delta.get("content", "") for delta in deltas)


def test_an_answer_has_every_field(server: Any) -> None:
    answer = server.chat("hi", max_tokens=4).json
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("usage")["completion_tokens"] == 4
    assert answer == {
        "object": "chat.completion",
        "model": "smollm2",
        "system_fingerprint": server.engine.front.facts.fingerprint,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there! How"},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
    }


@pytest.mark.parametrize(
    "text",
    ["Answer in emoji 🙂🙃: how are you?", "漢字 means?", "Say: źdźbło ďábel"],
    ids=["emoji", "cjk", "latin"],
)
@pytest.mark.parametrize(
    "more", [{}, {"temperature": 1.3, "seed": 7, "stop": ["."]}], ids=["greedy", "drawn"]
)
def test_joined_deltas_are_the_whole_text(server: Any, text: str, more: dict[str, Any]) -> None:
    whole = server.chat(text, max_tokens=20, **more).json["choices"][0]
    chunks = server.chat(text, max_tokens=20, **more, stream=True).chunks
    assert content_of(chunks) == whole["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_characters_of_several_tokens_are_whole(server: Any) -> None:
    """Source: waybarrios/vllm-mlx PR#109: forced here token by token."""
    text = "źdźbło 🙂 漢字 ďábel"
    ids = server.ask("POST", "/tokenize", {"prompt": text}).json["tokens"]
    assert len(ids) > len(text.split())
    whole = server.complete(ids[:1], max_tokens=1, echo=True).json["choices"][0]["text"]
    assert whole
    answer = server.ask("POST", "/detokenize", {"tokens": ids}).json
    assert answer["prompt"] == text


def test_each_choice_begins_with_its_role_and_ends_once(server: Any) -> None:
    """Source: sgl-project/sglang PR#8417."""
    for n in (1, 3):
        body = {"n": n, "temperature": 1.0, "seed": 3, "max_tokens": 6}
        chunks = server.chat("hi", **body, stream=True, stream_options={"include_usage": True}).chunks
        assert chunks[-1]["choices"] == []
        choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
        whole = server.chat("hi", **body).json
        # Who asked before decides what is in the cache.
        for usage in (chunks[-1]["usage"], whole["usage"]):
            assert usage.pop("prompt_tokens_details")["cached_tokens"] in (0, 16)
        for index in range(n):
            mine = [choice for choice in choices if choice["index"] == index]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert all(set(choice["delta"]) == {"content"} for choice in mine[1:-1])
            assert mine[-1]["delta"] == {}
            reasons = [choice["finish_reason"] for choice in mine]
            assert reasons == [None] * (len(mine) - 1) + [whole["choices"][index]["finish_reason"]]
            assert content_of(chunks, index) == whole["choices"][index]["message"]["content"]
        assert chunks[-1]["usage"] == whole["usage"]


def test_logprobs_have_the_shape_of_chats(server: Any) -> None:
    """Source: vllm-project/vllm#4795."""
    for body, count in (({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 2}, 2)):
        [choice] = server.chat("hi", logprobs=True, max_tokens=3, **body).json["choices"]
        assert set(choice["logprobs"]) == {"content"}
        assert len(choice["logprobs"]["content"]) == 3
        for entry in choice["logprobs"]["content"]:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert bytes(entry["bytes"]).decode() == entry["token"]
            assert len(entry["top_logprobs"]) == count
        assert "".join(e["token"] for e in choice["logprobs"]["content"]) == choice["message"]["content"]


def test_logprobs_of_half_characters_are_bytes(server: Any) -> None:
    """A token of the alphabet's raw bytes is forced: it is no text."""
    tokenizer = server.engine.front.tokenizer
    half = next(
        i for i in range(300) if len(tokenizer.token_bytes(i)) == 1 and tokenizer.token_bytes(i)[0] > 0xE0
    )
    byte = tokenizer.token_bytes(half)[0]
    body = {"max_tokens": 2, "logprobs": True, "top_logprobs": 1, "logit_bias": {str(half): 100}}
    [choice] = server.chat("hi", **body).json["choices"]
    assert choice["message"]["content"] == "��"
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[byte], [byte]]
    assert {entry["token"] for entry in choice["logprobs"]["content"]} == {f"bytes:\\x{byte:02x}"}
    chunks = server.chat("hi", **body, stream=True).chunks
    assert content_of(chunks) == "��"
    streamed = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [entry for entries in streamed for entry in entries] == choice["logprobs"]["content"]


def test_minus_infinity_is_a_number(server: Any) -> None:
    """Source: sgl-project/sglang#5984."""
    answer = server.chat("hi", logprobs=True, top_logprobs=5, temperature=1, top_p=0.01, max_tokens=3)
    assert answer.json["choices"][0]["logprobs"]


def test_both_names_of_the_limit_work(server: Any) -> None:
    """Source: AtomaAI/atoma-infer#228."""
    for body, count in (
        ({"max_tokens": 8}, 8),
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 8, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
    ):
        answer = server.chat("hi", ignore_eos=True, **body).json
        assert answer["usage"]["completion_tokens"] == count
        assert answer["choices"][0]["finish_reason"] == "length"


def test_without_a_limit_an_answer_may_fill_the_context(server: Any) -> None:
    """Source: vllm-project/vllm#6707."""
    limit = server.engine.front.max_model_len
    text = " a" * (limit - TEMPLATE_TOKENS - 3)
    prompt = server.chat(text, max_tokens=1).json["usage"]["prompt_tokens"]
    text = " a" * (limit - TEMPLATE_TOKENS - 3 - (prompt - (limit - 3)))
    for body in ({}, {"max_tokens": None}, {"min_tokens": 2}):
        answer = server.chat(text, ignore_eos=True, **body).json
        assert answer["usage"]["prompt_tokens"] == limit - 3
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "length"


def test_messages_that_agents_send(server: Any) -> None:
    """Source: vllm-project/vllm#21089, sgl-project/sglang#3637."""
    user, go = {"role": "user", "content": "x"}, {"role": "user", "content": "go"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    second = {**call, "id": "2"}
    result = {"role": "tool", "tool_call_id": "1", "content": "r"}
    parts = {**result, "content": [{"type": "text", "text": "again"}]}
    conversations: list[list[dict[str, Any]]] = [
        [user, {"role": "assistant", "content": ""}, go],
        [user, {"role": "assistant", "content": ""}, {"role": "user", "content": parts["content"]}],
        [{**user, "name": "ann"}],
        [{"role": "developer", "content": "be brief"}, user],
        [{"role": "user", "content": ""}],
        [user, {"role": "assistant", "content": None, "tool_calls": [call]}, result, go],
        [user, {"role": "assistant", "tool_calls": [call]}, result, go],
        [user, {"role": "assistant", "content": "", "tool_calls": [call, second]}, result, parts, go],
        [user, {"role": "assistant", "tool_calls": [call]}, {**result, "tool_call_id": "9"}, go],
    ]
    for messages in conversations:
        answer = server.chat(messages, max_tokens=2)
        assert answer.status == 200, (messages, answer.body)


def test_a_developer_is_the_system(server: Any) -> None:
    user = {"role": "user", "content": "hi"}
    texts = {
        server.chat([{"role": role, "content": "Answer with a number."}, user], max_tokens=8).json["choices"][
            0
        ]["message"]["content"]
        for role in ("system", "developer")
    }
    assert len(texts) == 1


def test_an_open_last_turn_goes_on(server: Any) -> None:
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    for body in (
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
    ):
        [choice] = server.chat(messages, max_tokens=3, **body).json["choices"]
        assert choice["message"]["content"].startswith(" Paris")
        assert choice["message"]["role"] == "assistant"
        [choice] = server.chat(messages, max_tokens=3, echo=True, **body).json["choices"]
        assert choice["message"]["content"].startswith("The capital of France is Paris")
    chunks = server.chat(messages, max_tokens=3, echo=True, stream=True, continue_final_message=True).chunks
    assert content_of(chunks) == choice["message"]["content"]
    both = server.chat(messages, continue_final_message=True, add_generation_prompt=True)
    assert both.status == 400
    assert both.error["param"] == "continue_final_message"
    [choice] = server.chat("hi", max_tokens=3, echo=True).json["choices"]
    assert not choice["message"]["content"].startswith("hi"), "a user's message is not the answer's role"


def test_a_stream_is_what_was_asked_for(server: Any) -> None:
    """Source: kaito-project/kaito#1885."""
    for body, kind in (
        ({}, "application/json"),
        ({"stream": False}, "application/json"),
        ({"stream": None}, "application/json"),
        ({"stream": True}, "text/event-stream; charset=utf-8"),
    ):
        assert server.chat("hi", max_tokens=2, **body).headers["content-type"] == kind


def test_formats_and_tools_that_ask_for_nothing(server: Any) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    for body in (
        {"response_format": {"type": "text"}},
        {"tool_choice": "none"},
        {"tools": [tool], "tool_choice": "none"},
        {"parallel_tool_calls": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"top_logprobs": 0},
    ):
        answer = server.chat("hi", max_tokens=2, **body)
        assert answer.status == 200, answer.body
        assert "x-headrace-ignored" not in answer.headers


def test_the_role_of_answers_is_an_option(server: Any) -> None:
    with server.variant(response_role="pirate") as other:
        assert other.chat("hi", max_tokens=1).json["choices"][0]["message"]["role"] == "pirate"
        [first, *_] = other.chat("hi", max_tokens=1, stream=True).chunks
        assert first["choices"][0]["delta"]["role"] == "pirate"


def test_prompt_logprobs_and_ids(server: Any) -> None:
    answer = server.chat("hi", max_tokens=2, prompt_logprobs=0, return_token_ids=True).json
    assert (
        len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    )
    assert len(answer["choices"][0]["token_ids"]) == 2


def test_the_official_client(server: Any) -> None:
    client = server.client()
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=8, logprobs=True, top_logprobs=2
    )
    assert "Paris" in whole.choices[0].message.content
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    with client.chat.completions.create(
        model="smollm2",
        messages=messages,
        temperature=0,
        max_completion_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == whole.choices[0].message.content
    # But for what was in the cache: the first of them may have put it there.
    told = [usage.model_dump(exclude={"prompt_tokens_details"}) for usage in (chunks[-1].usage, whole.usage)]
    assert told[0] == told[1]
