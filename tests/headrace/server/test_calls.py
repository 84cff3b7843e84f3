"""What a chat says of tools, and how answers are read: without a server, at every cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from headrace.core.errors import PluginCallError
from headrace.core.interfaces import CallArguments, CallStart, Content, ParserContext
from headrace.core.plugin.registry import Registrar, Registry
from headrace.plugins import reasoning, tools
from headrace.server.calls import CallPlan, plan_calls
from headrace.server.chat import template_messages
from headrace.server.errors import ApiError
from headrace.server.forced_calls import ForcedCalls
from headrace.server.messages import deltas_of, message_of
from headrace.server.options import ServerSection
from headrace.server.parsers import Parsers
from headrace.server.protocol import ChatBody
from headrace.server.reading import AnswerReader, Plugged

OUTPUTS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "tool_outputs.json").read_text()
)
TOOLS: dict[str, Any] = {name: {} for name in ("look_up", "add", "now", "maps.route")}
HI = [{"role": "user", "content": "hi"}]


TAGS = ("<think>", "</think>")


def id_of(piece: str) -> int:
    return 1 + TAGS.index(piece) if piece in TAGS else ord(piece)


class Letters:
    """A tokenizer whose ids are code points, but for those of the tags of thinking."""

    vocab_size = 0x110000
    bos_token_id = None
    eos_token_ids = ()
    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return [id_of(text)] if text in TAGS else [ord(c) for c in text]

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


@pytest.fixture(scope="module")
def registry() -> Registry:
    found = Registry()
    for plugin in (tools, reasoning):
        plugin.headrace_register(Registrar(found, plugin.name), None)
    return found


def reader_of(registry: Registry, parser: str, plan: CallPlan, prompt: str = "", **body: Any) -> AnswerReader:
    options = ServerSection(tool_call_parser=parser, reasoning_parser="think")
    context = ParserContext(Letters(), prompt, plan.tools)
    return Parsers(registry, options).reader(context, plan, ChatBody(messages=HI, **body))


def streamed(reader: AnswerReader, pieces: Sequence[str]) -> dict[str, Any]:
    """Join the deltas of a stream as OpenAI's clients do."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    parts = [(piece, reader.push(piece, [ord(c) for c in piece]), reader.num_calls) for piece in pieces]
    parts.append(("", reader.finish(), reader.num_calls))
    for _, told, num_calls in parts:
        for delta in msgspec.to_builtins(deltas_of(told, num_calls)):
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"])
                    message["calls"].append([call["function"]["name"], call["function"]["arguments"]])
                else:
                    assert call["index"] == len(message["calls"]) - 1
                    message["calls"][-1][1] += call["function"]["arguments"]
    return message


def whole(reader: AnswerReader, text: str) -> dict[str, Any]:
    parts = [*reader.push(text, [ord(c) for c in text]), *reader.finish()]
    message = message_of(parts, "assistant", "", tells_reasoning=True)
    calls = message.tool_calls or []
    return {
        "content": message.content or "",
        "reasoning": message.reasoning or "",
        "calls": [[call.function.name, call.function.arguments] for call in calls],
    }


@pytest.mark.parametrize("parallel", [True, False], ids=["all", "first"])
@pytest.mark.parametrize("output", [o for o in OUTPUTS if "reasoning" not in o], ids=lambda o: o["name"])
def test_streams_of_thinking_and_calls_are_the_whole_message(
    registry: Registry, output: dict[str, Any], parallel: bool
) -> None:
    """Every scripted output behind a thought, cut at every place."""
    text = "<think>\nHm.\n</think>\n\n" + output["text"]
    plan = CallPlan("auto", TOOLS, is_parallel=parallel)

    def made() -> AnswerReader:
        return reader_of(registry, output["parser"], plan)

    expected = whole(made(), text)
    calls = output["calls"] if parallel else output["calls"][:1]
    assert [[name, json.loads(arguments)] for name, arguments in expected["calls"]] == calls
    assert expected["reasoning"] == "Hm."
    assert expected["content"] == output["content"], "no output begins with a line break that it shows"
    for at in range(len(text) + 1):
        assert streamed(made(), [text[:at], text[at:]]) == expected
    assert streamed(made(), list(text)) == expected


@pytest.mark.parametrize(
    ("pieces", "prompt", "count"),
    [
        (["<think>", "a", "b", "</think>", "c", "d"], "", 4),
        (["a", "b", "</think>", "c", "d"], "<think>", 3),
        (["<think>", "a", "b"], "", 3),
        (["a", "b", "c"], "", 0),
        (["a", "</think>", "c"], "", 0),
        (["a", "</think>", "c"], "<think></think>", 0),
    ],
)
def test_tokens_of_thinking_are_counted(
    registry: Registry, pieces: list[str], prompt: str, count: int
) -> None:
    for size in (1, 2, len(pieces)):
        reader = reader_of(registry, "hermes", CallPlan("none"), prompt)
        for at in range(0, len(pieces), size):
            some = pieces[at : at + size]
            reader.push("".join(some), [id_of(piece) for piece in some])
        reader.finish()
        assert reader.num_reasoning_tokens == count


