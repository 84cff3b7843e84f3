"""One answer on its way out: ids to text, cut at stop strings, with the log-probabilities of what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.errors import EngineError
from headrace.core.interfaces import Tokenizer
from headrace.core.logprobs import LOGPROBS, PROMPT_LOGPROBS
from headrace.core.plan import EngineOutput
from headrace.core.sampling_params import SamplingParams
from headrace.output.detokenizer import IncrementalDetokenizer
from headrace.output.logprobs import TokenTexts, readable
from headrace.output.stop_strings import StopMatcher
from headrace.outputs import CompletionDelta, CompletionOutput, Logprob

__all__ = ["Completion", "FrontRequest"]


@dataclass(frozen=True, kw_only=True)
class FrontRequest:
    """What the output side has to know of a request."""

    request_id: str
    params: SamplingParams
    prompt_token_ids: list[int]
    prompt: str | None = None
    arrival_time: float = 0.0
    """Seconds since the epoch."""
    eos_token_ids: Sequence[int] = ()
    """As in `EngineRequest`: hidden with the special tokens."""

    @property
    def child_ids(self) -> list[str]:
        """What the core calls the request's answers, by index: its own id where there is one answer."""
        if self.params.n == 1:
            return [self.request_id]
        return [f"{self.request_id}-{index}" for index in range(self.params.n)]


class Completion:
    """One answer. `output` grows with each call; each call returns what it added."""

    def __init__(
        self, request: FrontRequest, index: int, tokenizer: Tokenizer | None, texts: TokenTexts | None
    ) -> None:
        params = self._params = request.params
        self.output = CompletionOutput(index)
        if params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self._texts = texts
        self._detokenizer: IncrementalDetokenizer | None = None
        self._matcher: StopMatcher | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                eos_token_ids=request.eos_token_ids,
                prompt_token_ids=request.prompt_token_ids,
            )
            if params.stop:
                self._matcher = StopMatcher(
                    params.stop, include=params.include_stop_str_in_output, min_tokens=params.min_tokens
                )

    def take(self, engine_output: EngineOutput) -> CompletionDelta:
        """Take in one step. A stop string ends the answer, whatever the core said, except that it failed.

        Raises `EngineError` where log-probabilities are missing.
        """
        text, kept = self._push(engine_output)
        logprobs = self._logprobs(engine_output, kept)
        reason, stop_reason = engine_output.finish_reason, engine_output.stop_reason
        if reason is not None and self.stopped is None:
            text += self._flush()
        if self.stopped is not None and reason != "error":
            reason, stop_reason = "stop", self.stopped
        delta = CompletionDelta(
            index=self.output.index,
            text=text,
            token_ids=engine_output.new_token_ids[:kept],
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=engine_output.error,
            error_kind=engine_output.error_kind,
        )
        self._add(delta)
        for key in engine_output.stash:
            if key not in (LOGPROBS, PROMPT_LOGPROBS):  # those are read here
                self.output.stash[key] = engine_output.stash[key]
        return delta

    def end(self, reason: str, error: str | None = None, kind: str = "engine") -> CompletionDelta:
        """End the answer from outside; text that was held is shown."""
        delta = CompletionDelta(
            self.output.index,
            text=self._flush(),
            finish_reason=reason,
            error=error,
            error_kind="" if error is None else kind,
        )
        self._add(delta)
        return delta

    @property
    def stopped(self) -> str | None:
        """The stop string that was found."""
        match = self._matcher.match if self._matcher else None
        return match.stop if match else None

    def _push(self, engine_output: EngineOutput) -> tuple[str, int]:
        """Return the new text and how many of the new tokens are kept."""
        tokens = engine_output.new_token_ids
        if self._detokenizer is None:
            return "", len(tokens)
        # An id of `stop_token_ids` is to text what a stop string is: shown only where that was asked for.
        ended_by_id = isinstance(engine_output.stop_reason, int)
        silent = len(tokens) - 1 if ended_by_id and not self._params.include_stop_str_in_output else None
        pieces = []
        for position, token_id in enumerate(tokens):
            piece = "" if position == silent else self._detokenizer.push(token_id)
            if self._matcher is not None:
                piece = self._matcher.push(piece)
            pieces.append(piece)
            if self.stopped is not None:
                return "".join(pieces), position + 1
        return "".join(pieces), len(tokens)

    def _flush(self) -> str:
        text = self._detokenizer.flush() if self._detokenizer else ""
        return self._matcher.flush(text) if self._matcher else text

    def _logprobs(self, engine_output: EngineOutput, kept: int) -> list[dict[int, Logprob]] | None:
        if self._params.logprobs is None:
            return None
        entries = engine_output.stash.get(LOGPROBS) or []
        if len(entries) < kept:
            raise EngineError(f"{kept} tokens arrived with log-probabilities for {len(entries)} of them")
        return [readable(entry, self._texts) for entry in entries[:kept]]

    def _add(self, delta: CompletionDelta) -> None:
        output = self.output
        output.text += delta.text
        output.token_ids += delta.token_ids
        if delta.logprobs is not None and output.logprobs is not None:
            output.logprobs += delta.logprobs
            sampled = (next(iter(candidates.values())).logprob for candidates in delta.logprobs)
            output.cumulative_logprob = sum(sampled, start=output.cumulative_logprob or 0.0)
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason
        output.error = delta.error
        output.error_kind = delta.error_kind
