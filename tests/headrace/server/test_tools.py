"""Tools and thinking over HTTP with the official client. What a small model would not say is forced on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from headrace import hookimpl
from headrace.core.errors import ConfigError
from headrace.core.interfaces import CallStart, LogitsRow

pytestmark = pytest.mark.weights

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
}
LOOK_UP = {"type": "function", "function": {"name": "look_up", "description": "Find.", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [LOOK_UP, NOW]
HI = [{"role": "user", "content": "hello"}]
PARIS = '{"name": "look_up", "arguments": {"city": "Paris"}}'
HERMES = f"Hm.<tool_call>{PARIS}</tool_call>"
NAMED = {"type": "function", "function": {"name": "look_up"}}


@pytest.fixture(scope="module")
def hermes(server: Any) -> Iterator[Any]:
    with server.variant(tool_call_parser="hermes") as http:
        yield http


@pytest.fixture(scope="module")
def client(hermes: Any) -> openai.OpenAI:
    made: openai.OpenAI = hermes.client()
    return made


def asked(text: str | None = None, **more: Any) -> dict[str, Any]:
    """A request whose answer is `text`."""
    form = {} if text is None else {"structured": {"choice": [text]}}
    body = {"model": "smollm2", "messages": HI, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    return {**body, "extra_body": form, **more}


def told(client: openai.OpenAI, stream: bool, **body: Any) -> list[dict[str, Any]]:
    """What a client sees of each answer, either way: content, calls without their ids, why it ended."""
    if not stream:
        return [
            {
                "content": choice.message.content,
                "reasoning": getattr(choice.message, "reasoning", None),
                "calls": [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []],
                "reason": choice.finish_reason,
            }
            for choice in client.chat.completions.create(**body).choices
        ]
    answers: dict[int, dict[str, Any]] = {}
    ids: list[str] = []
    for chunk in client.chat.completions.create(stream=True, **body):
        for choice in chunk.choices:
            empty: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
            answer = answers.setdefault(choice.index, empty)
            assert answer["reason"] is None, "nothing comes behind the end"
            answer["reason"] = choice.finish_reason
            answer["content"] += choice.delta.content or ""
            answer["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    assert (call.index, call.type, call.function.arguments) == (
                        len(answer["calls"]),
                        "function",
                        "",
                    )
                    ids.append(call.id)
                    answer["calls"].append((call.function.name, ""))
                else:
                    assert call.index == len(answer["calls"]) - 1
                    name, arguments = answer["calls"][-1]
                    answer["calls"][-1] = (name, arguments + call.function.arguments)
    assert len(set(ids)) == len(ids)
    for answer in answers.values():
        answer["content"] = answer["content"] or (None if answer["calls"] or answer["reasoning"] else "")
        answer["reasoning"] = answer["reasoning"] or None
    return [answers[index] for index in sorted(answers)]


def both(client: openai.OpenAI, **body: Any) -> dict[str, Any]:
    """One answer, streamed and whole, which must be equal."""
    [whole], [streamed] = (told(client, stream, **body) for stream in (False, True))
    assert streamed == whole
    return whole


def test_a_call_that_the_model_chose(client: openai.OpenAI) -> None:
    answer = both(client, **asked(HERMES))
    assert answer == {
        "content": "Hm.",
        "reasoning": None,
        "calls": [("look_up", '{"city": "Paris"}')],
        "reason": "tool_calls",
    }
    assert both(client, **asked(HERMES.removeprefix("Hm.")))["content"] is None


def test_plain_text_stays_plain(client: openai.OpenAI) -> None:
    answer = both(client, **asked("Paris, of course."))
    assert answer == {"content": "Paris, of course.", "reasoning": None, "calls": [], "reason": "stop"}


def test_several_calls_and_only_the_first(client: openai.OpenAI) -> None:
    text = f'{HERMES}\n<tool_call>{{"name": "now"}}</tool_call> so'
    answer = both(client, **asked(text))
    assert answer["calls"] == [("look_up", '{"city": "Paris"}'), ("now", "{}")]
    assert (answer["content"], answer["reason"]) == ("Hm. so", "tool_calls")
    answer = both(client, **asked(text, parallel_tool_calls=False))
    assert answer["calls"] == [("look_up", '{"city": "Paris"}')]
    assert (answer["content"], answer["reason"]) == ("Hm. so", "tool_calls")


def test_a_call_that_is_cut_off_is_text(client: openai.OpenAI) -> None:
    answer = both(client, **asked(HERMES, max_tokens=12))
    assert answer["reason"] == "length"
    assert not answer["calls"]
    assert HERMES.startswith(answer["content"])


def test_none_shows_what_the_model_wrote(client: openai.OpenAI) -> None:
    answer = both(client, **asked(HERMES, tool_choice="none"))
    assert answer == {"content": HERMES, "reasoning": None, "calls": [], "reason": "stop"}


@pytest.mark.parametrize(("tools", "temperature"), [([LOOK_UP], 0), (TOOLS, 1)], ids=["one", "two"])
def test_required_calls_fit_and_end_as_such(
    client: openai.OpenAI, server: Any, tools: list[Any], temperature: int
) -> None:
    """Source: vllm-project/vllm#53255, PR#25054. With and without a parser for free text."""
    body = asked(tools=tools, tool_choice="required", temperature=temperature, seed=5, max_tokens=40)
    plain = server.client()
    answers = [both(asking, **body) for asking in (client, plain)]
    assert answers[0] == answers[1]
    check_forced(answers[0], "tool_calls")


