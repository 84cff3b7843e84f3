"""Requests that wait for their grammars: parked, woken, failed alone, and in nobody's way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from pydantic import BaseModel

from headrace.core.config import EngineConfig
from headrace.core.errors import RequestError
from headrace.core.interfaces import Grammar, GrammarMatcher, GrammarSpec, Vocabulary
from headrace.core.interfaces.build import CoreContext
from headrace.core.plugin.registry import Registry
from headrace.core.request import EngineRequest
from headrace.core.sampling_params import SamplingParams
from headrace.plugins.structured.cache import GrammarCache, SharedCache
from headrace.plugins.structured.options import STRUCTURED, Structured, StructuredSection
from headrace.plugins.structured.waiting import GrammarWait
from headrace.testing import Simulation


class Words:
    vocab_size = 4
    bos_token_id = None
    eos_token_ids = (3,)
    special_ids = frozenset({3})

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return [0 for _ in text]

    def token_bytes(self, token_id: int) -> bytes:
        return b"abc"[token_id : token_id + 1]


class Compiler:
    """A backend that compiles when it is told to."""

    name = "slow"
    kinds: tuple[str, ...] = ("regex",)

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.compiled: list[GrammarSpec] = []
        self.vocabularies: list[Vocabulary] = []

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> Grammar:
        self.compiled.append(spec)
        self.vocabularies.append(vocabulary)
        assert self.gate.wait(60)
        if spec.text == "bad":
            raise RequestError("structured.regex cannot be served: it is bad", param="structured")
        if spec.text == "broken":
            raise KeyError("broken")
        return Compiled()


class Compiled:
    def matcher(self) -> GrammarMatcher:
        raise NotImplementedError


class Bench:
    """A simulated engine whose requests wait for grammars of a `Compiler`."""

    def __init__(self, **section: Any) -> None:
        self.compiler = Compiler()
        registry = Registry()
        registry.add("grammar", "slow", lambda: self.compiler, plugin="test", override=False)
        sections: dict[str, BaseModel] = {"structured": StructuredSection(**section)}
        config = EngineConfig(model="none", sections=sections)
        context = CoreContext(
            config=config, registry=registry, wake=lambda: None, tokenizer=Words, vocab_size=6
        )
        self.cache = GrammarCache(context)
        self.sim = Simulation(constraints=[GrammarWait(self.cache, self.wake)], max_num_seqs=2)
        self.woken = threading.Event()

    def wake(self) -> None:
        self.woken.set()
        self.sim.engine.wake()

    def add(self, name: str, text: str, kind: Any = "regex") -> None:
        request = EngineRequest(
            request_id=name, prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=4)
        )
        request.stash[STRUCTURED] = wanted(text, kind)
        self.sim.requests[name], self.sim.tokens[name] = request, []
        self.sim.engine.add(request)

    def run(self, until: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline
            self.sim.step()


def wanted(text: str, kind: Any = "regex") -> Structured:
    return Structured(GrammarSpec(kind, text), (3,))


def test_a_request_waits_holds_no_place_and_goes_on_when_its_grammar_is_there() -> None:
    """Source: vllm-project/vllm#53130."""
    bench = Bench()
    for number in range(6):
        bench.add(f"bound{number}", "a+")
    for number in range(3):
        bench.sim.add(f"plain{number}", [4, 5, 6])
    bench.run(lambda: {"plain0", "plain1", "plain2"} <= bench.sim.reasons.keys())
    assert bench.sim.reasons.keys() == {"plain0", "plain1", "plain2"}
    assert bench.sim.scheduler.num_parked == 6
    assert bench.sim.scheduler.metrics()['num_requests_waiting_by_reason{reason="grammar"}'] == 6
    bench.compiler.gate.set()
    bench.run(lambda: not bench.sim.engine.has_work)
    assert set(bench.sim.reasons.values()) == {"length"}
    assert bench.woken.wait(60)  # the loop may have looked by itself before the thread got so far
    assert len(bench.compiler.compiled) == 1


