"""The bodies of answers, whole and in chunks, in OpenAI's shape with vLLM's additions."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

__all__ = [
    "Chat",
    "ChatChoice",
    "ChatChunkChoice",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "ChatToken",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionTokensDetails",
    "FunctionCall",
    "FunctionDelta",
    "Model",
    "ModelList",
    "PromptLogprobs",
    "PromptTokensDetails",
    "Text",
    "TokenAlternative",
    "Tokens",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "Version",
]

PromptLogprobs = list[dict[str, dict[str, Any]] | None]
"""One entry a prompt token, the first null: candidates by token id."""


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    """Not computed: they were in the prefix cache."""


class CompletionTokensDetails(msgspec.Struct):
    """What the answers' tokens are."""

    reasoning_tokens: int
    """Thinking, the tokens that end it included."""


class Usage(msgspec.Struct):
    """Tokens of a request; a prompt counts once, however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """In chats, where the server tells thinking from content."""


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of /v1/completions: four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token begins in the answer's text."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One answer of /v1/completions, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """`POST /v1/completions`."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TokenAlternative(msgspec.Struct, kw_only=True):
    """A candidate at one position of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(TokenAlternative, kw_only=True):
    """A token of a chat's answer."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of /v1/chat/completions."""

    content: list[ChatToken]


class FunctionCall(msgspec.Struct):
    """What is called."""

    name: str
    arguments: str
    """JSON."""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: str = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct):
    """An answer."""

    role: str
    content: str | None
    reasoning: str | UnsetType | None = UNSET
    """Thinking, where the server tells it from content."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer of /v1/chat/completions."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class Chat(msgspec.Struct, kw_only=True):
    """`POST /v1/chat/completions`."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class FunctionDelta(msgspec.Struct):
    """What a chunk adds to what is called."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to a call: first its id, type and name, then arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct):
    """What a chunk adds to a chat's answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """An answer's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Model(msgspec.Struct, kw_only=True):
    """A name the model answers to."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "headrace"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct):
    """`GET /v1/models`."""

    data: list[Model]
    object: str = "list"


class Tokens(msgspec.Struct, kw_only=True):
    """`POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct):
    """`POST /detokenize`."""

    prompt: str


class Version(msgspec.Struct):
    """`GET /version`."""

    version: str
