"""Calls written as JSON objects: `hermes`, in tags, and `llama3_json`, where a line begins."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.plugins.tools.brackets import JSON_QUOTES, Brackets
from headrace.plugins.tools.scanner import Call, Candidate, Verdict, call_of

__all__ = ["HERMES", "LLAMA3_JSON", "ObjectFormat", "ObjectStyle"]

KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
"""What an object that is a call may begin with."""

_FIRST_KEY = re.compile(r'\{\s*"((?:[^"\\]|\\.)*)"', re.DOTALL)
_MAY_GET_KEY = re.compile(r'\{\s*(?:"(?:[^"\\]|\\.)*\\?)?', re.DOTALL)
_LINE_OBJECT = re.compile(r"(?:^|\n)[^\S\n]*(\{)")


@dataclass(frozen=True)
class ObjectStyle:
    """What stands around objects."""

    opening: str
    """Stands before the first."""
    closing: str = ""
    """Stands behind the last."""
    separator: str = ""
    """May stand between two, as white space may."""
    is_opening_needed: bool = True
    """False: the first object of a line may be a call as well."""


HERMES = ObjectStyle("<tool_call>", closing="</tool_call>")
"""`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and 3, and many others."""
LLAMA3_JSON = ObjectStyle("<|python_tag|>", separator=";", is_opening_needed=False)
"""`{"name": "f", "parameters": {…}}; {…}`: Llama 3.1 to 3.3."""


class ObjectFormat:
    """Implements `CallFormat`."""

    def __init__(self, style: ObjectStyle, tools: Mapping[str, Any]) -> None:
        self._style = style
        self._tools = tools

    def find(self, text: str, at_line_start: bool) -> int:
        """See `CallFormat`."""
        places = [_marker_in(text, self._style.opening)]
        if not self._style.is_opening_needed:
            for found in _LINE_OBJECT.finditer(text):
                if found[0].startswith("\n") or at_line_start:
                    places.append(found.start(1))
                    break
        return min(places)

    def candidate(self) -> Candidate:
        """See `CallFormat`."""
        return _Objects(self._style, self._tools)


class _Objects:
    """One or more objects in a row; implements `Candidate`."""

    def __init__(self, style: ObjectStyle, tools: Mapping[str, Any]) -> None:
        self._style = style
        self._tools = tools
        self._calls: list[Call] = []
        self._end = 0
        """Behind the last object or, before the first, behind the opening."""
        self._begin = 0
        """Where the object that `_brackets` reads begins."""
        self._brackets: Brackets | None = None
        self._may_be_call: bool | None = None
        """What its first key says; None: it has not come yet."""

    def read(self, held: str, over: bool) -> Verdict | None:
        """See `Candidate`."""
        opening = self._style.opening
        if not self._end and not held.startswith("{"):
            if not held.startswith(opening):
                return None if opening.startswith(held) and not over else Verdict(1)
            self._end = len(opening)
        while True:
            brackets = self._brackets or self._between(held, over)
            if not isinstance(brackets, Brackets):
                return brackets
            self._brackets = brackets
            if not self._style.is_opening_needed and self._may_be_call is None:
                self._may_be_call = _may_be_call(held[self._begin :])
                if self._may_be_call is False:
                    return self._over_at(self._end, held, self._begin + 1)
            end = brackets.end_in(held)
            if end is None and not brackets.is_broken and not over:
                return None
            call = None if end is None else self._call(held[self._begin : end])
            if call is None or end is None:
                return self._over_at(self._end, held, len(held) if end is None else end)
            self._calls.append(call)
            self._end, self._brackets, self._may_be_call = end, None, None

    def _between(self, held: str, over: bool) -> Brackets | Verdict | None:
        """Judge what follows an object or the opening; the brackets of the next object where one begins."""
        style, at = self._style, _skip_blank(held, self._end)
        if self._calls and style.separator and held.startswith(style.separator, at):
            at = _skip_blank(held, at + len(style.separator))
        if at == len(held):
            return self._over_at(at, held, at) if over else None
        if held[at] == "{":
            self._begin = at
            return Brackets(at, JSON_QUOTES)
        if self._calls and style.closing:
            tail = held[at : at + len(style.closing)]
            if tail == style.closing or (over and style.closing.startswith(tail)):
                return Verdict(at + len(tail), self._calls)
            if style.closing.startswith(tail):
                return None
        return self._over_at(self._end, held, at + 1)

    def _over_at(self, end: int, held: str, end_of_content: int) -> Verdict:
        """Return the calls there are, up to `end`; without any, the opening or else the whole is content."""
        if self._calls:
            return Verdict(end, self._calls)
        opening = self._style.opening
        return Verdict(len(opening) if held.startswith(opening) else end_of_content)

    def _call(self, text: str) -> Call | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        for key in ("arguments", "parameters"):
            if key in value:
                return call_of(value.get("name"), _arguments(value[key]), self._tools)
        return call_of(value.get("name"), {}, self._tools) if self._style.is_opening_needed else None


def _arguments(value: Any) -> Any:
    """Return what models mean by null or by the text of an object."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return {} if value is None else value


def _may_be_call(text: str) -> bool | None:
    """Return what an object's first key says; None: it is not whole yet."""
    found = _FIRST_KEY.match(text)
    if found is not None:
        return found[1] in KEYS
    return None if _MAY_GET_KEY.fullmatch(text) else False


def _marker_in(text: str, marker: str) -> int:
    """Return where a marker begins, or where its beginning ends the text; else the text's length."""
    at = text.find(marker)
    if at >= 0:
        return at
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return len(text) - size
    return len(text)


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
