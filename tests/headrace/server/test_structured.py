"""Structured answers over HTTP: `response_format`, the field `structured`, and what broke other servers."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

pytestmark = pytest.mark.weights

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def content(answer: Any, index: int = 0) -> str:
    assert answer.status == 200, answer.body
    text: str = answer.json["choices"][index]["message"]["content"]
    return text


@pytest.fixture
def live(server: Any) -> Iterator[list[str]]:
    """A stream that others must not disturb: its text, checked at the end."""
    expected = server.chat("Tell me about rivers.", max_tokens=60, ignore_eos=True)
    texts: list[str] = []

    def run() -> None:
        chunks = server.chat("Tell me about rivers.", max_tokens=60, ignore_eos=True, stream=True).chunks
        texts.append("".join(c["delta"].get("content", "") for x in chunks for c in x["choices"]))

    thread = threading.Thread(target=run)
    thread.start()
    yield texts
    thread.join(60)
    assert texts == [content(expected)]


def test_response_format(server: Any) -> None:
    answer = server.chat("A person", max_tokens=60, response_format=schema_format(PERSON))
    jsonschema.validate(json.loads(content(answer)), PERSON)
    assert answer.json["choices"][0]["finish_reason"] == "stop"
    free = server.chat("A person", max_tokens=60, response_format={"type": "json_object"})
    assert content(free).startswith("{")
    completed = server.complete("A person: ", max_tokens=60, response_format=schema_format(PERSON))
    jsonschema.validate(json.loads(completed.json["choices"][0]["text"]), PERSON)
    assert content(server.chat("hi", max_tokens=4, response_format={"type": "text"})) == "Hello there! How"


def test_the_official_client(server: Any) -> None:
    answer = server.client().chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Is water wet?"}],
        extra_body={"structured": {"choice": ["yes", "no"]}},
    )
    assert answer.choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"\d{4}"}, r"\d{4}"),
        ({"grammar": 'root ::= [ab]+ "!"'}, "[ab]+!"),
        ({"json": PERSON}, r"\{.*\}"),
    ],
)
def test_the_field_structured(server: Any, form: dict[str, Any], pattern: str) -> None:
    answer = server.chat("Well?", structured=form, max_tokens=60, logit_bias={"17": 30})
    if answer.json["choices"][0]["finish_reason"] == "stop":
        assert re.fullmatch(pattern, content(answer), re.DOTALL)
    assert "x-headrace-ignored" not in answer.headers


def itself() -> dict[str, Any]:
    return {"type": "object", "properties": {"child": {"$ref": "#"}}}


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BAD_SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "whatever"}, "whatever"),
    ({"$ref": "#/nowhere"}, "/nowhere"),
    ({"$ref": "#"}, "no answer fits"),
    ({"type": "object", "properties": 5}, "properties"),
    ({"type": "string", "pattern": "("}, "unclosed group"),
    ("not a schema", "json_schema.schema"),
    (deep(40), "nested more than 64 deep"),
    (deep(200), "nested deeper than 200"),
    ({"uniqueItems": True}, "uniqueItems"),
]


@pytest.mark.parametrize(("schema", "told"), BAD_SCHEMAS, ids=range(len(BAD_SCHEMAS)))
@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_schema_is_a_bad_request(
    server: Any, live: list[str], schema: Any, told: str, stream: bool
) -> None:
    """Source: vllm-project/vllm#17248; huggingface/text-generation-inference#2280."""
    begun = time.monotonic()
    answer = server.chat("A person", max_tokens=20, stream=stream, response_format=schema_format(schema))
    assert time.monotonic() - begun < 10
    assert answer.status == 400
    assert told in answer.error["message"]
    server.check_alive()


def test_a_schema_that_refers_to_itself_is_served(server: Any) -> None:
    """Source: vllm-project/vllm#17248."""
    answer = server.chat("A person", max_tokens=30, response_format=schema_format(itself()))
    assert content(answer).startswith("{")


BAD_EXPRESSIONS = ["(", "[z-a]", "a{5,2}", "(?<n>x", "\\", ""]
LARGE_EXPRESSIONS = ["ab" * 10_000, "(a*)*b{500}"]


@pytest.mark.parametrize("regex", [*BAD_EXPRESSIONS, *LARGE_EXPRESSIONS], ids=range(8))
def test_a_broken_expression_is_a_bad_request(server: Any, live: list[str], regex: str) -> None:
    """Source: vllm-project/vllm#17313."""
    begun = time.monotonic()
    answer = server.chat("Well?", max_tokens=8, structured={"regex": regex})
    assert time.monotonic() - begun < 10
    if regex in BAD_EXPRESSIONS:
        assert answer.status == 400
        assert "structured.regex" in answer.error["message"]
    else:
        assert re.fullmatch("[ab]+", content(answer))
    server.check_alive()


