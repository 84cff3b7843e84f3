"""The loop: what a failing step, a faulty scheduler or a failing listener does, and to whom."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from headrace.core import engine as engine_module
from headrace.core.errors import EngineError, PluginCallError
from headrace.core.interfaces import EngineListener
from headrace.core.interfaces.build import SchedulerBuild
from headrace.core.plan import EngineOutput, StepPlan, StepResult
from headrace.core.request import Request
from headrace.core.scheduler.policies import FCFSPolicy
from headrace.core.scheduler.scheduler import UnifiedScheduler
from headrace.testing.simulation import Simulation


def test_a_failed_step_fails_its_requests_and_no_others() -> None:
    sim = Simulation(raise_at=frozenset({2}), max_num_seqs=2)
    for name in ("a", "b", "c"):
        sim.add(name, [1, 2, 3, ord(name)], max_tokens=6)
    sim.run()
    assert sim.reasons == {"a": "error", "b": "error", "c": "length"}
    assert "step 2 failed: RuntimeError: step 2 was told to fail" in sim.errors["a"]
    assert sim.tokens["c"] == sim.expected("c")


def test_three_failed_steps_in_a_row_stop_the_engine_with_the_cause() -> None:
    sim = Simulation(raise_at=frozenset(range(10)))
    with pytest.raises(EngineError, match="stopped after 3 failed steps: RuntimeError") as caught:
        for i in range(5):
            sim.add(str(i), [1, 2, 3])
            sim.step()
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(EngineError, match="stopped after 3"):
        sim.step()


def test_failures_with_a_success_between_do_not_stop_it() -> None:
    sim = Simulation(raise_at=frozenset({0, 2, 4, 6, 8}), max_num_seqs=1)
    for i in range(6):
        sim.add(str(i), [1, 2, i], max_tokens=1)
        while str(i) not in sim.reasons:
            sim.step()
    assert set(sim.reasons.values()) == {"error", "length"}


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_what_a_failed_step_left_undone_on_workers_harms_no_later_step(max_in_flight: int) -> None:
    sim = Simulation(max_num_seqs=2, max_in_flight=max_in_flight, max_num_batched_tokens=8)
    run, broken = sim.executor._run, []

    def break_off(plan: StepPlan) -> StepResult:
        if plan.new and not broken:
            broken.append(plan.step)
            sim.executor._in_flight.popleft()
            sim.executor._written.popleft()
            raise RuntimeError("broke off before it knew its new requests")
        return run(plan)

    sim.executor._run = break_off  # type: ignore[method-assign]
    for name in ("a", "b", "c", "d"):
        sim.add(name, [ord(name)] * 6, max_tokens=6)
    sim.run()
    assert broken
    failed = {name for name, reason in sim.reasons.items() if reason == "error"}
    assert 1 <= len(failed) <= 2
    for name in sim.requests.keys() - failed:
        assert sim.tokens[name] == sim.expected(name)


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_a_step_broken_off_in_the_middle_costs_no_token(max_in_flight: int) -> None:
    sim = Simulation(
        interrupt_at=frozenset({0, 3, 4, 9}), max_in_flight=max_in_flight, max_num_batched_tokens=8
    )
    for i in range(4):
        sim.add(str(i), [i] * 9, max_tokens=8)
    interrupts = 0
    while sim.engine.has_work:
        try:
            sim.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts >= 2
    sim.check_drained()
    for i in range(4):
        assert sim.tokens[str(i)] == sim.expected(str(i))


class Backwards(FCFSPolicy):
    """Last come, first served; a legal policy."""

    def order(self, request: Request, now: float) -> tuple[Any, ...]:
        return (-request.arrival_time, request.request_id)


class Stranger(FCFSPolicy):
    def victim(self, running: Any, wanting: Request) -> Request | None:
        return Request(wanting.engine_request, max_tokens_total=9)


class Confused(FCFSPolicy):
    def order(self, request: Request, now: float) -> tuple[Any, ...]:
        raise LookupError("which way?")


class Idle(UnifiedScheduler):
    """Never plans anything."""

    def schedule(self) -> StepPlan:
        return StepPlan(step=0)


class Twice(UnifiedScheduler):
    """Plans a request twice."""

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        plan.new += plan.new
        return plan


def test_a_policy_of_ones_own_orders_the_queue() -> None:
    """Source: vllm-project/vllm#51608."""
    sim = Simulation(policy=Backwards(), max_num_seqs=1)
    for name in ("a", "b", "c"):
        sim.add(name, [1, 2, ord(name)])
    sim.run()
    assert [new.request_id for plan in sim.plans for new in plan.new] == ["c", "b", "a"]