def check_forced(answer: dict[str, Any], reason: str) -> None:
    if not answer["calls"]:
        assert answer["reason"] == "length"
        return
    assert (answer["reason"], answer["content"]) == (reason, None)
    for name, arguments in answer["calls"]:
        schema = {"look_up": CITY, "now": {"type": "object", "maxProperties": 0}}[name]
        jsonschema.validate(json.loads(arguments), schema)


def test_required_calls_are_as_many_as_may_be(client: openai.OpenAI) -> None:
    answer = both(client, **asked(tool_choice="required", parallel_tool_calls=False))
    assert len(answer["calls"]) == 1
    check_forced(answer, "tool_calls")


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_named_tool_is_called_and_the_answer_has_just_stopped(
    client: openai.OpenAI, temperature: int
) -> None:
    """Source: vllm-project/vllm PR#25054."""
    answer = both(client, **asked(tool_choice=NAMED, temperature=temperature, seed=2))
    assert [name for name, _ in answer["calls"]] == ["look_up"]
    check_forced(answer, "stop")
    cut = both(client, **asked(tool_choice=NAMED, max_tokens=3))
    assert (cut["calls"], cut["reason"]) == ([], "length")
    assert cut["content"].startswith("{")


def test_a_tool_that_takes_nothing(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    assert both(client, **asked(tool_choice=choice))["calls"] == [("now", "{}")]


def test_schemas_with_references_of_their_own(client: openai.OpenAI) -> None:
    leaf = {"type": "object", "properties": {"n": {"enum": [1, 2]}, "$ref": {"const": "#/x"}}}
    schema = {
        "properties": {"leaf": {"$ref": "#/$defs/leaf"}},
        "required": ["leaf"],
        "$defs": {"leaf": {**leaf, "required": ["n", "$ref"], "additionalProperties": False}},
    }
    tools = [NOW, {"type": "function", "function": {"name": "grow", "parameters": schema}}]
    named = {"type": "function", "function": {"name": "grow"}}
    for choice in ("required", named):
        answer = both(client, **asked(tools=tools[1:], tool_choice=choice, parallel_tool_calls=False))
        assert json.loads(answer["calls"][0][1]) in [{"leaf": {"n": n, "$ref": "#/x"}} for n in (1, 2)]
    assert both(client, **asked(tools=tools, tool_choice="required", parallel_tool_calls=False))["calls"]


def test_a_schema_that_cannot_be_served_is_a_bad_request(client: openai.OpenAI, hermes: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "whatever"}}}]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(**asked(tools=tools, tool_choice=choice, stream=stream))
    hermes.check_alive()