def test_what_cannot_be_compiled_fails_its_request_alone() -> None:
    """Source: vllm-project/vllm#43920."""
    bench = Bench()
    for name in ("good", "bad", "broken", "also good"):
        bench.add(name, name)
    bench.add("other", "a", kind="json")
    bench.compiler.gate.set()
    bench.run(lambda: not bench.sim.engine.has_work)
    assert bench.sim.reasons == {
        "good": "length",
        "bad": "error",
        "broken": "error",
        "also good": "length",
        "other": "error",
    }
    assert bench.sim.errors["bad"] == "structured.regex cannot be served: it is bad"
    assert "KeyError: 'broken'" in bench.sim.errors["broken"]
    assert "grammar backend 'slow' does not know it, only regex" in bench.sim.errors["other"]


def test_a_grammar_that_takes_too_long_fails_its_request() -> None:
    bench = Bench(grammar_compile_timeout=0.05)
    bench.add("slow", "a+")
    bench.sim.add("plain", [4, 5, 6])
    bench.run(lambda: not bench.sim.engine.has_work)
    assert bench.sim.reasons == {"slow": "error", "plain": "length"}
    assert "not compiled within 0.05 s (grammar_compile_timeout)" in bench.sim.errors["slow"]
    bench.compiler.gate.set()


def test_requests_that_leave_while_they_wait_leave_nothing() -> None:
    bench = Bench()
    for number in range(20):
        bench.add(f"gone{number}", f"a{number}")
    bench.sim.step()
    bench.sim.engine.finish([f"gone{number}" for number in range(20)], "abort")
    bench.compiler.gate.set()
    bench.sim.add("plain", [4, 5, 6])
    bench.run(lambda: not bench.sim.engine.has_work)
    assert bench.sim.reasons["plain"] == "length"
    assert bench.sim.scheduler.num_parked == 0


def done(future: Future[Grammar]) -> Grammar:
    return future.result(60)


def test_equal_grammars_are_compiled_once_and_the_oldest_are_forgotten() -> None:
    bench = Bench(grammar_cache_size=2)
    bench.compiler.gate.set()
    first = done(bench.cache.get(wanted("a")))
    assert done(bench.cache.get(wanted("a"))) is first
    for text in ("b", "a", "c"):
        done(bench.cache.get(wanted(text)))
    assert done(bench.cache.get(wanted("a"))) is first
    done(bench.cache.get(wanted("b")))
    assert [spec.text for spec in bench.compiler.compiled] == ["a", "b", "c", "b"]


def test_a_failure_is_not_kept() -> None:
    bench = Bench()
    bench.compiler.gate.set()
    for _ in range(2):
        with pytest.raises(RequestError):
            done(bench.cache.get(wanted("bad")))
    assert len(bench.compiler.compiled) == 2


def test_the_vocabulary_is_the_models_with_padding_and_is_made_once() -> None:
    bench = Bench()
    bench.compiler.gate.set()
    for text in ("a", "b"):
        done(bench.cache.get(wanted(text)))
    first, second = bench.compiler.vocabularies
    assert first is second
    assert list(first.tokens) == [b"a", b"b", b"c", b"", b"", b""]
    assert (first.end_ids, first.special_ids) == ((3,), frozenset({3}))
    assert first.encode("ab") == [0, 0]


def test_without_a_backend_the_request_says_so() -> None:
    config = EngineConfig(model="none", sections={"structured": StructuredSection()})
    context = CoreContext(
        config=config, registry=Registry(), wake=lambda: None, tokenizer=Words, vocab_size=4
    )
    shared = SharedCache()
    assert shared.of(context) is shared.of(context)
    with pytest.raises(ValueError, match="no grammar backend"):
        done(shared.of(context).get(wanted("a")))
