"""The form an answer is to have: OpenAI's `response_format` becomes the request option `structured`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.server.calls import CallPlan
from headrace.server.errors import ApiError
from headrace.server.fields import Fields
from headrace.server.protocol import ResponseFormat

__all__ = ["take_form", "take_later_form"]

OTHER_SPELLINGS = ("structured_outputs", "structural_tag", "grammar", "json_schema")
"""Fields of other servers; those that begin with `guided_` besides."""


def take_form(given: ResponseFormat | None, fields: Fields) -> None:
    """Put what is asked for among the fields of the sampler.

    Raises `ApiError` where it is asked for twice, or in words of another server: a client must not take an answer
    for constrained that is not.
    """
    for name in fields.unknown:
        if name.startswith("guided_") or name in OTHER_SPELLINGS:
            raise ApiError(
                400,
                f"{name}: this server has other words for it: response_format, or structured with one of json, "
                "json_object, regex, choice and grammar",
                param=name,
                code="unknown_field",
            )
    if given is None or given.type == "text":
        return
    if "structured" in fields.sampling:
        raise ApiError(
            400, "response_format and structured: an answer has one form; leave one out", param="structured"
        )
    fields.sampling["structured"] = _option(given)


def take_later_form(fields: Fields, plan: CallPlan, after_ids: Sequence[int], opening_id: int | None) -> None:
    """Put the form of forced calls among the fields of the sampler, and let any form begin behind the thinking.

    after_ids: they end the thinking; empty: there is none. opening_id: begins it; None: it has begun.
    Raises `ApiError` where the request asks for another form.
    """
    if plan.is_forced:
        if "structured" in fields.sampling:
            raise ApiError(
                400,
                "tool_choice 'required' or a named tool is a form of the answer, and response_format and structured "
                "are others: an answer has one form",
                param="tool_choice",
            )
        fields.sampling["structured"] = {"json": plan.schema()}
    form = fields.sampling.get("structured")
    if after_ids and isinstance(form, dict):
        fields.sampling["structured"] = {
            "after_ids": list(after_ids),
            "opening_id": opening_id,
            **form,
        }


def _option(given: ResponseFormat) -> dict[str, Any]:
    if given.json_schema is None:
        return {"json_object": True}
    return {"json": given.json_schema.schema_}
