"""What a request may be at most, judged before it is queued."""

from __future__ import annotations

from headrace.core.errors import RequestError
from headrace.core.interfaces.build import SchedulerBuild
from headrace.core.request import EngineRequest, FinishReason, Request

__all__ = ["RequestLimits", "append_tokens"]


class RequestLimits:
    """The longest request by `max_model_len` and by the pool: one that passes can always run alone."""

    def __init__(self, build: SchedulerBuild) -> None:
        self._kv = build.kv
        self._max_model_len = build.max_model_len
        low, high = 0, build.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            fits = build.kv.blocks_needed(middle) <= build.kv.num_blocks
            low, high = (middle, high) if fits else (low, middle - 1)
        self.capacity = low
        """Tokens, prompt and answer together, that an empty pool holds."""

    def check(self, request: EngineRequest) -> int:
        """Return how many tokens prompt and answer may have; raise `RequestError` where there is no room."""
        prompt, limit = len(request.prompt_token_ids), self._max_model_len
        if prompt == 0:
            raise RequestError("the prompt is empty: there is no token to start from", param="prompt")
        answer = 0 if request.params.max_tokens == 0 else 1
        if prompt + answer > limit:
            beside = " beside one answer token" if answer else ""
            raise RequestError(
                f"the prompt has {prompt} tokens, and with max_model_len {limit} at most {limit - answer} fit"
                f"{beside}; shorten it, or start with a larger max_model_len",
                param="prompt",
            )
        if prompt + answer > self.capacity:
            raise RequestError(
                f"the prompt has {prompt} tokens and needs {self._kv.blocks_needed(prompt + answer)} KV blocks; "
                f"there are {self._kv.num_blocks}, enough for {self.capacity} tokens, prompt and answer together; "
                "shorten it, or start with more kv_cache_memory (num_kv_blocks)",
                param="prompt",
            )
        wanted = limit if request.params.max_tokens is None else prompt + request.params.max_tokens
        return min(limit, wanted, self.capacity)


def append_tokens(request: Request, tokens: list[int]) -> FinishReason | None:
    """Append confirmed ids up to the one that ends the request; return the reason if one does."""
    for token in tokens:
        request.token_ids.append(token)
        if token in request.stop_token_ids and request.num_output_tokens >= request.params.min_tokens:
            request.stop_reason = token if token in request.params.stop_token_ids else None
            return "stop"
        if len(request.token_ids) >= request.max_tokens_total:
            return "length"
    return None
