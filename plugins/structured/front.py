"""The front half: a request's option becomes a grammar's description, and what is plainly wrong is refused."""

from __future__ import annotations

import json
from typing import Any

from headrace.core.errors import RequestError
from headrace.core.interfaces import GrammarSpec, ProcessedInput
from headrace.core.interfaces.build import FrontContext
from headrace.plugins.structured.options import DEFAULT_WHITESPACE, STRUCTURED, Structured, StructuredOption

__all__ = ["MAX_DEPTH", "MAX_TEXT", "StructuredInput", "spec_of"]

MAX_DEPTH = 64
"""Objects and lists inside each other in a schema."""
MAX_TEXT = 256 * 1024
"""Characters of a schema, an expression, all choices or a grammar."""


class StructuredInput:
    """Notes on requests that ask for it what their answers must be."""

    name = "structured"

    def __init__(self, context: FrontContext) -> None:
        self._has_text = context.tokenizer is not None
        self._end_ids = context.eos_token_ids
        self._vocab_size = context.vocab_size

    def process(self, item: ProcessedInput) -> None:
        """Fill the stash. Raises `RequestError` naming what is wrong."""
        given = item.params.options.get("structured")
        if given is None:
            return
        if not self._has_text:
            raise RequestError(
                "structured: this model has no tokenizer, so its answers are ids and no text",
                param="structured",
            )
        if item.params.max_tokens == 0:
            raise RequestError("structured: with max_tokens 0 there is no answer", param="structured")
        option = StructuredOption.model_validate(given)
        self._check_ids(option)
        item.stash[STRUCTURED] = Structured(
            spec_of(option), tuple(self._end_ids), tuple(option.after_ids), option.opening_id
        )

    def _check_ids(self, option: StructuredOption) -> None:
        opening = [] if option.opening_id is None else [option.opening_id]
        for token_id in (*opening, *option.after_ids):
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"structured: {token_id} is not in the model's vocabulary; ids are from 0 to "
                    f"{self._vocab_size - 1}",
                    param="structured",
                )


def spec_of(option: StructuredOption) -> GrammarSpec:
    """Return what is to be compiled. Raises `RequestError` for what needs no grammar to be seen."""
    if option.json_ is not None or option.json_object:
        schema = {"type": "object"} if option.json_ is None else _schema(option.json_)
        whitespace = DEFAULT_WHITESPACE if option.whitespace is None else option.whitespace
        return GrammarSpec("json", _bounded("json", _dumped(schema)), whitespace)
    if option.choice is not None:
        if not option.choice or "" in option.choice:
            raise _wrong("choice", "needs at least one text, and none that is empty")
        return GrammarSpec("choice", _bounded("choice", _dumped(option.choice)))
    if option.regex is not None:
        return GrammarSpec("regex", _regex(_bounded("regex", option.regex)))
    grammar = _bounded("grammar", option.grammar or "")
    if not grammar.strip():
        raise _wrong("grammar", "is empty")
    return GrammarSpec("grammar", grammar)


def _schema(given: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, dict):
        schema: Any = given
    else:
        _bounded("json", given)
        try:
            schema = json.loads(given)
        except RecursionError:
            raise _too_deep() from None
        except ValueError as error:
            raise _wrong("json", f"is a text that is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise _wrong("json", f"must be a JSON schema, which is an object, got {schema!r:.100}")
    _check_depth(schema)
    return schema


def _check_depth(schema: dict[str, Any]) -> None:
    """Walk without recursion: a hostile schema is deeper than Python's stack."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> RequestError:
    return _wrong("json", f"is nested more than {MAX_DEPTH} deep, which is the most that is taken")


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _wrong("json", f"holds what JSON cannot say: {error}") from None


def _regex(text: str) -> str:
    if not text:
        raise _wrong("regex", "is empty; it must say what the whole answer is")
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise _wrong("regex", "ends with a single backslash, which escapes nothing")
    return text


def _bounded(form: str, text: str) -> str:
    if len(text) > MAX_TEXT:
        raise _wrong(form, f"has {len(text)} characters; at most {MAX_TEXT} are taken")
    if "\0" in text:
        raise _wrong(form, f"has a NUL character at {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _wrong(form, f"is not valid Unicode: half of a surrogate pair at {error.start}") from None
    return text


def _wrong(form: str, what: str) -> RequestError:
    return RequestError(f"structured.{form} {what}", param="structured")
