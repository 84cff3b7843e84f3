"""Compiled grammars: made on threads, once for equal descriptions, kept for requests to come."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from headrace.core.errors import ConfigError, PluginCallError, RequestError
from headrace.core.interfaces import Grammar, GrammarBackend, Vocabulary
from headrace.core.interfaces.build import CoreContext, WorkerContext
from headrace.plugins.structured.options import Structured, StructuredSection

__all__ = ["GrammarCache", "SharedCache", "backend_failed"]

COMPILE_THREADS = 2
"""A grammar that takes its time must not keep all others waiting."""


class GrammarCache:
    """Compiles and keeps grammars of one engine in one process. Thread-safe."""

    def __init__(self, context: CoreContext | WorkerContext) -> None:
        self._context = context
        self._section = context.config.section("structured", StructuredSection)
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, "headrace-grammar")
        self._lock = threading.Lock()
        self._futures: OrderedDict[Structured, Future[Grammar]] = OrderedDict()
        self._making = threading.Lock()
        self._backend: GrammarBackend | None = None
        self._vocabularies: dict[tuple[int, ...], Vocabulary] = {}

    @property
    def compile_timeout(self) -> float:
        """Seconds a request waits for its grammar."""
        return self._section.grammar_compile_timeout

    def get(self, wanted: Structured) -> Future[Grammar]:
        """Return the grammar, compiled or being compiled; the future raises what the backend raises."""
        wanted = msgspec.structs.replace(
            wanted, after_ids=(), opening_id=None
        )  # where it begins makes no other grammar
        with self._lock:
            future = self._futures.get(wanted)
            if future is None or (future.done() and future.exception() is not None):
                future = self._futures[wanted] = self._pool.submit(self._compile, wanted)
            self._futures.move_to_end(wanted)
            while len(self._futures) > self._section.grammar_cache_size:
                self._futures.popitem(last=False)
            return future

    def _compile(self, wanted: Structured) -> Grammar:
        with self._making:  # of requests that come together, the first makes what all need
            backend = self._backend = self._backend or self._find_backend()
            vocabulary = self._vocabularies.get(wanted.end_ids)
            if vocabulary is None:
                vocabulary = self._vocabularies[wanted.end_ids] = self._vocabulary(wanted.end_ids)
        kind = wanted.spec.kind
        if kind not in backend.kinds:
            raise RequestError(
                f"structured.{kind}: grammar backend {backend.name!r} does not know it, only "
                f"{', '.join(backend.kinds)}; another one may be chosen with grammar_backend",
                param="structured",
            )
        return backend.compile(wanted.spec, vocabulary)

    def _find_backend(self) -> GrammarBackend:
        registry, name = self._context.registry, self._section.grammar_backend
        names = registry.names("grammar")
        if not names:
            raise ConfigError(
                "no grammar backend is installed or all are switched off", option="grammar_backend"
            )
        backend: GrammarBackend = registry.get(
            "grammar", name or names[0], option="grammar_backend"
        ).factory()
        return backend

    def _vocabulary(self, end_ids: tuple[int, ...]) -> Vocabulary:
        tokenizer = self._context.tokenizer()
        if tokenizer is None:
            raise RequestError("structured: this model has no tokenizer", param="structured")
        known = min(tokenizer.vocab_size, self._context.vocab_size)
        padding = [b""] * (self._context.vocab_size - known)

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False, parse_special=False)

        return Vocabulary(
            tokens=[*map(tokenizer.token_bytes, range(known)), *padding],
            special_ids=tokenizer.special_ids,
            end_ids=end_ids or tokenizer.eos_token_ids,
            encode=encode,
        )


class SharedCache:
    """The cache of this process: core half and worker half use one where they live together.

    Where they do not, each process compiles for itself, from the description in the request's stash.
    """

    def __init__(self) -> None:
        self._cache: GrammarCache | None = None

    def of(self, context: CoreContext | WorkerContext) -> GrammarCache:
        """Return it; the first who asks makes it. Called while an engine is put together, on one thread."""
        self._cache = self._cache or GrammarCache(context)
        return self._cache


def backend_failed(error: BaseException) -> PluginCallError:
    """Return what a request is told of an error that is no fault of its own."""
    return PluginCallError(
        f"the grammar backend failed: {type(error).__name__}: {error}", plugin="structured"
    )
