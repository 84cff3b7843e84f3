"""`POST /v1/chat/completions`: what it asks of the engine, and how it is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from headrace.core.errors import RequestError
from headrace.core.sampling_params import SamplingParams
from headrace.outputs import CompletionDelta, CompletionOutput, RequestOutput, RequestUpdate
from headrace.server.answers import Chat, ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs
from headrace.server.calls import CallPlan
from headrace.server.errors import ApiError, failure_of, short
from headrace.server.formats import EventWriter, Head, usage_of
from headrace.server.messages import deltas_of, message_of
from headrace.server.protocol import ChatBody
from headrace.server.reading import AnswerReader
from headrace.server.tokens import Candidates, TokenWriter, prompt_logprobs

__all__ = [
    "ChatFormat",
    "chat_params",
    "echo_of",
    "template_messages",
    "template_options",
    "template_variables",
]

OWN_OPTIONS = (
    "self",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "template_name",
)
"""What a request may not set as variables of the template."""


def chat_params(body: ChatBody, sampling: Mapping[str, Any], max_tokens: int | None) -> SamplingParams:
    """Return what the engine is asked for. Raises `ApiError` or `RequestError` for what it is not able to do.

    max_tokens: where the request sets none; None: up to the end of the context.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, f"top_logprobs {body.top_logprobs} needs logprobs: true", param="top_logprobs")
    if body.stream and "prompt_logprobs" in sampling:
        raise ApiError(400, "prompt_logprobs: not in a stream", param="prompt_logprobs")
    asked = dict(sampling)
    if body.logprobs:
        asked["logprobs"] = body.top_logprobs or 0
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    least = asked.get("min_tokens", 0)
    if given is None and max_tokens is not None and isinstance(least, int) and least <= max_tokens:
        given = max_tokens
    return SamplingParams(**asked, max_tokens=given)


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates know them; what else is wrong with one is found where it is rendered.

    A developer is what OpenAI now calls the system; an assistant's turn that only calls tools has an empty text;
    arguments of a call become an object where they are the text of one; thinking has the name that templates read.
    """
    return [_template_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _template_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name), str | None):
            raise RequestError(
                f"{place}.{name} must be a text, got {short(message[name])}", param=f"{place}.{name}"
            )
    changed = dict(message)
    if changed.get("role") == "developer":
        changed["role"] = "system"
    if "reasoning" in changed:
        changed.setdefault("reasoning_content", changed["reasoning"])
    calls = changed.get("tool_calls")
    if not isinstance(calls, list | None) or not all(isinstance(call, dict) for call in calls or ()):
        raise RequestError(
            f"{place}.tool_calls must be a list of calls, got {short(calls)}", param=f"{place}.tool_calls"
        )
    if calls:
        changed["content"] = "" if changed.get("content") is None else changed["content"]
        changed["tool_calls"] = [_template_call(call) for call in calls]
    return changed


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def template_options(
    add_generation_prompt: bool | None, continue_final_message: bool, variables: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the keywords of `AsyncLLM.render_chat`. Raises `ApiError` for variables that are keywords."""
    for name in variables or {}:
        if name in OWN_OPTIONS:
            raise ApiError(
                400,
                f"chat_template_kwargs.{name}: it is no variable of the template; set the field of the request",
                param=f"chat_template_kwargs.{name}",
            )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return {
        **(variables or {}),
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }


def template_variables(body: ChatBody) -> dict[str, Any]:
    """Return the variables of the template that a request sets."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return effort | (body.chat_template_kwargs or {})


def echo_of(body: ChatBody, role: str) -> str:
    """Return the last message's text, where it is to stand before the answer: its role is the answer's."""
    last = body.messages[-1]
    if not body.echo or last.get("role") != role:
        return ""
    content = last.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] if isinstance(part, dict) else str(part) for part in content)
    return content or ""


class ChatFormat:
    """How a request to /v1/chat/completions is answered.

    Parameters
    ----------
    role: of the answer.
    readers: one an answer.
    plan: what is to become of tools.
    echo: stands before each answer.
    counts_reasoning: thinking is told from content.
    asked_prompt_logprobs: the request has the field `prompt_logprobs`.
    """

    def __init__(
        self,
        head: Head,
        body: ChatBody,
        params: SamplingParams,
        writer: TokenWriter,
        *,
        role: str,
        readers: Sequence[AnswerReader],
        plan: CallPlan,
        echo: str = "",
        counts_reasoning: bool = False,
        asked_prompt_logprobs: bool = False,
    ) -> None:
        self._head = head
        self._body = body
        self._writer = writer
        self._role = role
        self._readers = readers
        self._plan = plan
        self._tells_reasoning = counts_reasoning and body.include_reasoning
        self._counts_reasoning = counts_reasoning
        self._echo = echo
        self._asked_prompt_logprobs = asked_prompt_logprobs
        self._tells_logprobs = params.logprobs is not None
        self._also = frozenset(params.logprob_token_ids or ())
        self._begun = [False] * params.n
        self._events = EventWriter(head, "chat.completion.chunk", body.stream_options)

    def whole(self, outputs: Sequence[RequestOutput]) -> Chat:
        """Return the answer."""
        head, (output,) = self._head, outputs
        choices = [self._choice(answer) for answer in output.outputs]
        chat = Chat(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=usage_of(outputs, self._reasoning_tokens()),
        )
        if self._body.return_token_ids:
            chat.prompt_token_ids = output.prompt_token_ids
        if self._asked_prompt_logprobs:
            chat.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return chat

    def write(self, place: int, update: RequestUpdate, events: list[bytes]) -> None:
        """See `AnswerFormat`: the role, the echo, a chunk or more a delta, and one for the end."""
        self._events.count(place, update)
        for delta in update.deltas:
            failure = failure_of(delta)
            if failure is not None:
                raise failure
            if not self._begun[delta.index]:
                self._begun[delta.index] = True
                events += self._opening(delta.index)
            reader = self._readers[delta.index]
            parts = reader.push(delta.text, delta.token_ids)
            if delta.finish_reason is not None:
                parts += reader.finish()
            self._events.reasoning_tokens = self._reasoning_tokens()
            events += self._chunks(delta, deltas_of(parts, reader.num_calls))
            if delta.finish_reason is not None:
                events.append(self._finish(delta))

    def end(self) -> bytes:
        """See `AnswerFormat`."""
        return self._events.end()

    def _opening(self, index: int) -> list[bytes]:
        deltas = [ChatDelta(role=self._role, content="")]
        if self._echo:
            deltas.append(ChatDelta(content=self._echo))
        return [self._events.event(ChatChunkChoice(index=index, delta=delta)) for delta in deltas]

    def _chunks(self, delta: CompletionDelta, told: list[ChatDelta]) -> Iterator[bytes]:
        """Yield what is new; the first chunk tells of the tokens, and there is one even where text is held back."""
        if delta.token_ids and not told:
            told = [ChatDelta(content="")]
        for place, one in enumerate(told):
            is_first = not place and bool(delta.token_ids)
            choice = ChatChunkChoice(
                index=delta.index,
                delta=one,
                logprobs=self._logprobs(delta.logprobs) if is_first else None,
                token_ids=delta.token_ids if is_first and self._body.return_token_ids else UNSET,
            )
            yield self._events.event(choice)

    def _finish(self, delta: CompletionDelta) -> bytes:
        return self._events.event(
            ChatChunkChoice(
                index=delta.index,
                delta=ChatDelta(),
                finish_reason=self._reason(delta.index, delta.finish_reason),
                stop_reason=delta.stop_reason,
            )
        )

    def _reason(self, index: int, reason: str | None) -> str | None:
        """Return why an answer ended, as OpenAI has it: one that was made to call a named tool has just stopped."""
        calls = self._plan.mode in ("auto", "required") and self._readers[index].num_calls
        return "tool_calls" if calls and reason == "stop" else reason

    def _reasoning_tokens(self) -> int | None:
        if not self._counts_reasoning:
            return None
        return sum(reader.num_reasoning_tokens for reader in self._readers)

    def _choice(self, answer: CompletionOutput) -> ChatChoice:
        reader = self._readers[answer.index]
        parts = [*reader.push(answer.text, answer.token_ids), *reader.finish()]
        return ChatChoice(
            index=answer.index,
            message=message_of(parts, self._role, self._echo, tells_reasoning=self._tells_reasoning),
            logprobs=self._logprobs(answer.logprobs),
            finish_reason=self._reason(answer.index, answer.finish_reason),
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if self._body.return_token_ids else UNSET,
        )

    def _logprobs(self, entries: list[Candidates] | None) -> ChatLogprobs | None:
        if not self._tells_logprobs or entries is None:
            return None
        return self._writer.chat(entries, self._body.top_logprobs or 0, self._also)
