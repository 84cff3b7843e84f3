"""`POST /v1/completions`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytestmark = pytest.mark.weights

PROMPTS = ["The capital of France is", "🙂 漢字 says the", "Žluťoučký kůň", "1, 2, 3,"]


def joined(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in itertools.chain.from_iterable(chunk["choices"] for chunk in chunks):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_an_answer_has_every_field(server: Any) -> None:
    answer = server.complete("The capital of France is", max_tokens=3, user="me").json
    identity = answer.pop("id")
    assert identity.startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "smollm2",
        "system_fingerprint": server.engine.front.facts.fingerprint,
        "choices": [
            {
                "index": 0,
                "text": " Paris.\n",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_max_tokens_is_16_by_default(server: Any) -> None:
    for body in ({}, {"max_tokens": None}):
        answer = server.complete("one two three", ignore_eos=True, **body).json
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["choices"][0]["finish_reason"] == "length"


def test_choices_are_numbered_prompt_by_prompt(server: Any) -> None:
    body = {"n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 6}
    three = server.complete(PROMPTS[:3], **body).json
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2, 3, 4, 5]
    alone = [server.complete(prompt, **body).json for prompt in PROMPTS[:3]]
    assert [c["text"] for c in three["choices"]] == [c["text"] for a in alone for c in a["choices"]]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert three["usage"][key] == sum(answer["usage"][key] for answer in alone)
    stream = server.complete(PROMPTS[:3], **body, stream=True).chunks
    assert joined(stream) == {choice["index"]: choice["text"] for choice in three["choices"]}


def test_a_prompt_may_be_text_or_ids(server: Any) -> None:
    ids = server.ask("POST", "/tokenize", {"prompt": PROMPTS[1]}).json["tokens"]
    text = server.complete(PROMPTS[1], max_tokens=6).json["choices"][0]["text"]
    for prompt in (ids, [ids], [PROMPTS[1]], [ids, ids]):
        answer = server.complete(prompt, max_tokens=6).json
        assert {choice["text"] for choice in answer["choices"]} == {text}
    echo = server.complete(ids, max_tokens=1, echo=True).json["choices"][0]["text"]
    assert echo.startswith(PROMPTS[1])


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    "more", [{}, {"echo": True}, {"stop": ["a", "\n\n"]}, {"temperature": 1.2, "seed": 3}]
)
def test_joined_deltas_are_the_whole_text(server: Any, prompt: str, more: dict[str, Any]) -> None:
    body = {"max_tokens": 16, **more}
    whole = server.complete(prompt, **body).json["choices"][0]
    chunks = server.complete(prompt, **body, stream=True).chunks
    assert joined(chunks) == {0: whole["text"]}
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + [whole["finish_reason"]]
    assert chunks[-1]["choices"][0]["stop_reason"] == whole["stop_reason"]


def test_the_usage_chunk_comes_last_and_once(server: Any) -> None:
    body = {"max_tokens": 9, "n": 2, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    whole = server.complete("sun", **body).json["usage"]
    plain = server.complete("sun", **body, stream=True, stream_options={}).chunks
    assert len(plain) == 18, "one chunk a token and choice"
    assert all("usage" not in chunk and chunk["choices"] for chunk in plain)
    chunks = server.complete("sun", **body, stream=True, stream_options={"include_usage": True}).chunks
    assert len(chunks) == 19
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole
    assert whole["completion_tokens"] == 18
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.complete("sun", **body, stream=True, stream_options=options).chunks
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert chunks[-1]["usage"] == whole


def test_logprobs_have_four_lists(server: Any) -> None:
    """Source: ggml-org/llama.cpp#11346."""
    for logprobs, most in ((0, 1), (2, 3)):
        whole = server.complete("sun", logprobs=logprobs, max_tokens=3).json["choices"][0]
        told = whole["logprobs"]
        assert {key: len(value) for key, value in told.items()} == {
            "tokens": 3,
            "token_logprobs": 3,
            "top_logprobs": 3,
            "text_offset": 3,
        }
        assert "".join(told["tokens"]) == whole["text"]
        for token, logprob, top in zip(
            told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
        ):
            assert top[token] == logprob < 0
            assert max(1, logprobs) <= len(top) <= most
        chunks = server.complete("sun", logprobs=logprobs, max_tokens=3, stream=True).chunks
        streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert {key: [item for part in streamed for item in part[key]] for key in told} == told


def test_echo_with_logprobs_covers_prompt_and_answer(server: Any) -> None:
    """Source: vllm-project/vllm#5334."""
    body = {"echo": True, "logprobs": 1, "max_tokens": 4}
    whole = server.complete("\n2. Ana has 3", **body).json["choices"][0]
    told, text = whole["logprobs"], whole["text"]
    assert "".join(told["tokens"]) == text
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert all(logprob < 0 for logprob in told["token_logprobs"][1:])
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert text.startswith(token, offset)
    assert told["text_offset"] == sorted(set(told["text_offset"]))
    chunks = server.complete("\n2. Ana has 3", **body, stream=True).chunks
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {key: [item for part in streamed for item in part[key]] for key in told} == told
    assert joined(chunks) == {0: text}


def test_echoed_logprobs_are_the_same_on_a_warm_cache(server: Any) -> None:
    """Source: vllm-project/vllm#8268."""
    ids = list(range(100, 100 + 3 * 16 + 1))
    body = {"echo": True, "logprobs": 1, "max_tokens": 1}
    first = server.complete(ids, **body).json["choices"][0]["logprobs"]
    server.complete(ids, max_tokens=1)
    second = server.complete(ids, **body).json["choices"][0]["logprobs"]
    assert first == second
    assert len(first["tokens"]) == len(first["token_logprobs"]) == 3 * 16 + 2
    assert first["token_logprobs"][0] is None


