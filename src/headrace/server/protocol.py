"""The bodies of requests: the fields of each route that are not the sampler's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    WithJsonSchema,
    field_validator,
    model_validator,
)

__all__ = [
    "Body",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "FunctionSpec",
    "JsonSchemaSpec",
    "ResponseFormat",
    "StreamOptions",
    "TokenizeBody",
    "Tool",
]

INT64 = 2**63

TEXT_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
MESSAGE: dict[str, Any] = {
    "type": "object",
    "description": "role: system, developer, user, assistant, tool, or what else the model's template knows.",
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}, {"type": "null"}]},
        "name": {"type": "string"},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
        "tool_call_id": {"type": "string"},
    },
    "required": ["role"],
}
PROMPT: dict[str, Any] = {
    "description": "A text, a list of texts, token ids, or a list of lists of token ids.",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ],
}

TOOL_CHOICE: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
        {"type": "null"},
    ]
}

Prompt = Annotated[Any, WithJsonSchema(PROMPT)]
ToolChoice = Annotated[Any, WithJsonSchema(TOOL_CHOICE)]
Messages = Annotated[list[dict[str, Any]], WithJsonSchema({"type": "array", "items": MESSAGE, "minItems": 1})]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


MAX_INTERVAL = 1000


class StreamOptions(_Strict):
    """What a stream carries besides text."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    """One more chunk before the end, with the usage."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk, where `include_usage` is set."""


class JsonSchemaSpec(_Strict):
    """A schema and its name."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Strict):
    """What form an answer has."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaSpec | None = None

    @model_validator(mode="after")
    def _needs_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type 'json_schema' needs json_schema, an object with name and schema")
        return self


class Body(_Strict):
    """What both compute routes have."""

    model: str | None = None
    """A name of /v1/models; empty or absent: the model there is."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = Field(None, ge=1, le=MAX_INTERVAL)
    """Tokens of an answer in a chunk of the stream; the server has a default."""
    user: str | None = None
    """Who asks, in the caller's words; it has no effect."""
    priority: int = Field(0, ge=-INT64, lt=INT64)
    """Lower is served first, where the server schedules by priority."""
    response_format: ResponseFormat | None = None
    """The form of the answer: `text`, a JSON object, or JSON that fits a schema."""
    use_beam_search: bool = False
    """Look for the `n` likeliest answers instead of drawing some."""
    length_penalty: float = Field(1.0, ge=-10.0, le=10.0)
    """Of a beam search: answers are ordered by the sum of their log-probabilities / tokens ** length_penalty."""
    return_token_ids: bool = False
    """Answers carry `token_ids`, and the prompt's as `prompt_token_ids`."""
    return_tokens_as_token_ids: bool = False
    """Tokens among log-probabilities are written `token_id:N`."""


class CompletionBody(Body):
    """`POST /v1/completions`."""

    prompt: Prompt
    suffix: str | None = None
    """Not available: no model here fills in the middle."""
    echo: bool = False
    """Answers begin with the prompt."""
    logprobs: int | None = Field(None, ge=-1)
    """Candidates a token, the chosen one besides."""
    best_of: int | None = None
    """Not available, unless it equals `n`, where it means nothing."""


class FunctionSpec(_Strict):
    """A function that a model may call."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Strict):
    """A tool that a model may call."""

    type: Literal["function"]
    function: FunctionSpec


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=0, lt=INT64)
    """Absent: up to the end of the context."""
    max_completion_tokens: int | None = Field(None, ge=0, lt=INT64)
    """The newer name of `max_tokens`; it wins."""
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    """Answers begin with the last message, where that has the role of the answer."""
    tools: list[Tool] | None = Field(None, min_length=1)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    """False: of several calls in an answer the first is kept."""
    include_reasoning: bool = True
    """False: thinking is left out of the answer, where the server tells it from content."""
    reasoning_effort: str | None = Field(None, min_length=1, max_length=20)
    """How long to think, such as `low` or `high`: a variable of the model's template, which may not read it."""
    add_generation_prompt: bool | None = None
    """Begin the answer's turn; the default, unless `continue_final_message` is set."""
    continue_final_message: bool = False
    """Leave the last message's turn open, so that the answer goes on with it."""
    chat_template: Any = None
    """Not available: a template is a program, and one that came with a request is not trusted."""
    chat_template_kwargs: dict[str, Any] | None = None
    """What else the model's template reads."""

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _known_choice(cls, value: Any) -> Any:
        function = value.get("function") if isinstance(value, dict) else None
        if value in ("none", "auto", "required") or (
            isinstance(function, dict)
            and value.get("type") == "function"
            and isinstance(function.get("name"), str)
        ):
            return value
        raise ValueError(
            "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': …}}"
        )


class TokenizeBody(_Strict):
    """`POST /tokenize`: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Add the start token, where the model has one; the default for a prompt, not for a conversation."""
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(_Strict):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Strict()]]