def test_answers_of_one_request_are_read_apart(client: openai.OpenAI) -> None:
    body = asked(tool_choice="required", temperature=1, seed=1, n=3, max_tokens=30)
    whole, streamed = (told(client, stream, **body) for stream in (False, True))
    assert whole == streamed
    assert len(whole) == 3
    for answer in whole:
        check_forced(answer, "tool_calls")


def test_every_stream_ends_once_and_loses_nothing(client: openai.OpenAI) -> None:
    """Source: vllm-project/vllm#27572: tool_choice auto, drawn."""
    for seed in range(5):
        answer = both(client, **asked(temperature=1, seed=seed, max_tokens=16))
        assert answer["reason"] in ("stop", "length", "tool_calls")
        assert answer["content"] or answer["calls"]


def test_logprobs_and_ids_come_with_held_back_text(hermes: Any) -> None:
    body = {"tools": TOOLS, "structured": {"choice": [HERMES]}, "max_tokens": 60}
    more = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    for interval in (1, 4):
        whole = hermes.chat("hello", **body, **more).json["choices"][0]
        chunks = hermes.chat("hello", **body, **more, stream=True, stream_interval=interval).chunks
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
        assert entries == whole["logprobs"]["content"]
        assert [i for c in choices for i in c.get("token_ids", ())] == whole["token_ids"]
        assert "".join(entry["token"] for entry in entries) == HERMES


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    """Source: sgl-project/sglang#3637: the answer is sent back as it came, null content included."""
    body = asked(HERMES.removeprefix("Hm."))
    message = client.chat.completions.create(**body).choices[0].message
    assert message.content is None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    more = asked("Rain.", messages=[*HI, message, result])
    assert client.chat.completions.create(**more).choices[0].message.content == "Rain."


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", '{"name": "look_up", "parameters": {"city": "Paris"}}'),
        ("pythonic", '[look_up(city="Paris")]'),
    ],
)
def test_other_forms(server: Any, parser: str, text: str) -> None:
    with server.variant(tool_call_parser=parser) as http:
        body = {"tools": TOOLS, "structured": {"choice": [text]}, "max_tokens": 60}
        [choice] = http.chat("hello", **body).json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "look_up", "arguments": '{"city": "Paris"}'}


# Thinking -----------------------------------------------------------------------------------------------

THOUGHT = "Let me see, let me see.\n</think>"


class Script(BaseModel):
    """What answers begin with."""

    token_ids: list[int]


class Thinker:
    """A plugin for a model that does not think: a processor puts words in its mouth; and a parser that fails."""

    name = "thinker"
    headrace_api = ">=1,<2"

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        def make(params: Any, script: Script) -> Any:
            def process(row: LogitsRow, logits: Any) -> Any:
                place = row.position - row.num_prompt_tokens
                if place < len(script.token_ids):
                    logits[script.token_ids[place]] = 1000.0
                return logits

            return process

        registrar.logits_processor("script", make, parameters=Script)
        registrar.tool_parser("broken", lambda context: Broken())


class Broken:
    """A tool parser with a fault."""

    def push(self, text: str) -> list[Any]:
        raise KeyError("a fault of the parser")

    def finish(self) -> list[Any]:
        return [CallStart("look_up")]


@pytest.fixture(scope="module")
def thinker(http_server: Any) -> Iterator[Any]:
    options = {"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes"}
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with http_server(options, max_model_len=160, plugins=[Thinker()], speculative=drafts) as http:
        yield http