def test_white_space_is_bounded(server: Any) -> None:
    """Source: vllm-project/vllm#38696."""
    strings = {name: {"type": "string"} for name in ("first", "second", "third")}
    schema = {"type": "object", "properties": strings, "required": list(strings)}
    ids = {text: server.ask("POST", "/tokenize", {"prompt": text}).json["tokens"] for text in (" ", "\n")}
    assert all(len(one) == 1 for one in ids.values())
    bias = {str(one[0]): 30 for one in ids.values()}
    for extra, most in (
        ({"response_format": schema_format(schema)}, 1),
        ({"structured": {"json": schema, "whitespace": 4}}, 4),
    ):
        text = content(server.chat("Three words", max_tokens=60, logit_bias=bias, **extra))
        between = re.sub(r'"(?:[^"\\]|\\.)*("|$)', '""', text)
        runs = re.findall(r"\s+", between)
        assert max(map(len, runs)) == most, text


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 1}], ids=["one", "two"])
def test_log_probabilities_beside_masks_are_json(server: Any, more: dict[str, Any]) -> None:
    """Source: vllm-project/vllm PR#4149."""
    asked = {"logprobs": True, "top_logprobs": 5, "structured": {"choice": ["yes", "no"]}, **more}
    answer = server.chat("Is water wet?", **asked)
    for index, choice in enumerate(answer.json["choices"]):
        assert content(answer, index) in ("yes", "no")
        assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
    chunks = server.chat("Is water wet?", stream=True, **asked).chunks
    for index in range(more.get("n", 1)):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(part["delta"].get("content", "") for part in parts) in ("yes", "no")


def test_a_text_in_other_scripts_streams_whole(server: Any) -> None:
    """Source: waybarrios/vllm-mlx PR#109, PR#195."""
    text = "źdźbło 🙂 漢字 ďábel"
    asked = {"structured": {"choice": [text]}, "max_tokens": 60}
    assert content(server.chat("Say it", **asked)) == text
    chunks = server.chat("Say it", stream=True, **asked).chunks
    deltas = [c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_plain_requests_beside_json_ones_are_as_alone(server: Any) -> None:
    """Source: vllm-project/vllm#4070."""
    prompts = ["The river", "A dog", "In the morning", "Numbers are"]
    alone = [server.complete(prompt, max_tokens=12).json["choices"][0]["text"] for prompt in prompts]
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        if number < 4:
            answers[number] = server.complete(prompts[number], max_tokens=12)
        else:
            form = {"type": "json_object"}
            answers[number] = server.chat("JSON of a dog", max_tokens=40, temperature=1, response_format=form)

    for _ in range(5):
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answers[number].json["choices"][0]["text"] for number in range(4)] == alone
        for number in range(4, 8):
            if answers[number].json["choices"][0]["finish_reason"] == "stop":
                assert isinstance(json.loads(content(answers[number])), dict)


def test_many_schemas_and_clients_that_vanish_keep_nobody_out(http_server: Any) -> None:
    """Source: vllm-project/vllm#53130."""
    with http_server({}, max_num_seqs=4, max_model_len=128) as server:
        dropped: list[http.client.HTTPConnection] = []
        kept: list[Any] = []

        def ask(number: int) -> None:
            schema = {
                "type": "object",
                "properties": {f"p{number}": {"type": "integer"}},
                "required": [f"p{number}"],
            }
            body = {
                "messages": [{"role": "user", "content": "A number"}],
                "max_tokens": 40,
                "response_format": schema_format(schema),
            }
            if number % 2:
                kept.append(server.ask("POST", "/v1/chat/completions", body))
                return
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            dropped.append(connection)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(60)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        for connection in dropped:
            connection.close()
        begun = time.monotonic()
        plain = [server.complete("A dog", max_tokens=8) for _ in range(10)]
        assert time.monotonic() - begun < 120
        assert all(answer.status == 200 for answer in plain)
        for thread in threads:
            thread.join(60)
        for connection in dropped:
            connection.close()
        assert [answer.status for answer in kept] == [200] * 30
        deadline = time.monotonic() + 10
        while server.metric("num_requests_running") or server.metric("num_requests_waiting"):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"guided_json": {}}, "guided_json", "response_format"),
        ({"guided_choice": ["a"]}, "guided_choice", "structured"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "structured"),
        ({"structured": {"nothing": 1}}, "structured", "nothing"),
        ({"structured": {"json": {}, "regex": "a"}}, "structured", "exactly one"),
        ({"structured": 5}, "structured", "5"),
        (
            {"structured": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured",
            "response_format and structured",
        ),
    ],
)
def test_nothing_is_passed_over_in_silence(server: Any, body: dict[str, Any], param: str, told: str) -> None:
    answer = server.chat("hi", max_tokens=4, **body)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert told in answer.error["message"]
