"""Admission: who is refused, who is ended and when, and that the rest go on as if nothing had been."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.core.config import EngineConfig, SchedulerSection
from headrace.core.errors import OverloadedError, RequestError
from headrace.core.interfaces import Constraint, Wait
from headrace.core.interfaces.build import CoreContext
from headrace.core.plan import StepPlan
from headrace.core.plugin.registry import Registry
from headrace.core.request import EngineRequest, Request
from headrace.core.scheduler.policies import FCFSPolicy
from headrace.outputs import RequestOutput
from headrace.plugins.admission import Admission, AdmissionSection
from headrace.testing.simulation import Simulation


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Gate(Constraint):
    """Parks requests whose names begin with `parked`, as a grammar that is being compiled would."""

    name = "gate"

    def limit(self, request: Request, start: int, count: int) -> int | Wait:
        return Wait("gate") if request.request_id.startswith("parked") else count


class Engine:
    """A simulation with admission in it; the wall clock and the monotonic one are one."""

    def __init__(self, *, max_num_seqs: int = 2, others: tuple[Constraint, ...] = (), **section: Any) -> None:
        self.clock = Clock()
        self.ended: list[tuple[str, str]] = []
        config = EngineConfig(
            model="none",
            scheduler=SchedulerSection(max_num_seqs=max_num_seqs),
            sections={"admission": AdmissionSection(**section)},
        )
        context = CoreContext(config, Registry(), threading.Event().set, finish=self._finish)
        self.admission = Admission(context, clock=self.clock, wall_clock=self.clock)
        self.sim = Simulation(
            max_num_seqs=max_num_seqs, constraints=[self.admission, *others], num_blocks=200
        )

    def _finish(self, names: Any, reason: str, error: Any) -> None:
        self.ended += [(name, reason) for name in names]
        self.sim.engine.finish(names, reason, error)

    def add(self, *names: str, max_tokens: int = 4, age: float = 0.0, **options: Any) -> None:
        for name in names:
            request = EngineRequest(
                request_id=name,
                prompt_token_ids=[len(self.sim.requests), 2, 3],
                params=SamplingParams(max_tokens=max_tokens, **options),
                arrival_time=self.clock.now - age,
            )
            self.sim.requests[name] = request
            self.sim.tokens[name] = []
            self.sim.engine.add(request)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.sim.step()

    @property
    def refused(self) -> set[str]:
        return {name for name, text in self.sim.errors.items() if "requests wait already" in text}

    def refusals(self) -> tuple[float, float]:
        told = self.sim.engine.metrics()
        return (
            told['admission_rejections{reason="queue_full"}'],
            told['admission_rejections{reason="queue_timeout"}'],
        )


# The queue's length -------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_those_accepted_finish() -> None:
    engine = Engine(max_num_queued_requests=3)
    engine.add("a", "b")
    engine.step()
    engine.add("c", "d", "e", "f", "g")
    engine.step()
    assert engine.refused == {"f", "g"}
    assert engine.sim.errors["f"] == (
        "3 requests wait already, and max_num_queued_requests is 3; try again later, or start with a larger "
        "max_num_queued_requests"
    )
    assert engine.refusals() == (2, 0)
    engine.sim.run()
    for name in "abcde":
        assert engine.sim.tokens[name] == engine.sim.expected(name)


def test_requests_that_come_together_may_have_the_free_places_first() -> None:
    engine = Engine(max_num_seqs=4, max_num_queued_requests=2)
    engine.add(*"abcdefgh")
    engine.step()
    assert engine.refused == {"g", "h"}
    engine.add("i")  # two have waited for a place that was not there
    engine.step()
    assert engine.refused == {"g", "h", "i"}
    engine.sim.run()
    engine.add(*"jklmnopq")
    engine.step()
    assert engine.refused == {"g", "h", "i", "p", "q"}


def test_free_places_do_not_count_while_others_wait_for_something_else() -> None:
    engine = Engine(max_num_seqs=8, max_num_queued_requests=2, others=(Gate(),))
    engine.add("parked1", "parked2")
    engine.step()
    engine.add("late")
    engine.step()
    assert engine.refused == {"late"}


def test_room_comes_back_however_a_waiting_request_goes() -> None:
    engine = Engine(max_num_seqs=1, max_num_queued_requests=2)
    engine.add("runs", max_tokens=60)
    engine.step()
    for round_number in range(5):
        names = [f"{round_number}{letter}" for letter in "abc"]
        engine.add(*names)
        engine.step()
        assert engine.refused == {names[2]}
        engine.sim.abort(*names[:2])
        engine.step()
        engine.sim.errors.clear()
    engine.sim.run()
    assert engine.refusals() == (5, 0)


def test_a_preempted_request_does_not_wait_in_the_queue() -> None:
    clock = Clock()
    config = EngineConfig(model="none", sections={"admission": AdmissionSection(max_num_queued_requests=1)})
    admission = Admission(CoreContext(config, Registry(), threading.Event().set), clock=clock)
    sim = Simulation(num_blocks=6, prefix_caching=False, constraints=[admission])
    sim.add("a", range(6), max_tokens=16)
    sim.add("b", range(50, 56), max_tokens=16)
    while not sim.engine.metrics()["num_preemptions"]:
        sim.step()
    assert sim.engine.metrics()["num_requests_waiting"] == 1
    sim.add("c", [1, 2, 3])
    sim.run()
    assert not sim.errors


class Refuses(Constraint):
    name = "refuses"

    def on_add(self, request: Request) -> None:
        if request.request_id.startswith("bad"):
            raise RequestError("not this one")


class Confused(FCFSPolicy):
    def order(self, request: Request, now: float) -> tuple[Any, ...]:
        if request.request_id.startswith("bad"):
            raise LookupError("which way?")
        return super().order(request, now)


def test_what_another_part_refuses_takes_no_room() -> None:
    for options in ({"others": (Refuses(),)}, {}):
        engine = Engine(max_num_seqs=1, max_num_queued_requests=2, queue_timeout=5, **options)
        if not options:
            engine.sim.scheduler._roster.queue._policy = Confused()
        engine.add(*(f"bad{i}" for i in range(9)), timeout=3)
        engine.step()
        assert len(engine.sim.errors) == 9
        assert not engine.refused
        engine.clock.now += 10
        engine.add("a", "b", "c")
        engine.step()
        engine.sim.run()
        assert not engine.refused
        assert not engine.ended


# The queue's time ---------------------------------------------------------------------------------------


def test_who_waits_too_long_is_ended_and_who_runs_is_not() -> None:
    engine = Engine(max_num_seqs=1, queue_timeout=5)
    engine.add("runs", max_tokens=30)
    engine.step()
    engine.add("waits")
    engine.step()
    engine.clock.now += 4.9
    engine.step(2)
    assert not engine.ended
    engine.add("later")
    engine.clock.now += 0.2
    engine.step(2)
    assert engine.ended == [("waits", "error")]
    assert engine.sim.errors["waits"] == (
        "the request found no place within the 5 seconds of queue_timeout; try again later, or start with a larger "
        "queue_timeout"
    )
    assert engine.refusals() == (0, 1)
    engine.sim.abort("runs")
    engine.step(2)
    engine.clock.now += 100
    engine.sim.run()
    assert engine.sim.reasons == {"waits": "error", "runs": "abort", "later": "length"}


def test_a_request_that_was_preempted_had_its_place() -> None:
    engine = Engine(queue_timeout=5)
    engine.add("a", max_tokens=20)
    engine.step(3)
    roster = engine.sim.scheduler._roster
    roster.restart(next(iter(roster)))
    engine.sim.scheduler.pause()
    engine.clock.now += 10
    engine.step()
    engine.sim.scheduler.resume()
    engine.sim.run()
    assert engine.sim.reasons == {"a": "length"}


def test_parked_requests_are_ended_while_nothing_runs() -> None:
    """In real time: the loop looks by itself."""
    admission: list[Admission] = []

    def finish(names: Any, reason: str, error: Any) -> None:
        sim.engine.finish(names, reason, error)

    config = EngineConfig(model="none", sections={"admission": AdmissionSection(queue_timeout=0.2)})
    admission.append(Admission(CoreContext(config, Registry(), threading.Event().set, finish=finish)))
    sim = Simulation(constraints=[*admission, Gate()])
    sim.add("parked", [1, 2, 3])
    begun = time.monotonic()
    steps = sim.run()
    assert 0.15 < time.monotonic() - begun < 1
    assert steps < 20  # it slept in between
    assert sim.reasons == {"parked": "error"}


# Deadlines ----------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_request_with_what_it_has() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("runs", max_tokens=50, timeout=10, age=4)
    engine.add("waits", timeout=3)
    engine.add("free", max_tokens=8)
    engine.step(4)
    engine.clock.now += 3
    engine.step(2)
    assert engine.ended == [("waits", "timeout")]
    engine.clock.now += 3
    engine.step(2)
    assert engine.ended == [("waits", "timeout"), ("runs", "timeout")]
    engine.sim.run()
    assert engine.sim.reasons == {"waits": "timeout", "runs": "timeout", "free": "length"}
    assert not engine.sim.errors
    assert 4 <= len(engine.sim.tokens["runs"]) < 10
    assert engine.sim.tokens["runs"] == engine.sim.expected("runs")[: len(engine.sim.tokens["runs"])]
    assert engine.refusals() == (0, 0)


def test_a_deadline_that_has_passed_before_the_request_came() -> None:
    engine = Engine()
    engine.add("a", timeout=1, age=2)
    engine.sim.run()
    assert engine.sim.reasons == {"a": "timeout"}


def test_a_name_used_again_is_not_ended_by_the_deadline_of_the_one_before() -> None:
    engine = Engine(queue_timeout=50)
    engine.add("a", timeout=5)
    engine.sim.run()
    del engine.sim.reasons["a"]
    engine.clock.now += 4
    engine.add("a", max_tokens=20, timeout=9)
    engine.step(3)
    engine.clock.now += 2
    engine.step(2)
    assert not engine.ended
    engine.clock.now += 8
    engine.step(2)
    assert engine.ended == [("a", "timeout")]


def test_deadlines_of_requests_that_ended_are_swept() -> None:
    engine = Engine(queue_timeout=1e6)
    for i in range(1000):
        engine.add(str(i), max_tokens=1, timeout=1e6)
        engine.step(3)
    assert len(engine.admission._deadlines) < 100
    assert not engine.admission._open
    assert not engine.admission._waiting


def test_planning_costs_nothing_while_nothing_is_due() -> None:
    engine = Engine(queue_timeout=1e6)
    engine.add(*(str(i) for i in range(500)), timeout=1e6)
    engine.step()
    looked: list[int] = []
    holds = engine.admission._holds
    engine.admission._holds = lambda due: looked.append(1) or holds(due)  # type: ignore[func-returns-value,method-assign]
    for step in range(100):
        engine.admission.begin(StepPlan(step=step))
    assert not looked


# Together -----------------------------------------------------------------------------------------------


def test_parked_requests_keep_no_place_from_others() -> None:
    """Source: vllm-project/vllm#53130, with a constraint in the place of the grammar."""
    engine = Engine(max_num_seqs=4, max_num_queued_requests=100, queue_timeout=60, others=(Gate(),))
    parked = [f"parked{i}" for i in range(60)]
    engine.add(*parked)
    engine.step(3)
    engine.sim.abort(*parked[:30])
    plain = [f"plain{i}" for i in range(10)]
    engine.add(*plain)
    for _ in range(100):
        engine.step()
        if all(name in engine.sim.reasons for name in plain):
            break
    assert {engine.sim.reasons.get(name) for name in plain} == {"length"}
    assert engine.sim.engine.metrics()['num_requests_waiting_by_reason{reason="gate"}'] == 30
    engine.clock.now += 61
    engine.sim.run()
    assert {engine.sim.reasons[name] for name in parked[30:]} == {"error"}
    assert engine.refusals() == (0, 30)