def test_scoring_a_prompt_without_an_answer(server: Any) -> None:
    """Source: vllm-project/vllm#6521."""
    prompt = "yes or no: yes"
    answer = server.complete(prompt, echo=True, logprobs=1, max_tokens=0).json
    [choice] = answer["choices"]
    assert choice["text"] == prompt == "".join(choice["logprobs"]["tokens"])
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    longer = server.complete(prompt, echo=True, logprobs=1, max_tokens=1).json["choices"][0]
    assert longer["logprobs"]["token_logprobs"][:-1] == choice["logprobs"]["token_logprobs"]
    plain = server.complete(prompt, echo=True, max_tokens=0).json["choices"][0]
    assert (plain["text"], plain["logprobs"]) == (prompt, None)
    assert joined(server.complete(prompt, echo=True, max_tokens=0, stream=True).chunks) == {0: prompt}


def test_minus_infinity_is_a_number(server: Any) -> None:
    """Source: vllm-project/vllm#10234."""
    body = {"echo": True, "logprobs": 3, "temperature": 1, "top_k": 1, "max_tokens": 2}
    answer = server.complete("red green blue", **body)
    assert answer.json["choices"][0]["logprobs"]
    banned = server.complete("a", logprobs=0, max_tokens=1, logit_bias={"100": 100}).json
    assert banned["choices"][0]["logprobs"]["token_logprobs"]


def test_prompt_logprobs_and_ids_are_told_where_asked_for(server: Any) -> None:
    answer = server.complete("one two", max_tokens=2, prompt_logprobs=1, return_token_ids=True).json
    [choice] = answer["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    own = second[str(choice["prompt_token_ids"][1])]
    assert own["decoded_token"] == " two"
    assert own["rank"] >= 1
    assert len(choice["token_ids"]) == 2
    chunks = server.complete("one two", max_tokens=2, return_token_ids=True, stream=True).chunks
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == choice["token_ids"]
    named = server.complete("one", max_tokens=1, logprobs=0, return_tokens_as_token_ids=True).json
    [token] = named["choices"][0]["logprobs"]["tokens"]
    assert token.startswith("token_id:")


def test_a_seed_has_effect(server: Any) -> None:
    """Source: ggml-org/llama.cpp#7381."""

    def texts(**body: Any) -> list[str]:
        made = (server.complete("The", temperature=1.2, max_tokens=16, **body).json for _ in range(3))
        return [answer["choices"][0]["text"] for answer in made]

    five, six, none = texts(seed=5), texts(seed=6), texts()
    assert len({*five}) == len({*six}) == 1
    assert five[0] != six[0]
    assert len({*none}) > 1


def test_the_limit_is_clamped_to_the_context(server: Any) -> None:
    """Source: vllm-project/vllm#42474."""
    limit = server.engine.front.max_model_len
    prompt = list(range(200, 200 + limit - 8))
    for asked in (8, 9, limit, 10 * limit):
        answer = server.complete(prompt, max_tokens=asked, ignore_eos=True).json
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["choices"][0]["finish_reason"] == "length"


def test_a_prompt_may_fill_the_context_but_one(server: Any) -> None:
    """Source: vllm-project/vllm#13067."""
    limit = server.engine.front.max_model_len
    answer = server.complete([300] * (limit - 1), max_tokens=5, ignore_eos=True).json
    assert answer["usage"]["completion_tokens"] == 1
    for length in (limit, limit + 1, 3 * limit):
        error = server.complete([300] * length, max_tokens=5).error
        assert str(length) in error["message"]
        assert str(limit) in error["message"]
    server.check_alive()


def test_a_long_prompt_may_lose_its_beginning(server: Any) -> None:
    limit = server.engine.front.max_model_len
    ids = list(range(1000, 1000 + 2 * limit))
    for asked, kept in ((-1, limit - 1), (5, 5), (limit, limit - 1), (10 * limit, limit - 1)):
        body = {"max_tokens": 2, "truncate_prompt_tokens": asked, "ignore_eos": True}
        answer = server.complete(ids, return_token_ids=True, **body).json
        [choice] = answer["choices"]
        assert choice["prompt_token_ids"] == ids[-kept:]
        assert answer["usage"]["prompt_tokens"] == kept
        assert answer["usage"]["completion_tokens"] == min(2, limit - kept)
    assert (
        server.complete(ids[:5], truncate_prompt_tokens=9, max_tokens=1).json["usage"]["prompt_tokens"] == 5
    )
    text = server.complete("one two three", truncate_prompt_tokens=2, max_tokens=1, echo=True).json
    assert text["choices"][0]["text"].startswith(" two three")
    scored = server.complete(ids, truncate_prompt_tokens=-1, max_tokens=0, echo=True).json
    assert scored["usage"]["prompt_tokens"] == limit
    chat = server.chat("word " * limit, truncate_prompt_tokens=20, max_tokens=1).json
    assert chat["usage"]["prompt_tokens"] == 20


def test_cached_tokens_are_told(server: Any) -> None:
    prompt = list(range(500, 564))
    for cached in (0, 48):
        usage = server.complete(prompt, max_tokens=1).json["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}


def test_the_official_client(server: Any) -> None:
    client = server.client()
    body: dict[str, Any] = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 5}
    whole = client.completions.create(**body, temperature=0, logprobs=1, echo=True)
    assert whole.choices[0].text.startswith("The capital of France is Paris")
    assert whole.usage
    assert whole.usage.completion_tokens == 5
    stream = client.completions.create(
        **body, temperature=0, echo=True, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
