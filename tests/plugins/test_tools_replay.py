"""Scripted outputs, cut wherever they can be cut, give the calls, the content and the thinking that they hold."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.core.interfaces import (
    CallArguments,
    CallStart,
    Content,
    ParserContext,
    ReasoningParser,
    ToolParser,
)
from headrace.core.plugin.registry import Registrar, Registry
from headrace.plugins import reasoning, tools
from headrace.testing import parsed, replay

DATA = Path(__file__).parents[1] / "data" / "tool_outputs.json"
OUTPUTS: list[dict[str, Any]] = json.loads(DATA.read_text())
NAMES = ("look_up", "add", "now", "maps.route")


class Letters:
    """A tokenizer whose ids are code points."""

    vocab_size = 0x110000
    bos_token_id = None
    eos_token_ids = ()
    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return [ord(c) for c in text]

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


@pytest.fixture(scope="module")
def registry() -> Registry:
    found = Registry()
    for plugin in (tools, reasoning):
        plugin.headrace_register(Registrar(found, plugin.name), None)
    return found


def parser_of(registry: Registry, output: dict[str, Any]) -> ToolParser | ReasoningParser:
    kind = "reasoning_parser" if "reasoning" in output else "tool_parser"
    context = ParserContext(Letters(), output.get("prompt", ""), {name: {} for name in NAMES})
    parser: ToolParser | ReasoningParser = registry.get(kind, output["parser"]).factory(context)
    return parser


def test_the_corpus_is_large_enough() -> None:
    assert len(OUTPUTS) >= 110
    for parser in ("hermes", "llama3_json", "pythonic"):
        mine = [output for output in OUTPUTS if output["parser"] == parser]
        assert len(mine) >= 25
        assert any(not output["calls"] for output in mine)
        assert any(len(output["calls"]) > 1 for output in mine)


@pytest.mark.parametrize("output", OUTPUTS, ids=[f"{one['parser']}: {one['name']}" for one in OUTPUTS])
def test_every_cut_gives_the_same(registry: Registry, output: dict[str, Any]) -> None:
    got = replay(lambda: parser_of(registry, output), output["text"])
    assert got.content == output["content"]
    assert got.reasoning == output.get("reasoning", "")
    assert [[name, json.loads(text)] for name, text in got.calls] == output["calls"]


def test_a_parser_that_depends_on_cuts_is_found() -> None:
    class Careless:
        """Takes a marker for one only where it comes in one piece."""

        def push(self, text: str) -> list[Content]:
            return [Content(text.replace("<call>", ""))]

        def finish(self) -> list[Content]:
            return []

    assert replay(Careless, "abc").content == "abc"
    with pytest.raises(AssertionError, match=re.escape("cut into ['a<', 'call>b']")):
        replay(Careless, "a<call>b")


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "pythonic"])
def test_no_text_is_lost_however_it_is_malformed(registry: Registry, parser: str) -> None:
    """Outputs with a character taken out, put in or changed: what is no call comes back as it was."""
    draw = random.Random(parser)
    tried = with_calls = 0
    for output in OUTPUTS:
        if output["parser"] != parser:
            continue
        for _ in range(60):
            text = output["text"]
            at = draw.randrange(len(text) + 1)
            text = text[:at] + draw.choice(["", *'{}[]()"\\\n;<, ']) + text[at + draw.randint(0, 1) :]
            got = parsed(parser_of(registry, output), [text])
            assert got == parsed(parser_of(registry, output), list(text)), text
            tried += 1
            with_calls += bool(got.calls)
            if not got.calls:
                assert got.content == text
            for name, arguments in got.calls:
                assert name in NAMES
                assert isinstance(json.loads(arguments), dict)
    assert tried > 1000
    assert with_calls > 100


def test_content_comes_as_soon_as_it_is_certain(registry: Registry) -> None:
    """A stream is not held back by text that cannot become a call."""
    for parser, text in (
        ("hermes", "a < b <tool> {"),
        ("llama3_json", 'Hm. {"city": 1}\n{"city": '),
        ("pythonic", "[1, 2"),
    ):
        machine = registry.get("tool_parser", parser).factory(ParserContext(Letters(), "", {"f": {}}))
        shown = ""
        for character in text:
            shown += "".join(e.text for e in machine.push(character) if isinstance(e, Content))
        assert shown == text, parser


def test_a_call_is_told_before_the_answer_ends(registry: Registry) -> None:
    machine = registry.get("tool_parser", "hermes").factory(ParserContext(Letters(), "", {"f": {}}))
    events = machine.push('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    assert events == [CallStart("f"), CallArguments('{"a": 1}')]
    assert not machine.finish()


def test_long_arguments_come_in_small_pieces(registry: Registry) -> None:
    machine = registry.get("tool_parser", "hermes").factory(ParserContext(Letters(), "", {"f": {}}))
    body = "{[" * 50_000
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + json.dumps(body) + "}}</tool_call>"
    got = parsed(machine, (text[at : at + 4] for at in range(0, len(text), 4)))
    assert json.loads(got.calls[0][1]) == {"a": body}


def test_the_ids_that_end_thinking(registry: Registry) -> None:
    class Tags(Letters):
        """The tags are tokens."""

        def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
            return [{"<think>": 1, "</think>": 2}[text]]

    def ids(name: str, prompt: str, tokenizer: Letters) -> tuple[tuple[int, ...], int | None]:
        parser: ReasoningParser = registry.get("reasoning_parser", name).factory(
            ParserContext(tokenizer, prompt)
        )
        assert isinstance(parser, ReasoningParser)
        return parser.end_ids, parser.start_id

    plain, opened, closed = "<|im_start|>assistant\n", "x<think>\n", "<think>\n\n</think>\n\n"
    letters = tuple(map(ord, "</think>"))
    for name in ("think", "qwen3"):
        assert ids(name, plain, Tags()) == ((2,), 1)
        assert ids(name, plain, Letters()) == ((), None)
        assert ids(name, opened, Tags()) == ((2,), None)
        assert ids(name, opened, Letters()) == (letters, None)
    assert ids("deepseek_r1", plain, Tags()) == ((2,), None)
    assert ids("deepseek_r1", plain, Letters()) == (letters, None)
    for name in ("think", "qwen3", "deepseek_r1"):
        assert ids(name, closed, Tags()) == ((), None)


def test_parsers_keep_their_contract(registry: Registry) -> None:
    for name in registry.names("tool_parser"):
        assert isinstance(registry.get("tool_parser", name).factory(ParserContext(Letters(), "")), ToolParser)
