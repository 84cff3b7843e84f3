"""The front half: a request's pooling is settled, and what cannot be pooled is refused."""

from __future__ import annotations

from headrace.core.errors import RequestError
from headrace.core.interfaces import ProcessedInput
from headrace.core.interfaces.build import FrontContext
from headrace.core.sampling_params import SamplingParams
from headrace.plugins.pooling.checkpoint import checkpoint_pooling
from headrace.plugins.pooling.options import POOLING, Pooling, PoolingOption, PoolingType

__all__ = ["PoolingInput"]


class PoolingInput:
    """Notes on requests that ask for it how to pool; keeps requests for text away from encoders.

    Raises `CheckpointError` where the model folder says how to pool in a way that is not supported.
    """

    name = "pooling"

    def __init__(self, context: FrontContext) -> None:
        self._causal = context.causal
        stated = checkpoint_pooling(context.model_path) if context.model_path is not None else None
        self._default: PoolingType = stated or ("last" if context.causal else "mean")

    def process(self, item: ProcessedInput) -> None:
        """Fill the stash. Raises `RequestError` where pooling and generating are mixed up."""
        given = item.params.options.get("pooling")
        if given is None:
            self._check_plain(item.params)
            return
        self._check_pooled(item.params)
        option = PoolingOption.model_validate(given)
        pooling = Pooling(option.type or self._default, option.normalize)
        item.stash[POOLING] = pooling
        if pooling.type != "last":
            # Tokens found in the prefix cache have no hidden states; the last token is always computed.
            item.reads_prefix_cache = False

    def _check_plain(self, params: SamplingParams) -> None:
        if not self._causal and params.max_tokens != 0:
            raise RequestError(
                "this model is an encoder: it cannot generate text; use embed (max_tokens=0 with the option pooling)",
                param="max_tokens",
            )
        self._check_scores(params)

    def _check_pooled(self, params: SamplingParams) -> None:
        if params.max_tokens != 0:
            raise RequestError(
                f"pooling needs max_tokens=0, got {params.max_tokens}: embedding or text, not both",
                param="max_tokens",
            )
        if params.n != 1:
            raise RequestError(
                f"pooling gives one embedding a prompt: n must be 1, got {params.n}", param="n"
            )
        self._check_scores(params)

    def _check_scores(self, params: SamplingParams) -> None:
        if not self._causal and params.prompt_logprobs is not None:
            raise RequestError(
                "this model is an encoder: it has no prompt_logprobs, which must be None, got "
                f"{params.prompt_logprobs}",
                param="prompt_logprobs",
            )
