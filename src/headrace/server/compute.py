"""The compute routes without HTTP around them: a body is checked, run by the engine, and answered."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from headrace.async_llm import AsyncLLM
from headrace.beams import BeamRequest, BeamSearchParams
from headrace.core.errors import HeadraceError, RequestError
from headrace.core.interfaces import ModelVariant, ParserContext
from headrace.core.sampling_params import SamplingParams
from headrace.front_half import FrontHalf
from headrace.frontend import Prepared
from headrace.server.beams import BeamRun, beam_params, single
from headrace.server.calls import plan_calls
from headrace.server.chat import (
    ChatFormat,
    chat_params,
    echo_of,
    template_messages,
    template_options,
    template_variables,
)
from headrace.server.completions import CompletionFormat, completion_params, prompts_of
from headrace.server.errors import ApiError, api_error, short, validation_error
from headrace.server.fields import Fields, KnownFields, ignored_header, sampling_names
from headrace.server.formats import AnswerFormat, Head
from headrace.server.forms import take_form, take_later_form
from headrace.server.intervals import Intervals
from headrace.server.options import ServerSection, model_names
from headrace.server.parsers import Parsers
from headrace.server.protocol import Body, ChatBody, CompletionBody
from headrace.server.runs import Run
from headrace.server.tokens import TokenWriter

__all__ = ["CHAT", "COMPLETIONS", "ComputeRoutes", "Job"]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

TRACEPARENT = "traceparent"
"""A header's name, and that of the request option which a tracing plugin brings."""
_TRACE = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

MAX_TOLD = 20
"""So many names of models are told to who asks for one that is not there."""

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True)
class Job:
    """A request that passed every check: to be run, and answered in its format."""

    head: Head
    run: Run | BeamRun
    format: AnswerFormat
    stream: bool
    intervals: Intervals
    """What of a stream is written when."""
    unknown: list[str]
    """Fields that were passed over."""


@dataclass(frozen=True)
class _Asked:
    """What of a body is the engine's."""

    params: SamplingParams
    beams: BeamSearchParams | None
    """None: answers are drawn."""
    priority: int