# In an engine -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Callable[..., Path]) -> str:
    file = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return str(tiny_gguf(file, {"llama.context_length": 8192}))


LONG: dict[str, Any] = {"max_tokens": 8000, "ignore_eos": True}


@pytest.mark.parametrize("engine_process", [False, True])
def test_a_deadline_reaches_the_engine_in_either_place(tiny: str, engine_process: bool) -> None:
    with LLM(tiny, engine_process=engine_process, show_report=False) as llm:
        begun = time.monotonic()
        output, other = llm.generate(
            [[1, 2, 3], [4, 5, 6]],
            [SamplingParams(timeout=0.5, n=2, **LONG), SamplingParams(max_tokens=9, ignore_eos=True)],
            use_tqdm=False,
        )
        assert time.monotonic() - begun < 5
        assert [answer.finish_reason for answer in output.outputs] == ["timeout", "timeout"]
        assert all(0 < len(answer.token_ids) < 8000 for answer in output.outputs)
        assert output.error is None
        assert other.outputs[0].finish_reason == "length"
        assert llm.metrics()['request_success{finished_reason="timeout"}'] == 2


@pytest.mark.parametrize("value", [0, -1, "5", True, float("nan"), [1]])
def test_a_deadline_must_be_a_time(tiny: str, value: Any) -> None:
    with LLM(tiny, max_model_len=64, show_report=False) as llm, pytest.raises(RequestError, match="timeout"):
        llm.generate([[1]], SamplingParams(timeout=value), use_tqdm=False)


