"""Calls written as a Python list: `[look_up(city="Paris"), add(a=1, b=[2, 3])]`, as Llama 3.2 and 4 do."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from typing import Any

from headrace.plugins.tools.brackets import PYTHON_QUOTES, Brackets
from headrace.plugins.tools.scanner import Call, Candidate, Verdict, call_of

__all__ = ["PythonicFormat"]

_LINE_LIST = re.compile(r"(?:^|\n)[^\S\n]*(\[)")
_HEAD = re.compile(r"\[\s*([A-Za-z_][\w.]*)?\s*")

JSON_NAMES = {"true": True, "false": False, "null": None}
"""Models that were taught JSON write these for `True`, `False` and `None`."""


class PythonicFormat:
    """Implements `CallFormat`: a list that begins a line and holds nothing but calls with keywords."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._tools = tools

    def find(self, text: str, at_line_start: bool) -> int:
        """See `CallFormat`."""
        for found in _LINE_LIST.finditer(text):
            if found[0].startswith("\n") or at_line_start:
                return found.start(1)
        return len(text)

    def candidate(self) -> Candidate:
        """See `CallFormat`."""
        return _List(self._tools)


class _List:
    """Implements `Candidate`."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._tools = tools
        self._brackets: Brackets | None = None

    def read(self, held: str, over: bool) -> Verdict | None:
        """See `Candidate`."""
        if self._brackets is None:
            head = _HEAD.match(held)
            if head is None:
                return Verdict(1)
            if head.end() == len(held):
                return Verdict(len(held)) if over else None
            if held[head.end()] != "(" or head[1] not in self._tools:
                return Verdict(1)
            self._brackets = Brackets(0, PYTHON_QUOTES)
        end = self._brackets.end_in(held)
        if end is None:
            return Verdict(len(held)) if over or self._brackets.is_broken else None
        return Verdict(end, _calls(held[:end], self._tools) or ())


def _calls(text: str, tools: Mapping[str, Any]) -> list[Call] | None:
    """Return the calls of a list; None where it is anything else as well."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know: a model wrote them
            parsed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(parsed, ast.List):
        return None
    calls = [_call(node, tools) for node in parsed.elts]
    known = [call for call in calls if call is not None]
    return known if len(known) == len(calls) else None


def _call(node: ast.expr, tools: Mapping[str, Any]) -> Call | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            return None
        try:
            arguments[keyword.arg] = ast.literal_eval(_JsonNames().visit(keyword.value))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None
    return call_of(ast.unparse(node.func), arguments, tools)


class _JsonNames(ast.NodeTransformer):
    """Writes JSON's names as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace one."""
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node
