"""What a chat says of tools: which there are, whether one may or must be called, and the form that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.server.errors import ApiError, short
from headrace.server.protocol import ChatBody

__all__ = ["CallPlan", "plan_calls"]

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
COMPOSED = frozenset({"$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties"})
"""A schema with one of these may take more than the properties it lists."""
DATA = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are no schemas."""


@dataclass(frozen=True)
class CallPlan:
    """What is to become of tools in an answer."""

    mode: Literal["none", "auto", "required", "named"]
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of the arguments, by name; empty with `none`."""
    name: str = ""
    """The tool, with `named`."""
    is_parallel: bool = True
    """False: of several calls the first counts."""

    @property
    def is_forced(self) -> bool:
        """Whether the answer is held to a form, and consists of calls."""
        return self.mode in ("required", "named")

    def schema(self) -> dict[str, Any]:
        """Return the schema of a forced answer: a list of calls, or the arguments of the named tool."""
        if self.mode == "named":
            return dict(self.tools[self.name])
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for place, name in enumerate(self.tools)
        ]
        most = {} if self.is_parallel else {"maxItems": 1}
        definitions = {
            str(place): _moved(schema, f"#/$defs/{place}") for place, schema in enumerate(self.tools.values())
        }
        return {
            "type": "array",
            "minItems": 1,
            **most,
            "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
            "$defs": definitions,
        }


def plan_calls(body: ChatBody, *, has_parser: bool, may_choose: bool) -> CallPlan:
    """Return the plan of a request. Raises `ApiError` for one that cannot be followed.

    has_parser: calls can be found in free text. may_choose: the model may be left to choose.
    """
    choice = body.tool_choice
    if choice not in (None, "none") and not body.tools:
        raise ApiError(400, "tool_choice needs tools, and there are none", param="tool_choice")
    if not body.tools or choice == "none":
        return CallPlan("none")
    tools: dict[str, Mapping[str, Any]] = {}
    for place, tool in enumerate(body.tools):
        if tool.function.name in tools:
            name = f"tools.{place}.function.name"
            raise ApiError(400, f"{name}: {short(tool.function.name)} is there twice", param=name)
        tools[tool.function.name] = _arguments_schema(tool.function.parameters)
    if choice in (None, "auto"):
        if not has_parser or not may_choose:
            option = "--tool-call-parser NAME" if not has_parser else "--enable-auto-tool-choice"
            raise ApiError(
                400,
                f"tool_choice 'auto', the default with tools, needs a server started with {option}; this one takes "
                "'required', a named tool, and 'none'",
                param="tool_choice",
            )
        return CallPlan("auto", tools, is_parallel=body.parallel_tool_calls)
    if choice == "required":
        return CallPlan("required", tools, is_parallel=body.parallel_tool_calls)
    name = choice["function"]["name"]
    if name not in tools:
        raise ApiError(
            400,
            f"tool_choice: there is no tool {short(name)}; there are: {', '.join(map(short, tools))}",
            param="tool_choice",
        )
    return CallPlan("named", tools, name)


def _arguments_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return what arguments are: an object, with nothing but the properties that are listed unless it says more.

    Without that, small models go on with properties of their own until `max_tokens`.
    """
    if not parameters:
        return NO_PARAMETERS
    schema = {"type": "object", **parameters}
    if "properties" in schema and not COMPOSED & schema.keys():
        schema["additionalProperties"] = False
    return schema


def _moved(schema: Any, root: str) -> Any:
    """Return a schema whose references to itself hold where it now stands inside another one."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        else:
            moved[key] = value if key in DATA else _moved(value, root)
    return moved
