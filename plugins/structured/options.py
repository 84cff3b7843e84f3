"""What a request may ask of the form of its answer, what an operator may set, and what travels through the engine."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.core.config import Section, option
from headrace.core.interfaces import GrammarSpec
from headrace.core.stash import StashKey

__all__ = [
    "DEFAULT_WHITESPACE",
    "MAX_WHITESPACE",
    "STRUCTURED",
    "Structured",
    "StructuredOption",
    "StructuredSection",
]

DEFAULT_WHITESPACE = 1
MAX_WHITESPACE = 64
MAX_AFTER = 64
"""Most ids of `after_ids`."""

FORMS = ("json", "json_object", "regex", "choice", "grammar")


class StructuredOption(BaseModel):
    """The request option `structured`: exactly one form; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    """A JSON schema, or its text: the answer is JSON that fits it."""
    json_object: bool | None = None
    """True: the answer is a JSON object."""
    regex: str | None = None
    """The whole answer matches it (Rust's syntax: no look-around, no back references)."""
    choice: list[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """Rules in Lark's or GBNF's notation."""
    whitespace: int | None = Field(None, ge=0, le=MAX_WHITESPACE)
    """Most white-space characters between two tokens of JSON; without it, 1."""
    after_ids: list[int] = Field(default_factory=list, max_length=MAX_AFTER)
    """Token ids in a row behind which the form begins, such as those that end a model's thinking. What comes before
    is free, and so is an answer in which they never come. Empty: it begins with the answer."""
    opening_id: int | None = None
    """With `after_ids`: an answer may begin with this token, and its form then begins behind them. One that begins
    otherwise has its form at once."""

    @model_validator(mode="after")
    def _one_form(self) -> StructuredOption:
        given = [
            form for form in FORMS if getattr(self, "json_" if form == "json" else form) not in (None, False)
        ]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of {', '.join(FORMS)}; it has {', '.join(given) or 'none'}")
        if self.opening_id is not None and not self.after_ids:
            raise ValueError("opening_id needs after_ids, behind which the form begins then")
        if self.whitespace is not None and given[0] not in ("json", "json_object"):
            raise ValueError(
                f"whitespace is for json and json_object; {given[0]} says itself what may be between"
            )
        return self


class StructuredSection(Section):
    """How grammars are compiled."""

    grammar_backend: str | None = option(
        None, "Compiles grammars of structured answers. Default: the first there is."
    )
    grammar_compile_timeout: float = option(
        8.0, "Seconds a request waits for its grammar before it fails.", gt=0
    )
    grammar_cache_size: int = option(128, "Compiled grammars kept for requests to come.", ge=1)


class Structured(msgspec.Struct, array_like=True, frozen=True):
    """A request's grammar."""

    spec: GrammarSpec
    end_ids: tuple[int, ...]
    """Ids that end an answer of this model."""
    after_ids: tuple[int, ...] = ()
    opening_id: int | None = None
    """See `StructuredOption`."""


STRUCTURED: StashKey[Structured] = StashKey("structured/request", Structured, direction="request")
