"""Engine metrics: what is counted, when, and that no counter ever goes back, on simulated memory."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from headrace.core.config import EngineConfig
from headrace.core.interfaces.build import CoreContext
from headrace.core.metrics import Histogram, Metric, series_name
from headrace.core.plan import StepPlan, StepResult
from headrace.core.plugin.registry import Registrar, Registry
from headrace.core.request import EngineRequest
from headrace.core.sampling_params import SamplingParams
from headrace.plugins import engine_metrics as plugin
from headrace.plugins.engine_metrics.listener import EngineMetrics
from headrace.testing.fakes import FakeProposer
from headrace.testing.simulation import Simulation


def context() -> CoreContext:
    return CoreContext(EngineConfig(model="none"), Registry(), threading.Event().set)


class Clock:
    """Seconds since the epoch, a day ahead of the scheduler's own clock; every reading is one second later."""

    def __init__(self) -> None:
        self.now = time.time() + 86_400

    def __call__(self) -> float:
        self.now += 1
        return self.now


def simulate(**options: Any) -> Simulation:
    return Simulation(listeners=[EngineMetrics(context())], **options)


def counters(told: dict[str, float]) -> dict[str, float]:
    gauges = ("num_requests", "kv_", "iteration_requests_max")
    return {name: value for name, value in told.items() if not name.startswith(gauges)}


MANNERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"proposer": FakeProposer(3)},
    "preempted": {"num_blocks": 12, "prefix_caching": False},
    "overlapping": {"max_in_flight": 3, "runs_ahead": True},
    "lossy": {"lose": lambda name, step: step % 5 == 4},
    "failing": {"raise_at": frozenset({3, 9})},
    "chunked": {"max_num_batched_tokens": 5},
}


@pytest.mark.parametrize("manner", MANNERS)
def test_tokens_are_counted_as_they_are_told_and_nothing_goes_back(manner: str) -> None:
    sim = simulate(**{"num_blocks": 200} | MANNERS[manner])
    for i in range(8):
        sim.add(str(i), [*range(11), 20 + i], max_tokens=3 + 2 * i)
    before: dict[str, float] = {}
    while sim.engine.has_work:
        sim.step()
        if sim.num_steps == 6:
            sim.abort("5", "6")
        told = dict(sim.engine.metrics())
        assert told["generation_tokens"] == sum(map(len, sim.tokens.values()))
        assert told["prompt_tokens"] <= 8 * 12
        now = counters(told)
        assert not [name for name, value in before.items() if now[name] < value]
        before = now
    assert sum(v for name, v in told.items() if name.startswith("request_success")) == 8
    begun = [name for name, tokens in sim.tokens.items() if tokens]
    assert begun
    assert told["prompt_tokens"] >= 12 * len(begun)  # more, where one was aborted within its prompt
    assert told["num_requests_running"] == told["num_requests_waiting"] == told["kv_cache_usage_perc"] == 0


def test_a_long_prompt_is_counted_as_it_is_computed_and_what_was_cached_once() -> None:
    sim = simulate(max_num_batched_tokens=10, num_blocks=100)
    sim.add("first", range(35), max_tokens=1)
    seen = []
    while sim.engine.has_work:
        sim.step()
        seen.append(sim.engine.metrics()["prompt_tokens"])
    assert seen[:4] == [10, 20, 30, 35]
    sim.add("again", range(35), max_tokens=1)
    sim.run()
    told = sim.engine.metrics()
    assert told["prompt_tokens"] == 70
    assert told["prompt_tokens_cached"] == told["prefix_cache_hits"] == 32
    assert told["request_prefill_kv_computed_tokens_sum"] == 35 + 3
    assert told["request_prompt_tokens_sum"] == 70


def test_names_are_there_from_the_start_and_every_one_is_described() -> None:
    registry = Registry()
    plugin.headrace_register(Registrar(registry, plugin.name), None)
    described: dict[str, Metric] = {entry.name: entry.factory() for entry in registry.entries("metric")}
    assert all(metric.help.endswith(".") for metric in described.values())
    told = EngineMetrics(context()).metrics()
    for name, metric in described.items():
        ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        for end in ends:
            assert [series for series in told if series.partition("{")[0] == name + end], name + end
    bases = {series.partition("{")[0] for series in told}
    ends = {name + end for name in described for end in ("", "_bucket", "_sum", "_count")}
    assert bases <= ends
    for reason in ("stop", "length", "abort", "error", "timeout"):
        assert told[f'request_success{{finished_reason="{reason}"}}'] == 0


def test_a_reason_of_a_plugins_own_is_counted_whatever_it_is_called() -> None:
    sim = simulate()
    sim.add("a", [1, 2, 3], max_tokens=50)
    sim.step()
    sim.engine.finish(["a"], 'too "sour"')
    sim.run()
    assert sim.engine.metrics()['request_success{finished_reason="too \\"sour\\""}'] == 1


def request_of(name: str, arrival: float, **params: Any) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt_token_ids=[1, 2, 3], params=SamplingParams(**params), arrival_time=arrival
    )


