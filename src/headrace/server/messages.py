"""From the parts of an answer to OpenAI's messages: whole, and as the deltas of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from headrace.core.interfaces import CallArguments, CallStart, Content, Reasoning
from headrace.server.answers import (
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from headrace.server.reading import Part

__all__ = ["deltas_of", "message_of"]


def message_of(parts: Sequence[Part], role: str, echo: str, *, tells_reasoning: bool) -> ChatMessage:
    """Return an answer's message; its content is null beside calls or thinking, where there is none.

    echo: stands before the content. tells_reasoning: there is a field for thinking.
    """
    content, reasoning = echo, ""
    calls: list[ToolCall] = []
    for part in parts:
        match part:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(name):
                calls.append(ToolCall(id=_new_id(), function=FunctionCall(name, "")))
            case CallArguments(text):
                calls[-1].function.arguments += text
    message = ChatMessage(role, content or (None if calls or reasoning else ""))
    if tells_reasoning:
        message.reasoning = reasoning or None
    if calls:
        message.tool_calls = calls
    return message


def deltas_of(parts: Sequence[Part], num_calls: int) -> list[ChatDelta]:
    """Return the deltas that parts are, one each.

    num_calls: calls of the answer so far, those that begin in `parts` included.
    """
    index = num_calls - sum(isinstance(part, CallStart) for part in parts) - 1
    deltas = []
    for part in parts:
        match part:
            case Content(text):
                deltas.append(ChatDelta(content=text))
            case Reasoning(text):
                deltas.append(ChatDelta(reasoning=text))
            case CallStart(name):
                index += 1
                call = ToolCallDelta(
                    index=index, id=_new_id(), type="function", function=FunctionDelta(name, "")
                )
                deltas.append(ChatDelta(tool_calls=[call]))
            case CallArguments(text):
                more = ToolCallDelta(index=index, function=FunctionDelta(arguments=text))
                deltas.append(ChatDelta(tool_calls=[more]))
    return deltas


def _new_id() -> str:
    """Return a call's id; none is given twice."""
    return f"call_{uuid.uuid4().hex}"