def thinking(http: Any, text: str = THOUGHT, **more: Any) -> dict[str, Any]:
    """A request whose answer begins with `text`."""
    ids = http.ask("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}).json["tokens"]
    extra = {"processors": {"script": {"token_ids": ids}}, **more.pop("extra_body", {})}
    return {"model": "", "messages": HI, "temperature": 0, "max_tokens": 60, "extra_body": extra, **more}


def test_thinking_has_a_field_of_its_own(thinker: Any) -> None:
    client = thinker.client()
    body = thinking(thinker, max_tokens=20)
    answer = both(client, **body)
    assert answer["reasoning"] == "Let me see, let me see."
    assert answer["content"]
    usage = client.chat.completions.create(**body).usage
    counted = usage.completion_tokens_details.reasoning_tokens
    assert counted == len(body["extra_body"]["processors"]["script"]["token_ids"])
    assert usage.completion_tokens == 20
    stream = client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    assert [chunk.usage for chunk in stream][-1] == usage
    hidden = both(client, **thinking(thinker, max_tokens=20, extra_body={"include_reasoning": False}))
    assert hidden == {**answer, "reasoning": None}


def test_thinking_that_is_cut_off_is_no_content(thinker: Any) -> None:
    answer = both(thinker.client(), **thinking(thinker, max_tokens=4))
    assert answer["reasoning"]
    assert THOUGHT.startswith(answer["reasoning"])
    assert (answer["content"], answer["reason"]) == (None, "length")


def test_a_form_begins_behind_the_thinking(thinker: Any) -> None:
    client = thinker.client()
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = both(client, **thinking(thinker, response_format=form))
    assert answer["reasoning"] == "Let me see, let me see."
    jsonschema.validate(json.loads(answer["content"]), CITY)
    for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
        answer = both(client, **thinking(thinker, tools=[LOOK_UP], tool_choice=choice))
        assert answer["reasoning"] == "Let me see, let me see."
        check_forced(answer, reason)
        assert answer["calls"]


def test_a_call_behind_the_thinking(thinker: Any) -> None:
    answer = both(thinker.client(), **thinking(thinker, THOUGHT + HERMES, tools=TOOLS, max_tokens=80))
    assert answer["reasoning"] == "Let me see, let me see."
    assert answer["calls"] == [("look_up", '{"city": "Paris"}')]
    assert answer["content"].startswith("Hm.")


def test_tokens_of_a_step_have_their_own_logprobs(thinker: Any) -> None:
    """Sources: sgl-project/sglang#39260, #30188: with drafts, several tokens come in a chunk."""
    body = {"logprobs": True, "top_logprobs": 3, "max_tokens": 30, "return_token_ids": True}
    with thinker.variant() as http:
        repeat = "Say again and again: one two three one two three one two three"
        [whole] = http.chat(repeat, **body).json["choices"]
        choices = [c for chunk in http.chat(repeat, **body, stream=True).chunks for c in chunk["choices"]]
        assert any(len(choice.get("token_ids", ())) > 1 for choice in choices)
        assert "".join(c["delta"].get("content", "") for c in choices) == whole["message"]["content"]
        told = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert told == whole["logprobs"]["content"]
        assert "".join(entry["token"] for entry in told[:-1]) in whole["message"]["content"]


def test_a_parser_that_raises_fails_its_request_by_name(thinker: Any) -> None:
    with thinker.variant(tool_call_parser="broken") as http:
        error = http.chat("hello", tools=TOOLS, max_tokens=2).error
        assert error["message"] == (
            "plugin 'thinker' failed to read the answer: KeyError: 'a fault of the parser'"
        )
        streamed = http.chat("hello", tools=TOOLS, max_tokens=2, stream=True).chunks
        assert streamed[-1]["error"]["message"] == error["message"]
        assert http.chat("hello", max_tokens=2).status == 200


def test_unknown_parsers_are_refused_at_the_start(server: Any) -> None:
    for option, name in (("tool_call_parser", "hermes"), ("reasoning_parser", "think")):
        with (
            pytest.raises(ConfigError, match=f"no .* is called 'nope'.*{name}.*{option}"),
            server.variant(**{option: "nope"}),
        ):
            pass
