"""Chat templates: rendered as Hugging Face renders them, sandboxed, and clear about what is wrong."""

from __future__ import annotations

import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.chat_template import ChatTemplate
from headrace.core.errors import ConfigError, RequestError

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template in SmolLM2's file."""

BUSY = """{{ bos_token }}
{%- set ns = namespace(seen=0) %}
{%- if tools %}
    {{ tools | tojson(indent=2) }}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.seen = ns.seen + 1 %}
[{{ message['role'] | upper }} {{ ns.seen }}] {{ message.content | trim }}
    {% if message.role == 'assistant' %}{% generation %}({{ message.content }}){% endgeneration %}{% endif %}
    {% if message.content == 'halt' %}{% break %}{% endif %}
{% endfor %}
{% if enable_thinking is defined and enable_thinking is false %}<no_think>{% endif %}
{{ {'a': "<é'>"} | tojson }} {{ "%s-%02d" % ("x", 3) }} {{ '=' * 5 }}
{% if add_generation_prompt %}[ASSISTANT]{% endif %}{{ eos_token }}
"""
"""Everything the templates of other models lean on: whitespace control, loop controls, namespaces, tojson, …"""

TRIMMING = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</s>{% endfor %}"

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "  spaces \n"},
        {"role": "assistant", "content": "Hello! <b> & 'quotes' 🙂"},
        {"role": "user", "content": "halt"},
        {"role": "user", "content": "never"},
    ],
    [
        {"role": "skip", "content": "x"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "a b "},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}]


def hugging_face(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=template, **options)
    return rendered[0]