def test_a_policy_that_chooses_a_stranger_is_named() -> None:
    sim = Simulation(policy=Stranger(), num_blocks=6)
    sim.add("a", [1] * 8, max_tokens=16)
    sim.add("b", [2] * 8, max_tokens=16)
    with pytest.raises(EngineError, match="scheduling policy Stranger chose the victim"):
        sim.run()


def test_a_policy_that_raises_fails_the_request() -> None:
    sim = Simulation(policy=Confused())
    sim.add("a", [1, 2])
    sim.step()
    assert "scheduling policy Confused failed in order: LookupError: which way?" in sim.errors["a"]


@pytest.mark.parametrize(("scheduler", "words"), [(Idle, "planned nothing"), (Twice, "twice in step 0")])
def test_a_faulty_scheduler_is_reported_within_seconds(
    scheduler: type[UnifiedScheduler], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source: vllm-project/vllm#51608."""
    monkeypatch.setattr(engine_module, "STALL_SECONDS", 0.3)
    sim = Simulation(scheduler=scheduler)
    sim.add("a", [1, 2, 3])
    monkeypatch.setattr(engine_module, "PARKED_POLL_SECONDS", 0.05)
    with pytest.raises(EngineError, match=words):
        for _ in range(100):  # of 0.05 s each, at most
            sim.step()


class Recorder(EngineListener):
    name = "recorder"

    def __init__(self, fail_in: str = "") -> None:
        self.heard: list[str] = []
        self.fail_in = fail_in

    def _hear(self, what: str) -> None:
        self.heard.append(what)
        if what == self.fail_in:
            self.fail_in = ""
            raise ZeroDivisionError("ouch")

    def on_add(self, request: Request) -> None:
        self._hear("add")

    def on_plan(self, plan: StepPlan) -> None:
        self._hear("plan")

    def on_preempt(self, request: Request) -> None:
        self._hear("preempt")

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        self._hear("result")

    def on_finish(self, request: Request) -> None:
        self._hear("finish")


def test_listeners_hear_everything_in_order() -> None:
    recorder = Recorder()
    sim = Simulation(listeners=[recorder], num_blocks=6)
    sim.add("a", [1] * 8, max_tokens=14)
    sim.add("b", [2] * 8, max_tokens=14)
    sim.run()
    assert recorder.heard[:4] == ["add", "add", "plan", "result"]
    assert recorder.heard.count("preempt") == sim.engine.metrics()["num_preemptions"] > 0
    assert recorder.heard.count("finish") == 2


@pytest.mark.parametrize("where", ["plan", "result", "preempt"])
def test_a_failing_listener_fails_the_step_by_name_and_the_engine_goes_on(where: str) -> None:
    sim = Simulation(listeners=[Recorder(where)], num_blocks=6)
    sim.add("a", [1] * 8, max_tokens=14)
    sim.add("b", [2] * 8, max_tokens=14)
    sim.run()
    assert f"engine listener 'recorder' failed in on_{where}: ZeroDivisionError" in " ".join(
        sim.errors.values()
    )
    sim.add("c", [3] * 8)
    sim.run()
    assert sim.tokens["c"] == sim.expected("c")


def test_wake_ends_the_wait_of_a_parked_request_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.core.interfaces import Constraint, Wait

    class Slow(Constraint):
        ready = False

        def limit(self, request: Request, start: int, count: int) -> int | Wait:
            return count if self.ready else Wait("slow")

    # Whoever is not woken waits for this long, and no machine is so slow.
    monkeypatch.setattr(engine_module, "PARKED_POLL_SECONDS", 60.0)
    slow = Slow()
    sim = Simulation(constraints=[slow])
    sim.add("a", [1, 2, 3], max_tokens=2)

    def finish_work() -> None:
        slow.ready = True
        sim.engine.wake()

    timer = threading.Timer(0.1, finish_work)
    started = time.monotonic()
    timer.start()
    sim.run()
    timer.join()
    assert 0.05 < time.monotonic() - started < 50
    assert sim.tokens["a"] == sim.expected("a")


def test_scheduler_build_needs_only_what_has_no_default() -> None:
    sim = Simulation()
    build = SchedulerBuild(
        kv=sim.kv, policy=FCFSPolicy(), max_num_seqs=1, max_num_batched_tokens=8, max_model_len=16
    )
    assert not UnifiedScheduler(build).has_work


# What the log says --------------------------------------------------------------------------------------


def test_a_failed_step_is_logged_with_its_cause_first_and_nobodys_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sim = Simulation(raise_at=frozenset({2}), max_num_seqs=2)
    prompts = {"a": [770001, 770002, 770003], "b": [770004] * 3, "waits": [770005] * 3}
    for name, ids in prompts.items():
        sim.add(name, ids, max_tokens=6)
    sim.run()
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    lines = record.getMessage().splitlines()
    assert lines[0] == "step 2 failed: RuntimeError: step 2 was told to fail"
    assert lines[1].startswith("plan: StepPlan(step=2, ")
    assert lines[2].startswith("state: {")
    for name in prompts:
        assert f"'{name}'" in lines[2]
    assert "'b', [4, +1)" in lines[1]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)  # with its traceback
    assert "77000" not in caplog.text