class ComputeRoutes:
    """Answers bodies of the compute routes. Used on the engine's event loop."""

    def __init__(self, engine: AsyncLLM, options: ServerSection) -> None:
        self._engine = engine
        self._options = options
        sampling = sampling_names(engine.registry)
        self._completion_fields = KnownFields(CompletionBody, sampling)
        self._chat_fields = KnownFields(ChatBody, sampling)
        self._parsers = Parsers(engine.registry, options)
        self._begin = {COMPLETIONS: self._begin_completions, CHAT: self._begin_chat}

    @property
    def names(self) -> Sequence[str]:
        """What the model may be called; the first is its own."""
        return model_names(self._engine.config)

    def check_there(self) -> None:
        """Raise `ApiError` 503 where there is no engine to ask."""
        lost = self._engine.lost
        if lost is not None:
            raise api_error(lost)

    def check_model(self, name: str | None) -> str:
        """Return what an answer calls the model. Raises `ApiError` 404 for a name it does not have."""
        if not name:
            return self.names[0]
        if name not in self.names and self.variant(name) is None:
            there = [*self.names, *(variant.name for variant in self.variants())]
            raise ApiError(
                404,
                f"there is no model {short(name)}; there are: {', '.join(there[:MAX_TOLD])}",
                param="model",
                code="model_not_found",
            )
        return name

    def variants(self) -> list[ModelVariant]:
        """What may be called for beside the model itself."""
        return [variant for each in self._engine.front.variants for variant in each.all()]

    def variant(self, name: str) -> ModelVariant | None:
        """Return what a name beside the model's own stands for; None: nobody has it."""
        if name in self.names:
            return None
        found = (each.find(name) for each in self._engine.front.variants)
        return next((variant for variant in found if variant is not None), None)

    def read_plain(self, model: type[B], data: Mapping[str, Any]) -> tuple[B, dict[str, str]]:
        """Return the checked body of a route that asks nothing of the engine, and headers for its answer."""
        known = KnownFields(model)
        fields = known.sort(data)
        body = _check_body(model, fields.own)
        self.check_model(fields.own.get("model"))
        if self._options.strict:
            known.refuse(fields.unknown)
        return body, ignored_header(model.__name__, fields.unknown)

    def with_trace(
        self, data: Mapping[str, Any], headers: Iterable[tuple[bytes, bytes]]
    ) -> Mapping[str, Any]:
        """Return a body with its caller's trace context, where somebody here takes one and the header holds one.

        What is no trace context is passed over, as its standard wants it (W3C Trace Context, 4.3).
        """
        if not self._completion_fields.takes(TRACEPARENT) or TRACEPARENT in data:
            return data
        for name, value in headers:
            if name == TRACEPARENT.encode() and _TRACE.fullmatch(value):
                return {**data, TRACEPARENT: value.decode()}
        return data

    async def begin(self, url: str, data: Mapping[str, Any]) -> Job:
        """Check a body and tokenize its prompts; nothing was sent to the engine then.

        url: one of the compute routes. Raises `ApiError` and `RequestError`; `EngineError` where it is gone.
        """
        return await self._begin[url](data)

    async def answer(self, url: str, data: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer a body as the route does, without a stream: the status and the answer, or the error."""
        job = None
        try:
            if url not in self._begin:
                raise ApiError(404, f"there is no route {short(url)}; there are: {', '.join(self._begin)}")
            job = await self.begin(url, data)
            if job.stream:
                raise ApiError(400, "stream: answers are whole here; leave it out", param="stream")
            job.run.submit()
            return 200, msgspec.to_builtins(job.format.whole(await job.run.finish()))
        except ApiError as error:
            return error.status, msgspec.to_builtins(error.answer)
        except HeadraceError as error:
            told = api_error(error)
            return told.status, msgspec.to_builtins(told.answer)
        finally:
            if job is not None:
                job.run.abort()

    async def _begin_completions(self, data: Mapping[str, Any]) -> Job:
        body, fields = self._read(CompletionBody, self._completion_fields, data)
        prompts = prompts_of(body, self._options.max_prompts)
        asked = self._asked(body, fields, completion_params(body, single(body, fields.sampling)))
        params = asked.params
        self._check_choices(len(prompts), params.n)
        head = self._head("cmpl", body)
        run = await self._prepare(asked, head, prompts)
        front = self._engine.front
        answers = CompletionFormat(
            head,
            body,
            params,
            TokenWriter(front.tokenizer, as_ids=body.return_tokens_as_token_ids),
            _hidden_ids(front, params),
            len(prompts),
            asked_prompt_logprobs="prompt_logprobs" in fields.sampling,
        )
        return Job(head, run, answers, body.stream, self._intervals(body), fields.unknown)

    async def _begin_chat(self, data: Mapping[str, Any]) -> Job:
        body, fields = self._read(ChatBody, self._chat_fields, data)
        if body.chat_template is not None:
            raise ApiError(
                400,
                "chat_template: a template that comes with a request is not trusted; the server may be started with "
                "one (--chat-template)",
                param="chat_template",
            )
        front = self._engine.front
        plan = plan_calls(
            body, has_parser=self._parsers.finds_calls, may_choose=self._options.auto_tool_choice
        )
        if plan.is_forced and not self._chat_fields.takes("structured"):
            raise ApiError(
                400,
                "tool_choice 'required' and a named tool need the plugin 'structured', which is switched off",
                param="tool_choice",
            )
        options = template_options(
            body.add_generation_prompt, body.continue_final_message, template_variables(body)
        )
        tools = None if body.tools is None else data["tools"]
        text = await self._engine.render_chat(template_messages(body.messages), tools=tools, **options)
        if front.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; it takes and gives token ids alone")
        context = ParserContext(front.tokenizer, text, plan.tools)
        take_later_form(fields, plan, *self._parsers.thinking(context))
        asked = self._asked(body, fields, self._chat_params(body, fields))
        params = asked.params
        self._check_choices(1, params.n)
        head = self._head("chatcmpl", body)
        run = await self._prepare(asked, head, [text], is_chat=True)
        role = self._options.response_role
        if not options["add_generation_prompt"]:
            role = str(body.messages[-1]["role"])
        answers = ChatFormat(
            head,
            body,
            params,
            TokenWriter(front.tokenizer, as_ids=body.return_tokens_as_token_ids),
            role=role,
            readers=[self._parsers.reader(context, plan, body) for _ in range(params.n)],
            plan=plan,
            echo=echo_of(body, role),
            counts_reasoning=self._parsers.finds_reasoning,
            asked_prompt_logprobs="prompt_logprobs" in fields.sampling,
        )
        return Job(head, run, answers, body.stream, self._intervals(body), fields.unknown)

    def _chat_params(self, body: ChatBody, fields: Fields) -> SamplingParams:
        defaults = self._engine.front.defaults.apply(SamplingParams())
        limit = defaults.max_tokens if "max_tokens" in defaults.model_fields_set else None
        return chat_params(body, single(body, fields.sampling), limit)

    def _read(self, model: type[B], known: KnownFields, data: Mapping[str, Any]) -> tuple[B, Fields]:
        """Return a body's own fields, checked, and all of them, sorted."""
        fields = known.sort(data)
        body = _check_body(model, fields.own)
        assert isinstance(body, Body)
        variant = self.variant(self.check_model(body.model))
        if variant is not None:
            fields.sampling.update(variant.options)
        if body.stream_options is not None:
            if not body.stream:
                raise ApiError(400, "stream_options needs stream: true", param="stream_options")
            fields.unknown.extend(f"stream_options.{name}" for name in body.stream_options.model_extra or {})
        take_form(body.response_format, fields)
        if self._options.strict:
            known.refuse(fields.unknown)
        return body, fields

    def _check_choices(self, num_prompts: int, n: int) -> None:
        limit = self._options.max_choices
        if num_prompts * n > limit:
            raise ApiError(
                400,
                f"{num_prompts} prompts with n {n} ask for {num_prompts * n} answers, and this server gives {limit} "
                "to a request (max_choices)",
                param="n",
            )

    def _intervals(self, body: Body) -> Intervals:
        return Intervals(body.stream_interval or self._options.stream_interval)

    def _head(self, prefix: str, body: Body) -> Head:
        return Head(
            f"{prefix}-{uuid.uuid4().hex}",
            int(time.time()),
            self.check_model(body.model),
            self._engine.front.facts.fingerprint,
        )

    def _asked(self, body: Body, fields: Fields, params: SamplingParams) -> _Asked:
        if not body.use_beam_search:
            return _Asked(params, None, body.priority)
        beams = beam_params(body, params, fields.sampling.get("n", 1))
        return _Asked(params.model_copy(update={"n": beams.beam_width}), beams, body.priority)

    async def _prepare(
        self, asked: _Asked, head: Head, prompts: Sequence[Any], *, is_chat: bool = False
    ) -> Run | BeamRun:
        """Check and tokenize prompts. Raises `RequestError` naming the first that is wrong."""
        requests: list[Prepared] = []
        searches: list[BeamRequest] = []
        for place, prompt in enumerate(prompts):
            names: dict[str, Any] = {
                "request_id": f"{head.id}-{place}",
                "priority": asked.priority,
                "is_chat": is_chat,
            }
            try:
                if asked.beams is None:
                    requests.append(await self._engine.prepare(prompt, asked.params, **names))
                else:
                    searches.append(await self._engine.prepare_beams(prompt, asked.beams, **names))
            except RequestError as error:
                where = f"prompt[{place}]: " if len(prompts) > 1 else ""
                raise RequestError(f"{where}{error}", param=error.param) from error
            await asyncio.sleep(0)  # many short prompts must not hold up everybody's streams
        return Run(self._engine, requests) if asked.beams is None else BeamRun(self._engine, searches)


def _check_body(model: type[B], fields: Mapping[str, Any]) -> B:
    """Return a body. Raises `ApiError` naming the first field that is wrong."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error) from None


def _hidden_ids(front: FrontHalf, params: SamplingParams) -> frozenset[int]:
    """Return the ids that texts do not show."""
    if front.tokenizer is None or not params.skip_special_tokens:
        return frozenset()
    return front.tokenizer.special_ids | {*front.tokenizer.eos_token_ids, *front.eos_token_ids}