def test_thinking_may_be_left_out(registry: Registry) -> None:
    reader = reader_of(registry, "hermes", CallPlan("none"), include_reasoning=False)
    parts = [*reader.push("<think>a</think>c", [1, ord("a"), 2, ord("c")]), *reader.finish()]
    assert parts == [Content("c")]
    assert reader.num_reasoning_tokens == 3


def test_forced_answers() -> None:
    def read(parser: ForcedCalls, text: str) -> list[Any]:
        held = [event for character in text for event in parser.push(character)]
        return [*held, *parser.finish()]

    two = '[{"name": "a", "parameters": {"x": "é"}}, {"name": "b", "parameters": {}}]'
    assert read(ForcedCalls(), two) == [
        CallStart("a"),
        CallArguments('{"x": "é"}'),
        CallStart("b"),
        CallArguments("{}"),
    ]
    assert read(ForcedCalls(), two[:-1]) == [Content(two[:-1])]
    assert read(ForcedCalls("f"), '{"x":\n1}') == [CallStart("f"), CallArguments('{"x": 1}')]
    assert read(ForcedCalls("f"), r'{"x": "\ud800"}') == [CallStart("f"), CallArguments(r'{"x": "\ud800"}')]
    assert read(ForcedCalls("f"), '{"x": 1e999}') == [Content('{"x": 1e999}')]
    assert read(ForcedCalls("f"), "") == []


def test_a_parser_of_a_plugin_fails_by_name() -> None:
    class Broken:
        def push(self, text: str) -> list[Any]:
            raise KeyError(text)

        def finish(self) -> list[Any]:
            raise KeyError("end")

    reader = AnswerReader(tools=Plugged(Broken(), "theirs"))
    with pytest.raises(PluginCallError, match="plugin 'theirs' failed to read the answer: KeyError"):
        reader.push("a", [1])
    with pytest.raises(PluginCallError, match="theirs"):
        reader.finish()


def body_of(choice: Any, *names: str, parameters: Any = None) -> ChatBody:
    functions = [{"name": name, "parameters": parameters} for name in names]
    listed = [{"type": "function", "function": function} for function in functions]
    given = {"messages": HI, "tools": listed or None, "tool_choice": choice}
    return ChatBody.model_validate({name: value for name, value in given.items() if value is not None})


def plan_of(body: ChatBody, *, has_parser: bool = True, may_choose: bool = True) -> CallPlan:
    return plan_calls(body, has_parser=has_parser, may_choose=may_choose)


def test_plans() -> None:
    named = {"type": "function", "function": {"name": "b"}}
    assert plan_of(body_of(None)).mode == "none"
    assert plan_of(body_of("none", "a"), has_parser=False).mode == "none"
    assert plan_of(body_of(None, "a")).mode == plan_of(body_of("auto", "a")).mode == "auto"
    assert plan_of(body_of("required", "a"), has_parser=False).mode == "required"
    plan = plan_of(body_of(named, "a", "b"), may_choose=False)
    assert (plan.mode, plan.name, sorted(plan.tools)) == ("named", "b", ["a", "b"])
    for body, more, told in (
        (body_of("auto"), {}, "needs tools"),
        (body_of(None, "a"), {"has_parser": False}, "--tool-call-parser"),
        (body_of(None, "a"), {"may_choose": False}, "--enable-auto-tool-choice"),
        (body_of(named, "a"), {}, "there is no tool 'b'; there are: 'a'"),
        (body_of(None, "a", "a"), {}, "there twice"),
    ):
        with pytest.raises(ApiError, match=told):
            plan_of(body, **more)


def test_the_schema_of_required_calls() -> None:
    tree = {
        "type": "object",
        "properties": {"child": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/leaf"}},
        "$defs": {"leaf": {"const": {"$ref": "#"}}},
    }
    schema = plan_of(body_of("required", "a", "b", parameters=tree)).schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    leaf = {"$ref": "#"}
    good = [{"name": "b", "parameters": {"child": {"child": {}, "leaf": leaf}}}]
    jsonschema.validate(good, schema)
    jsonschema.validate(good * 2, schema)
    for bad in (
        [],
        [{"name": "c", "parameters": {}}],
        [{"name": "a"}],
        [{"name": "a", "parameters": {"child": {"leaf": 1}}}],
        [{"name": "a", "parameters": {"other": 1}}],
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
    body = body_of("required", "a").model_copy(update={"parallel_tool_calls": False})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "a", "parameters": {}}] * 2, plan_of(body).schema())


def test_thinking_goes_back_under_the_name_that_templates_read() -> None:
    said = {"role": "assistant", "content": "a", "reasoning": "b"}
    assert template_messages([said])[0]["reasoning_content"] == "b"
    assert template_messages([{**said, "reasoning_content": "c"}])[0]["reasoning_content"] == "c"
    assert "reasoning_content" not in template_messages(HI)[0]