@pytest.mark.parametrize("template", [SMOLLM2, BUSY, TRIMMING], ids=["smollm2", "busy", "trimming"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_equals_hugging_face(
    template: str, messages: list[dict[str, Any]], generate: bool, tools: list[dict[str, Any]] | None
) -> None:
    ours = ChatTemplate(template, bos_token="<s>", eos_token="</s>").render(
        messages, add_generation_prompt=generate, tools=tools, enable_thinking=False
    )
    theirs = hugging_face(
        template,
        messages,
        add_generation_prompt=generate,
        tools=tools,
        enable_thinking=False,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert ours == theirs
    assert messages[0]["role"].lower() in ours.lower() or messages[0]["role"] == "skip"


@pytest.mark.parametrize("template", [SMOLLM2, TRIMMING], ids=["smollm2", "trimming"])
@pytest.mark.parametrize("text", ["The capital is", "ends in a space ", "\n lines \n\n"])
def test_continuing_leaves_the_turn_open_as_hugging_face_does(template: str, text: str) -> None:
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": text}]
    ours = ChatTemplate(template).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == hugging_face(template, messages, continue_final_message=True)
    assert ours.endswith(text if template is SMOLLM2 else text.strip())
    assert messages[1]["content"] == text


def test_no_template_is_a_clear_bad_request() -> None:
    """Source: vllm-project/vllm#17977, #18140, #29849 (TOK-02): a text about a library's version."""
    template = ChatTemplate(None)
    assert template.names == []
    with pytest.raises(
        RequestError, match=r"no chat template.*generate.*chat_template=.*--chat-template FILE"
    ):
        template.render(CONVERSATIONS[0])


@pytest.mark.parametrize("source", ["{% for m in messages %}", "{{ x | no_such_filter }}", "{% nonsense %}"])
def test_a_broken_template_fails_at_construction(source: str) -> None:
    with pytest.raises(ConfigError, match=r"does not compile: line 1: .*--chat-template FILE"):
        ChatTemplate(source)


@pytest.mark.parametrize("source", [[], {}, [{"name": "a"}], {"a": 1}, ["text"]])
def test_other_forms_of_template_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="must be a text, a mapping"):
        ChatTemplate(source)


def test_the_templates_own_words_reach_the_caller() -> None:
    template = ChatTemplate(
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"
    )
    assert template.render(CONVERSATIONS[0]) == "ok"
    with pytest.raises(RequestError, match="refuses these messages: System role not supported"):
        template.render(CONVERSATIONS[1])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.attribute }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_fails_the_request(source: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ChatTemplate(source).render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].clear() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10 ** 10000000 }}",
        "{{ '%9999999999d' % 1 }}",
        "{% set ns = namespace(t='xxxx') %}{% for i in range(40) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}xxxxxxxx{% endfor %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    """Quickly, too. Processor time: the machine may stand still."""
    begun = time.process_time()
    with pytest.raises((RequestError, ConfigError)):
        ChatTemplate(source + "{{ messages[0].content }}").render([{"role": "user", "content": "hi"}])
    assert time.process_time() - begun < 8


def test_rendering_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.chat_template.MAX_SECONDS", 0.05)
    slow = "{% for i in range(9999) %}{% for j in range(9999) %}{{ '' }}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match=r"longer than 0\.05 seconds"):
        ChatTemplate(slow).render(CONVERSATIONS[0])


def test_named_templates() -> None:
    listed = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    for source in (listed, {item["name"]: item["template"] for item in listed}):
        template = ChatTemplate(source)
        assert template.names == ["default", "tool_use"]
        assert template.render(CONVERSATIONS[0]) == "plain"
        assert template.render(CONVERSATIONS[0], tools=TOOLS) == "tools"
        assert template.render(CONVERSATIONS[0], template_name="tool_use") == "tools"
        with pytest.raises(RequestError, match=r"did you mean 'tool_use'\?.*default, tool_use"):
            template.render(CONVERSATIONS[0], template_name="tools_use")
    assert ChatTemplate({"rag": "only"}).render(CONVERSATIONS[0]) == "only"


def test_both_ways_to_end_are_refused() -> None:
    with pytest.raises(RequestError, match="add_generation_prompt=False"):
        ChatTemplate(SMOLLM2).render(CONVERSATIONS[0], continue_final_message=True)


def test_nothing_to_continue() -> None:
    call = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    with pytest.raises(RequestError, match="text in its content"):
        ChatTemplate(SMOLLM2).render(call, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="does not write"):
        ChatTemplate("fixed").render(
            CONVERSATIONS[0], add_generation_prompt=False, continue_final_message=True
        )


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, "three"]
    assert (
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}])
        == "one\ntwo\nthree"
    )


def test_content_may_be_missing_beside_tool_calls() -> None:
    source = "{{ messages[0].content is none }} {{ messages[0].tool_calls[0].id }}"
    assert ChatTemplate(source).render([{"role": "assistant", "tool_calls": [{"id": "c1"}]}]) == "True c1"


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", "must be a list of messages, got str"),
        ({"role": "user", "content": "hi"}, "must be a list of messages, got dict"),
        (7, "must be a list"),
        ([], "at least one"),
        (["hi"], r"messages\[0\] must be a mapping"),
        ([{"content": "hi"}], r"messages\[0\]\.role must be a text .*got None"),
        ([{"role": 3, "content": "hi"}], "got 3"),
        ([{"role": "user"}], r"messages\[0\]\.content must be a text or a list"),
        ([{"role": "user", "content": None}], "got None"),
        ([{"role": "user", "content": 5}], "got 5"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "type 'text' only.*'image_url'",
        ),
        ([{"role": "user", "content": [{"text": "x"}]}], "type 'text' only.*None"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text must be a text"),
        ([{"role": "user", "content": [5]}], "must be a part"),
        (
            [{"role": "user", "content": "x", "meta": object()}],
            r"messages\[0\]\.meta must be made of JSON values",
        ),
        ([{"role": "user", "content": "x", "meta": deep(5000)}], "nested deeper than 100"),
    ],
)
def test_messages_that_are_none(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ChatTemplate(SMOLLM2).render(messages)


def test_the_date_is_now() -> None:
    year = ChatTemplate("{{ strftime_now('%Y') }}").render(CONVERSATIONS[0])
    assert year in {time.strftime("%Y"), time.strftime("%Y", time.localtime(time.time() - 60))}
