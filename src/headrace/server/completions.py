"""`POST /v1/completions`: what it asks of the engine, and how it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from headrace.core.sampling_params import SamplingParams
from headrace.outputs import CompletionOutput, RequestOutput, RequestUpdate
from headrace.server.answers import Completion, CompletionChoice, CompletionLogprobs
from headrace.server.errors import ApiError, failure_of, short
from headrace.server.formats import EventWriter, Head, usage_of
from headrace.server.protocol import CompletionBody
from headrace.server.tokens import Candidates, CompletionTokens, TokenWriter, prompt_logprobs

__all__ = ["CompletionFormat", "completion_params", "prompts_of"]


def prompts_of(body: CompletionBody, limit: int) -> list[str | list[Any]]:
    """Return a body's prompts; what they hold is checked where they become tokens.

    Raises `ApiError` for what is no prompt, and for more than `limit`.
    """
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise _wrong(f"must be a text, token ids, or a list of either, got {short(given)}")
    if not given:
        raise _wrong("is an empty list; it must hold at least one prompt or token id")
    if not isinstance(given[0], (str, list)):
        return [given]
    for place, prompt in enumerate(given):
        if not isinstance(prompt, type(given[0])):
            raise _wrong(
                f"must not mix texts and token ids: prompt[0] is {short(given[0])}, prompt[{place}] is "
                f"{short(prompt)}"
            )
    if len(given) > limit:
        raise _wrong(f"holds {len(given)} prompts, and this server takes {limit} in a request (max_prompts)")
    return given


def completion_params(body: CompletionBody, sampling: dict[str, Any]) -> SamplingParams:
    """Return what the engine is asked for. Raises `ApiError` or `RequestError` for what it is not able to do."""
    if body.suffix:
        raise ApiError(400, "suffix: the model does not fill in the middle; leave it out", param="suffix")
    if body.best_of is not None and not body.use_beam_search and body.best_of != sampling.get("n", 1):
        raise ApiError(400, "best_of is not available here, see n and use_beam_search", param="best_of")
    if body.stream and "prompt_logprobs" in sampling:
        raise ApiError(
            400, "prompt_logprobs: not in a stream; use echo with logprobs", param="prompt_logprobs"
        )
    asked = dict(sampling)
    if body.logprobs is not None:
        asked["logprobs"] = body.logprobs
    elif asked.get("logprob_token_ids"):
        asked["logprobs"] = 0
    if body.echo and ("logprobs" in asked or asked.get("max_tokens") == 0):
        asked.setdefault("prompt_logprobs", asked.get("logprobs", 0))
    return SamplingParams(**asked)


class CompletionFormat:
    """How a request to /v1/completions is answered: choices are numbered prompt by prompt.

    Parameters
    ----------
    params: what the engine was asked for, the model's own defaults included.
    asked_prompt_logprobs: the request has the field `prompt_logprobs`.
    hidden: ids that texts do not show.
    """

    def __init__(
        self,
        head: Head,
        body: CompletionBody,
        params: SamplingParams,
        writer: TokenWriter,
        hidden: frozenset[int],
        num_prompts: int,
        *,
        asked_prompt_logprobs: bool = False,
    ) -> None:
        self._head = head
        self._body = body
        self._n = params.n
        self._tells_logprobs = params.logprobs is not None
        self._writer = writer
        self._asked_prompt_logprobs = asked_prompt_logprobs
        spaced = writer.special_ids if params.spaces_between_special_tokens else frozenset()
        self._tokens = [CompletionTokens(writer, hidden, spaced) for _ in range(num_prompts * params.n)]
        self._begun = [False] * len(self._tokens)
        self._events = EventWriter(head, "text_completion", body.stream_options, num_prompts)

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        """Return the answer."""
        head = self._head
        return Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=[
                self._choice(place * self._n + answer.index, output, answer)
                for place, output in enumerate(outputs)
                for answer in output.outputs
            ],
            usage=usage_of(outputs),
        )

    def write(self, place: int, update: RequestUpdate, events: list[bytes]) -> None:
        """See `AnswerFormat`: a chunk for what stands before an answer, then one a delta."""
        self._events.count(place, update)
        for delta in update.deltas:
            failure = failure_of(delta)
            if failure is not None:
                raise failure
            index = place * self._n + delta.index
            if not self._begun[index]:
                self._begun[index] = True
                if self._body.echo or self._body.return_token_ids:
                    events.append(self._events.event(self._opening(index, update.output)))
            choice = CompletionChoice(
                index=index,
                text=delta.text,
                logprobs=self._logprobs(index, delta.token_ids, delta.logprobs),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                token_ids=delta.token_ids if self._body.return_token_ids else UNSET,
            )
            events.append(self._events.event(choice))

    def end(self) -> bytes:
        """See `AnswerFormat`."""
        return self._events.end()

    def _choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> CompletionChoice:
        choice = self._opening(index, output)
        choice.text += answer.text
        choice.logprobs = _joined(
            choice.logprobs, self._logprobs(index, answer.token_ids, answer.logprobs or [])
        )
        choice.finish_reason = answer.finish_reason
        choice.stop_reason = answer.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = answer.token_ids
        if self._asked_prompt_logprobs:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return choice

    def _opening(self, index: int, output: RequestOutput) -> CompletionChoice:
        """Return what stands before an answer."""
        choice = CompletionChoice(index=index, text="")
        ids = output.prompt_token_ids
        if self._body.echo:
            choice.text = output.prompt if output.prompt is not None else self._writer.prompt_text(ids)
            if self._tells_logprobs:
                entries = output.prompt_logprobs or []
                choice.logprobs = self._tokens[index].prompt(choice.text, ids, entries)
        if self._body.return_token_ids:
            choice.prompt_token_ids = ids
        return choice

    def _logprobs(
        self, index: int, token_ids: list[int], entries: list[Candidates] | None
    ) -> CompletionLogprobs | None:
        if not self._tells_logprobs or entries is None:
            return None
        return self._tokens[index].answer(token_ids, entries)


def _joined(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    if first is None or second is None:
        return first or second
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def _wrong(what: str) -> ApiError:
    return ApiError(400, f"prompt {what}", param="prompt")
