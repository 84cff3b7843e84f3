"""The front half of a request's way: a prompt and parameters become engine requests, with every check done."""

from __future__ import annotations

import itertools
import secrets
import time
from dataclasses import dataclass
from typing import Any

from headrace.configuration import request_options
from headrace.core.errors import HeadraceError, PluginCallError, RequestError
from headrace.core.interfaces import InputProcessor, ProcessedInput
from headrace.core.request import EngineRequest
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.front_half import FrontHalf
from headrace.output.completion import FrontRequest

__all__ = ["FrontEnd", "Prepared"]


@dataclass(frozen=True)
class Prepared:
    """A request that passed every check."""

    front: FrontRequest
    engine: list[EngineRequest]
    """One an answer."""


class FrontEnd:
    """Prepares requests for one engine. Thread-safe as far as its input processors are.

    prefix: begins the names of requests that bring none; fronts of one engine must differ in it.
    """

    def __init__(self, half: FrontHalf, *, prefix: str = "request") -> None:
        self._half = half
        self._prefix = prefix
        self._eos = list(half.eos_token_ids)
        self._ids = itertools.count()

    def prepare(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        is_chat: bool = False,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Prepared:
        """Check and tokenize. Raises `RequestError`; nothing was sent then."""
        params = self._half.defaults.apply(params)
        self._check_params(params)
        if priority and self._half.config.scheduler.policy == "fcfs":
            raise RequestError(
                f"priority {priority} has no effect under the policy 'fcfs'; start with "
                "scheduling_policy='priority'",
                param="priority",
            )
        item = ProcessedInput(prompt=prompt, params=params, stash=Stash(), is_chat=is_chat)
        for processor in self._half.input_processors:
            _process(processor, item)
        ids = item.token_ids
        if not ids:
            raise RequestError("no input processor turned the prompt into tokens", param="prompt")
        limit = self._half.max_model_len
        answer = 0 if item.params.max_tokens == 0 else 1
        if len(ids) + answer > limit:
            beside = " beside one answer token" if answer else ""
            raise RequestError(
                f"the prompt has {len(ids)} tokens, and with max_model_len {limit} at most {limit - answer} fit"
                f"{beside}; shorten it, or start with a larger max_model_len",
                param="prompt",
            )
        name = request_id if request_id is not None else f"{self._prefix}-{next(self._ids)}"
        front = FrontRequest(
            request_id=name,
            params=item.params,
            prompt_token_ids=ids,
            prompt=item.text,
            arrival_time=time.time(),
            eos_token_ids=tuple(self._eos),
        )
        return Prepared(front, self._answers(front, item, priority))

    def _answers(self, front: FrontRequest, item: ProcessedInput, priority: int) -> list[EngineRequest]:
        """One engine request an answer: child i draws with seed + i; an unseeded request gets its seed here."""
        params = front.params
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        return [
            EngineRequest(
                request_id=child,
                prompt_token_ids=front.prompt_token_ids,
                params=params.model_copy(update={"n": 1, "seed": _int64(seed + index)}),
                eos_token_ids=self._eos,
                arrival_time=front.arrival_time,
                priority=priority,
                block_keys=item.block_keys,
                reads_prefix_cache=item.reads_prefix_cache and params.prompt_logprobs is None,
                stash=item.stash,
            )
            for index, child in enumerate(front.child_ids)
        ]

    def _check_params(self, params: SamplingParams) -> None:
        request_options(self._half.registry, params)
        most, vocab = self._half.config.max_logprobs, self._half.vocab_size
        for field in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, field)
            count = vocab if asked == -1 else asked
            if asked is not None and most != -1 and count > most:
                raise RequestError(
                    f"{field} {asked} asks for {count} candidates a token, at most {most} are allowed; lower it, or "
                    "start with a larger max_logprobs",
                    param=field,
                )
        for field in ("stop_token_ids", "logprob_token_ids"):
            for token in getattr(params, field) or ():
                if not 0 <= token < vocab:
                    raise RequestError(
                        f"{field}: {token} is not in the model's vocabulary; ids are from 0 to {vocab - 1}",
                        param=field,
                    )


def _process(processor: InputProcessor, item: ProcessedInput) -> None:
    try:
        processor.process(item)
    except HeadraceError:
        raise
    except Exception as error:  # isolation point: a plugin's call for one request
        raise PluginCallError(
            f"input processor {processor.name!r} failed: {type(error).__name__}: {error}",
            plugin=processor.name,
        ) from error


def _int64(value: int) -> int:
    """Wrap around as 64 bits do."""
    return (value + 2**63) % 2**64 - 2**63
