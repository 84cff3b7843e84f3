"""A conversation becomes a prompt by the model's chat template: Jinja, in a sandbox, as Hugging Face renders it.

A template is a program that came with a model file. It runs without access to Python's insides and cannot change
the messages; a range, a text made by an operator, the whole prompt and the time between two pieces of it are
limited. That bounds accidents, not malice: templates come from whoever runs the engine, never with a request.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.chat_messages import plain_messages, plain_value
from headrace.core.errors import ConfigError, RequestError, nearest

if TYPE_CHECKING:
    from headrace.front_half import FrontHalf

__all__ = ["ChatTemplate", "Source", "make_chat_template"]

Source = str | Mapping[str, str] | Sequence[Mapping[str, str]]
"""One template; or several by name, as a mapping or as the list of `{"name": …, "template": …}` that
tokenizer_config.json may hold."""

MAX_CHARACTERS = 16 * 2**20
"""Of a rendered prompt, and of any text that a template makes by `+`, `*` or `%`."""
MAX_SECONDS = 10.0
"""For one rendering; looked at whenever the template puts out a piece of text."""
MAX_EXPONENT = 64
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")

_ADVICE = "give one with chat_template= or --chat-template FILE"


class ChatTemplate:
    """A model's chat template, compiled once. Thread-safe.

    Parameters
    ----------
    source: the template, several by name, or None: the model has none, and `render` says so.
    bos_token, eos_token: the spelling of these tokens; a template may write them. None: the model has none.

    Raises `ConfigError` if a template does not compile.
    """

    def __init__(
        self, source: Source | None, *, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}
        environment = _Environment()
        self._templates = {name: _compile(environment, name, text) for name, text in _by_name(source).items()}

    @property
    def names(self) -> list[str]:
        """Names of the templates there are; empty: none."""
        return list(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_name: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt's text; its special tokens are spelt out and are all it needs.

        add_generation_prompt: end with the beginning of an assistant's turn.
        continue_final_message: leave the last message's turn open, so that the model goes on with it.
        template_name: which of several; default: `tool_use` where there are tools and such a template, else
            `default`.
        variables: whatever else the template reads.

        Raises `RequestError` for messages that are none, and with the template's own words where it refuses.
        """
        template = self._choose(template_name, with_tools=bool(tools))
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message=True leaves the last turn open and add_generation_prompt=True begins a new "
                "one; set add_generation_prompt=False",
                param="continue_final_message",
            )
        conversation = plain_messages(messages)
        mark = f"open{secrets.token_hex(12)}" if continue_final_message else ""
        if mark:
            _append_mark(conversation[-1], mark)
        values = {
            "documents": None,
            **self._tokens,
            **{name: plain_value(value, name) for name, value in variables.items()},
            "messages": conversation,
            "tools": plain_value(tools, "tools") if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = _render(template, values)
        return _cut_at_mark(text, mark) if mark else text

    def _choose(self, name: str | None, *, with_tools: bool) -> jinja2.Template:
        if not self._templates:
            raise RequestError(
                "this model has no chat template (a base model), so chat is not available; use generate with a "
                f"plain prompt, or {_ADVICE}",
                param="messages",
            )
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
            if name not in self._templates and len(self._templates) == 1:
                name = next(iter(self._templates))
        if name not in self._templates:
            raise RequestError(
                f"the model has no chat template called {name!r}{nearest(name, self._templates)}; there are: "
                f"{', '.join(self._templates)}. Choose one with template_name",
                param="template_name",
            )
        return self._templates[name]


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with operators that cannot blow text up."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (isinstance(right, (int, float)) and abs(right) <= MAX_EXPONENT):
            raise SecurityError(f"an exponent may be at most {MAX_EXPONENT}")
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    _check_size(len(sequence) * times)
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("a format may be at most 999 characters wide")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, (str, list, tuple)):
            _check_size(len(result))
        return result


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - read by Jinja

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RefusedError(jinja2.TemplateError):
    """A template called `raise_exception`."""


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise SecurityError(f"a text of {size} characters exceeds the limit of {MAX_CHARACTERS}")


def _raise_exception(message: Any = "") -> NoReturn:
    raise _RefusedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML; a prompt must not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _by_name(source: Source | None) -> dict[str, str]:
    """Return the templates by name, or raise `ConfigError` if `source` has another form."""
    if source is None:
        return {}
    if isinstance(source, str):
        return {"default": source}
    named: dict[str, str] = {}
    if isinstance(source, Mapping):
        named = dict(source)
    elif all(isinstance(item, Mapping) and {"name", "template"} <= set(item) for item in source):
        named = {item["name"]: item["template"] for item in source}
    if not named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ConfigError(
            "a chat template must be a text, a mapping of names to texts, or a list of "
            f"{{'name': …, 'template': …}}, got {source!r:.200}; {_ADVICE}",
            option="chat_template",
        )
    return named


def _compile(environment: _Environment, name: str, text: str) -> jinja2.Template:
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template {name!r} does not compile: line {error.lineno}: {error.message}; {_ADVICE}",
            option="chat_template",
        ) from error
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        raise ConfigError(
            f"the chat template {name!r} does not compile: {error}; {_ADVICE}", option="chat_template"
        ) from error


def _render(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    pieces: list[str] = []
    size = 0
    deadline = time.monotonic() + MAX_SECONDS
    try:
        for piece in template.generate(values):
            pieces.append(piece)
            size += len(piece)
            _check_size(size)
            if time.monotonic() > deadline:
                raise SecurityError(f"rendering took longer than {MAX_SECONDS:g} seconds")
    except _RefusedError as error:
        raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
    except Exception as error:  # whatever a model's program may raise: it ran for this request alone
        raise RequestError(
            f"the chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
        ) from error
    return "".join(pieces)


def _append_mark(message: dict[str, Any], mark: str) -> None:
    if not isinstance(message.get("content"), str):
        raise RequestError(
            "continue_final_message=True needs a last message with text in its content", param="messages"
        )
    # The space tells whether the template strips what it writes.
    message["content"] += mark + " "


def _cut_at_mark(text: str, mark: str) -> str:
    place = text.rfind(mark)
    if place < 0:
        raise RequestError(
            "continue_final_message=True: the chat template does not write the last message's content, so there is "
            "nothing to go on with",
            param="continue_final_message",
        )
    stripped = not text.startswith(mark + " ", place)
    return text[:place].rstrip() if stripped else text[:place]


def make_chat_template(front: FrontHalf, given: Source | None = None) -> ChatTemplate:
    """Return a model's chat template, or the one given in its place. Raises `ConfigError` if it does not compile."""
    tokenizer = front.tokenizer
    eos = tokenizer.eos_token_ids[:1] if tokenizer else ()
    bos = tokenizer.bos_token_id if tokenizer else None
    return ChatTemplate(
        given if given is not None else front.facts.chat_template,
        bos_token=None if tokenizer is None or bos is None else tokenizer.token_bytes(bos).decode(),
        eos_token=None if tokenizer is None or not eos else tokenizer.token_bytes(eos[0]).decode(),
    )