def test_a_server_under_load_refuses_and_serves_those_it_took(tiny: str) -> None:
    async def load() -> tuple[list[RequestOutput], dict[str, float]]:
        async with await AsyncLLM.start(
            tiny, engine_process=False, max_num_seqs=2, max_num_queued_requests=4, queue_timeout=0.5
        ) as llm:

            async def ask(i: int, **params: Any) -> RequestOutput:
                async for output in llm.generate([i, 2, 3], SamplingParams(ignore_eos=True, **params)):
                    last = output
                return last

            busy = [asyncio.create_task(ask(i, max_tokens=8000, timeout=1.5)) for i in range(2)]
            while (await llm.metrics())["num_requests_running"] < 2:
                await asyncio.sleep(0.01)
            outputs = await asyncio.gather(*(ask(i, max_tokens=5) for i in range(10, 17)))
            await asyncio.gather(*busy)
            outputs.append(await ask(50, max_tokens=5))
            return outputs, dict(await llm.metrics())

    outputs, told = asyncio.run(load())
    *first, last = outputs
    assert {output.outputs[0].finish_reason for output in first} == {"error"}
    assert {output.outputs[0].error_kind for output in first} == {OverloadedError.kind}
    full = [output for output in first if "max_num_queued_requests is 4" in (output.error or "")]
    assert len(full) == told['admission_rejections{reason="queue_full"}'] == 3
    assert told['admission_rejections{reason="queue_timeout"}'] == 4
    assert last.outputs[0].finish_reason == "length"
    assert told["num_requests_running"] == told["num_requests_waiting"] == told["kv_cache_usage_perc"] == 0
