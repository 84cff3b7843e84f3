"""`LLM`: an engine for scripts and notebooks, in your own process or in one of its own."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from headrace.beams import BeamRequest, BeamSearchParams, search_all
from headrace.chat_template import Source, make_chat_template
from headrace.client import EngineClient
from headrace.configuration import Started, start_configuration
from headrace.core.errors import EngineError, RequestError
from headrace.core.sampling_params import SamplingParams
from headrace.embedding import EmbeddingOutput, embedding_outputs, embedding_params
from headrace.front_half import FrontHalf
from headrace.frontend import FrontEnd, Prepared
from headrace.outputs import CompletionDelta, RequestOutput
from headrace.progress import download_progress
from headrace.report import StartupReport

__all__ = ["LLM"]

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """Loads a model and answers.

        llm = LLM("smollm2")
        outputs = llm.chat([{"role": "user", "content": "What is the capital of France?"}])
        print(outputs[0].outputs[0].text)

    Parameters
    ----------
    model: an alias (`headrace models`), a path, or `source:reference`; may stand in the configuration file instead.
    config: path of a YAML file.
    chat_template: replaces the model's own.
    **options: any option by its flat name (`max_num_seqs=8`), a section as a dict, `plugins=[object]`, or a part
        itself (`attention_backend=MyBackend`). `headrace config show` lists them all.

    Raises `ConfigError`, `CheckpointError` or `PluginLoadError` before any compute. Everything it holds is freed when
    the last reference goes, or by `shutdown`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: str | Path | None = None,
        chat_template: Source | None = None,
        **options: Any,
    ) -> None:
        self._start(start_configuration(model, file=config, keywords=options), chat_template)

    @classmethod
    def from_started(cls, started: Started, *, chat_template: Source | None = None) -> LLM:
        """Make one from a configuration that is validated already, as the command line does."""
        llm = cls.__new__(cls)
        llm._start(started, chat_template)
        return llm

    def _start(self, started: Started, chat_template: Source | None) -> None:
        self._client: EngineClient | None = _start_client(started)
        self._finalizer = weakref.finalize(self, self._client.shutdown)
        self._front = FrontEnd(self._client.front)
        self._template = make_chat_template(self._client.front, chat_template)
        if started.config.show_report:
            sys.stderr.write(f"{self._client.report}\n")

    @property
    def client(self) -> EngineClient:
        """The engine. Raises `EngineError` after `shutdown`."""
        if self._client is None:
            raise EngineError("this LLM was shut down")
        return self._client

    @property
    def front(self) -> FrontHalf:
        """Tokenizer, limits and what else requests are made with."""
        return self.client.front

    @property
    def report(self) -> StartupReport:
        """What was started: model, memory, backend, options."""
        return self.client.report

    # Answers -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        lora: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts; text goes to the model as it is.

        prompts: a text, a list of token ids, `{"prompt": …}` or `{"prompt_token_ids": …}`, or a list of those.
        sampling_params: for all, or one a prompt.
        priority: with the policy `priority`: one number a prompt, smaller is more urgent.
        lora: the adapter to answer with, for all or one a prompt; None: the model itself.

        Returns one output a prompt, in their order. Raises `RequestError` (a `ValueError`) before any compute if one
        prompt or parameter is wrong.
        """
        return self._run(_as_list(prompts), sampling_params, priority, use_tqdm, is_chat=False, lora=lora)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template; always a list.

        template_options: `add_generation_prompt`, `continue_final_message`, `tools`, or variables of the template.
        Without parameters an answer may be as long as the context allows.
        """
        texts = [
            self._template.render(conversation, **template_options)
            for conversation in _conversations(messages)
        ]
        return self._run(texts, _chat_params(sampling_params), None, use_tqdm, is_chat=True, lora=lora)

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Look for the likeliest answers to prompts, in every form `generate` takes.

        Returns one output a prompt, in their order, each with up to `params.beam_width` answers, best score first.
        Raises `RequestError` before any compute if one prompt or parameter is wrong.
        """
        client = self.client
        searches = [BeamRequest(self._front, client.front, prompt, params) for prompt in _as_list(prompts)]
        with tqdm(total=len(searches), desc="prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            return search_all(searches, lambda requests: _drive(client, requests, False), bar.update)

    def embed(
        self, prompts: Any, *, pooling: str | None = None, normalize: bool = True, use_tqdm: bool = True
    ) -> list[EmbeddingOutput]:
        """Turn prompts, in every form `generate` takes, into vectors.

        pooling: `mean` of all tokens, `cls` (the first) or `last`; None: what the checkpoint says, else `mean` for
            encoders and `last` for other models.
        normalize: scale each vector to length 1, so that a dot product is a cosine.

        Returns one output a prompt, in their order. Raises `RequestError` before any compute if one prompt is wrong,
        and afterwards if one failed.
        """
        params = embedding_params(pooling, normalize=normalize)
        return embedding_outputs(self._run(_as_list(prompts), params, None, use_tqdm, is_chat=False))

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[CompletionDelta]:
        """Continue one prompt and yield what is new as it comes; closing the iterator ends the request."""
        return self._stream(prompt, sampling_params or SamplingParams(), is_chat=False)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **template_options: Any
    ) -> Iterator[CompletionDelta]:
        """Answer one conversation and yield what is new as it comes; closing the iterator ends the request."""
        text = self._template.render(messages, **template_options)
        return self._stream(text, sampling_params or SamplingParams(max_tokens=None), is_chat=True)

    def _stream(self, prompt: Any, params: SamplingParams, *, is_chat: bool) -> Iterator[CompletionDelta]:
        client = self.client
        request = self._front.prepare(prompt, params, is_chat=is_chat)
        client.submit(request)
        try:
            while client.num_unfinished:
                for update in client.step():
                    yield from update.deltas
        finally:
            client.abort([request.front.request_id])

    def _run(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        use_tqdm: bool,
        *,
        is_chat: bool,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        client = self.client
        params = _one_each(sampling_params, len(prompts), "sampling_params") or [SamplingParams()] * len(
            prompts
        )
        if lora is not None:
            params = _with_adapters(params, [lora] * len(prompts) if isinstance(lora, str) else lora)
        urgency = _one_each(priority, len(prompts), "priority") or [0] * len(prompts)
        prepared: list[Prepared] = []
        for index, prompt in enumerate(prompts):
            try:
                prepared.append(
                    self._front.prepare(prompt, params[index], is_chat=is_chat, priority=urgency[index])
                )
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(f"prompt {index} of {len(prompts)}: {error}", param=error.param) from error
        return _drive(client, prepared, use_tqdm)

    # The rest ----------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Gauges and counters by Prometheus name, without prefix."""
        return self.client.metrics()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False, and nothing changed, while requests hold blocks."""
        return self.client.reset_prefix_cache()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, as `generate` would."""
        params = SamplingParams(max_tokens=1) if self.front.causal else embedding_params()
        return self._front.prepare(text, params).front.prompt_token_ids

    def shutdown(self) -> None:
        """Free model and memory; may be called twice."""
        if self._client is not None:
            self._finalizer()
            self._client = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _drive(client: EngineClient, prepared: list[Prepared], use_tqdm: bool) -> list[RequestOutput]:
    """Run requests to their ends, in the order given; Ctrl-C ends them all and leaves the engine usable."""
    names = [request.front.request_id for request in prepared]
    outputs: dict[str, RequestOutput] = {}
    tokens, begun = 0, time.perf_counter()
    try:
        for request in prepared:
            client.submit(request)
        with tqdm(total=len(prepared), desc="prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while client.num_unfinished:
                for update in client.step():
                    tokens += sum(len(delta.token_ids) for delta in update.deltas)
                    if update.output.finished:
                        outputs[update.output.request_id] = update.output
                        bar.set_postfix_str(
                            f"{tokens / (time.perf_counter() - begun):.1f} tok/s", refresh=False
                        )
                        bar.update()
    finally:
        client.abort(names)
    return [outputs[name] for name in names]


def _as_list(prompts: Any) -> list[Any]:
    """Return the prompts one by one: a text, a mapping or a list of ids is one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise RequestError(
            "prompts must be a text, a list of token ids, a mapping, or a list of those, got "
            f"{type(prompts).__name__}",
            param="prompt",
        )
    if any(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)


def _conversations(messages: Any) -> list[Messages]:
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], (list, tuple)):
        return list(messages)
    return [messages]


def _chat_params(
    params: SamplingParams | Sequence[SamplingParams] | None,
) -> SamplingParams | Sequence[SamplingParams]:
    return SamplingParams(max_tokens=None) if params is None else params


def _one_each(value: Any, count: int, name: str) -> list[Any] | None:
    """Return a list with one item a prompt, or None where nothing was given."""
    if value is None:
        return None
    if isinstance(value, Sequence):
        if len(value) != count:
            raise RequestError(
                f"{name} has {len(value)} entries for {count} prompts; give one for all, or one each"
            )
        return list(value)
    return [value] * count


def _with_adapters(params: list[SamplingParams], names: Sequence[str | None]) -> list[SamplingParams]:
    """Return parameters that name the adapters, one each."""
    adapters = _one_each(names, len(params), "lora") or []
    return [
        each if name is None else each.model_copy(update={"lora": name})
        for each, name in zip(params, adapters, strict=True)
    ]


def _start_client(started: Started) -> EngineClient:
    # Imported where it is wanted: with an engine in this process comes torch.
    if started.config.parallel.engine_process:
        from headrace.process.client import ProcessClient

        return ProcessClient(started)
    from headrace.inprocess import InProcessClient

    with download_progress() as progress:
        return InProcessClient(started, progress)