def test_new_requests_in_a_failed_plan_are_shown_without_their_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sim = Simulation(raise_at=frozenset({0}))
    sim.add("a", [770001] * 9, max_tokens=6)
    sim.run()
    assert "NewRequest('a', tokens=9, [0, +9))" in caplog.text
    assert "77000" not in caplog.text


def test_of_a_long_queue_the_log_shows_the_first(caplog: pytest.LogCaptureFixture) -> None:
    sim = Simulation(raise_at=frozenset({1}), max_num_seqs=2)
    for i in range(200):
        sim.add(f"r{i:03}", [i], max_tokens=4)
    sim.run()
    assert "'r065'" in caplog.text
    assert "'r066'" not in caplog.text
    assert "and 134 more" in caplog.text


def test_a_listener_that_failed_is_logged_with_what_it_raised(caplog: pytest.LogCaptureFixture) -> None:
    sim = Simulation(listeners=[Recorder("result")])
    sim.add("a", [1, 2, 3])
    sim.run()
    (record,) = caplog.records
    assert "engine listener 'recorder' failed in on_result: ZeroDivisionError: ouch" in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], PluginCallError)
    assert isinstance(record.exc_info[1].__cause__, ZeroDivisionError)


class Mistaken(UnifiedScheduler):
    """Fails where nobody expects it."""

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        raise LookupError("lost the books")


def test_whatever_breaks_the_loop_stops_the_engine_and_is_the_cause_of_every_later_call() -> None:
    sim = Simulation(scheduler=Mistaken)
    sim.add("a", [1, 2, 3])
    with pytest.raises(EngineError, match="the engine failed: LookupError: lost the books") as caught:
        sim.step()
    assert isinstance(caught.value.__cause__, LookupError)
    with pytest.raises(EngineError, match="lost the books"):
        sim.step()