def test_times_of_a_request_add_up_and_gaps_between_tokens_are_seen() -> None:
    clock = Clock()
    metrics = EngineMetrics(context(), clock=clock)
    sim = Simulation(listeners=[metrics])
    first = clock.now + 1
    arrival = time.time() - 10
    sim.engine.add(request_of("a", arrival, max_tokens=5))
    sim.tokens["a"] = []
    while sim.engine.has_work:
        sim.step()
    told = metrics.metrics()
    assert told["time_to_first_token_seconds_count"] == 1
    assert told["time_to_first_token_seconds_sum"] == pytest.approx(first - arrival)
    assert told["inter_token_latency_seconds_count"] == 4
    assert told["inter_token_latency_seconds_sum"] == pytest.approx(4)  # one reading a step
    assert told["request_time_per_output_token_seconds_sum"] == pytest.approx(1)
    names = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")
    assert sum(told[f"{name}_sum"] for name in names) == pytest.approx(
        told["e2e_request_latency_seconds_sum"]
    )
    assert told["request_inference_time_seconds_sum"] == pytest.approx(
        told["request_prefill_time_seconds_sum"] + told["request_decode_time_seconds_sum"]
    )
    assert {told[f"{name}_count"] for name in names} == {1}


def test_a_request_that_never_ran_is_observed_and_spent_all_its_life_in_the_queue() -> None:
    metrics = EngineMetrics(context())
    sim = Simulation(listeners=[metrics], max_num_seqs=1)
    for name in ("runs", "waits"):
        sim.engine.add(request_of(name, time.time() - 7, max_tokens=4))
        sim.tokens[name] = []
    sim.step()
    sim.abort("waits")
    sim.step()
    told = metrics.metrics()
    assert told['request_success{finished_reason="abort"}'] == 1
    assert told["request_queue_time_seconds_sum"] == pytest.approx(
        told["e2e_request_latency_seconds_sum"], abs=0.5
    )
    assert told["request_queue_time_seconds_sum"] > 7
    assert told["time_to_first_token_seconds_count"] == 1  # of the one that runs
    assert told["request_prefill_kv_computed_tokens_sum"] == 0


def test_several_tokens_a_step_share_the_time_since_the_last() -> None:
    clock = Clock()
    metrics = EngineMetrics(context(), clock=clock)
    sim = Simulation(listeners=[metrics], proposer=FakeProposer(3, wrong_every=10**6), num_blocks=100)
    sim.engine.add(request_of("a", clock.now, max_tokens=17))
    sim.tokens["a"] = []
    while sim.engine.has_work:
        sim.step()
    told = metrics.metrics()
    assert told["inter_token_latency_seconds_count"] == 16
    assert told["inter_token_latency_seconds_sum"] == pytest.approx(4)
    assert told['inter_token_latency_seconds_bucket{le="0.3"}'] == 16


def test_a_name_used_again_while_a_plan_with_the_old_one_is_in_flight_is_not_mistaken() -> None:
    sim = simulate(max_in_flight=2, runs_ahead=True)
    sim.add("a", [1, 2, 3], max_tokens=30)
    sim.step()
    sim.abort("a")
    sim.add("a", [4, 5, 6], max_tokens=2)
    while sim.engine.has_work:
        outputs = sim.engine.step()
        for output in outputs:
            sim.tokens[output.request_id] += output.new_token_ids
    told = sim.engine.metrics()
    assert told["request_generation_tokens_sum"] == told["generation_tokens"]
    assert told["request_prompt_tokens_sum"] == 6


def test_a_plan_no_request_of_which_is_known_is_counted_as_a_step() -> None:
    metrics = EngineMetrics(context())
    metrics.on_result(StepPlan(step=0, removed=["a"]), StepResult(step=0, requests={}))
    told = metrics.metrics()
    assert (told["num_steps"], told["iteration_tokens_total_sum"], told["iteration_tokens_total_count"]) == (
        1,
        0,
        1,
    )


def test_bounds_of_token_counts_end_with_the_longest_request() -> None:
    short = EngineMetrics(
        CoreContext(EngineConfig(model="none", max_model_len=300), Registry(), threading.Event().set)
    )
    bounds = [name for name in short.metrics() if name.startswith("request_prompt_tokens_bucket")]
    assert bounds[0] == 'request_prompt_tokens_bucket{le="1.0"}'
    assert bounds[-2:] == [
        'request_prompt_tokens_bucket{le="200.0"}',
        'request_prompt_tokens_bucket{le="+Inf"}',
    ]


# The pieces --------------------------------------------------------------------------------------------


def test_a_bucket_holds_what_is_at_most_its_bound() -> None:
    histogram = Histogram("h", (1, 2.5))
    for value in (0, 1, 2, 2.5):
        histogram.observe(value)
    histogram.observe(7, 3)
    assert dict(histogram.series()) == {
        'h_bucket{le="1.0"}': 2,
        'h_bucket{le="2.5"}': 4,
        'h_bucket{le="+Inf"}': 7,
        "h_sum": 26.5,
        "h_count": 7,
    }


def test_labels_are_escaped() -> None:
    assert series_name("a") == "a"
    assert series_name("a", b='x"\\\n', c="é") == 'a{b="x\\"\\\\\\n",c="é"}'
