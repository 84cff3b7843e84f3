"""The text for Prometheus: what a Prometheus parser reads out of it is what was told."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from headrace import LLM, SamplingParams
from headrace.core.metrics import Histogram, Metric, series_name
from headrace.inprocess import InProcessClient
from headrace.metrics_text import exposition

DESCRIBED = {
    "running": Metric("gauge", "Requests\nthat run, \\ or so."),
    "tokens": Metric("counter", "Tokens."),
    "rounds_total": Metric("counter", "Rounds."),
    "wait_seconds": Metric("histogram", "Waiting."),
    "size_total": Metric("histogram", "A histogram with the name of a counter."),
}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: bytes, openmetrics: bool) -> tuple[dict[str, str], Samples]:
    """Return families with their types, and samples; fail for one that is there twice."""
    families = (openmetrics_parser if openmetrics else parser).text_string_to_metric_families(text.decode())
    types: dict[str, str] = {}
    samples: Samples = {}
    for family in families:
        assert family.name not in types
        types[family.name] = family.type
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples
            samples[key] = sample.value
    return types, samples


def publish(series: dict[str, float], openmetrics: bool, **changed: Any) -> tuple[dict[str, str], Samples]:
    """As `read`, of the families that have samples."""
    options: dict[str, Any] = {"prefix": "headrace", "labels": {}} | changed
    text, kind = exposition(series, DESCRIBED, openmetrics=openmetrics, **options)
    assert kind.startswith("application/openmetrics-text" if openmetrics else "text/plain")
    assert text.endswith(b"# EOF\n") is openmetrics
    types, samples = read(text, openmetrics)
    ends = ("", "_total", "_bucket", "_count", "_sum")
    told = {name for name, _ in samples}
    return {name: kind for name, kind in types.items() if any(name + end in told for end in ends)}, samples


@pytest.fixture(params=[False, True], ids=["text", "openmetrics"])
def openmetrics(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_kinds_names_and_values(openmetrics: bool) -> None:
    histogram = Histogram("wait_seconds", (0.5, 1, 10))
    for value in (0.2, 3, 3, 50):
        histogram.observe(value)
    types, samples = publish(
        {"running": 3, "tokens": 12345678, "rounds_total": 2, "stranger": 0.25, **histogram.series()},
        openmetrics,
    )
    assert types == {
        "headrace:running": "gauge",
        "headrace:tokens": "counter",
        "headrace:rounds": "counter",
        "headrace:stranger": "gauge",
        "headrace:wait_seconds": "histogram",
    }
    assert samples == {
        ("headrace:running", ()): 3,
        ("headrace:tokens_total", ()): 12345678,
        ("headrace:rounds_total", ()): 2,
        ("headrace:stranger", ()): 0.25,
        ("headrace:wait_seconds_bucket", (("le", "0.5"),)): 1,
        ("headrace:wait_seconds_bucket", (("le", "1.0"),)): 1,
        ("headrace:wait_seconds_bucket", (("le", "10.0"),)): 3,
        ("headrace:wait_seconds_bucket", (("le", "+Inf"),)): 4,
        ("headrace:wait_seconds_count", ()): 4,
        ("headrace:wait_seconds_sum", ()): 56.2,
    }


def test_the_prefix_and_constant_labels(openmetrics: bool) -> None:
    constant = {"model_name": 'a "model"\\', "engine": "0"}
    _, samples = publish({"running": 1, 'tokens{kind="x"}': 2}, openmetrics, prefix="vllm", labels=constant)
    names = (("engine", "0"), ("model_name", 'a "model"\\'))
    assert samples == {
        ("vllm:running", names): 1,
        ("vllm:tokens_total", (names[0], ("kind", "x"), names[1])): 2,
    }


@pytest.mark.parametrize(
    "value", ['say "hi"', "back\\slash", "two\nlines", "a,b}{=", "é€🙂", "", "\\n", '\\"']
)
def test_whatever_a_label_says_comes_out_as_it_was(openmetrics: bool, value: str) -> None:
    _, samples = publish({series_name("tokens", why=value, n="1"): 5}, openmetrics)
    assert samples == {("headrace:tokens_total", (("n", "1"), ("why", value))): 5}


@pytest.mark.parametrize(
    "series", ["a b", "a{", 'a{b="c}', "a{b=c}", "a.b-c", "é", 'a{"b"="c"}', "1a", 'a{b="c"}x']
)
def test_a_series_that_is_not_well_formed_spoils_no_other(openmetrics: bool, series: str) -> None:
    types, samples = publish({series: 7, "running": 1}, openmetrics)
    assert samples[("headrace:running", ())] == 1
    assert sorted(samples.values()) == [1, 7]
    assert set(types.values()) == {"gauge"}


def test_series_that_are_one_to_prometheus_are_published_once(openmetrics: bool) -> None:
    _, samples = publish({'tokens{a="1",b="2"}': 1, 'tokens{b="2",a="1"}': 2, "tokens": 3}, openmetrics)
    assert sorted(samples.values()) == [2, 3]


def test_a_label_of_its_own_goes_before_a_constant_one(openmetrics: bool) -> None:
    _, samples = publish({'tokens{engine="7"}': 1}, openmetrics, labels={"engine": "0"})
    assert samples == {("headrace:tokens_total", (("engine", "7"),)): 1}


def test_histograms_with_labels_come_in_order_whatever_order_they_were_told_in(openmetrics: bool) -> None:
    told: dict[str, float] = {}
    for route in ("/b", "/a"):
        for bound, count in (("+Inf", 3), ("5", 2), ("0.1", 1)):
            told[series_name("wait_seconds_bucket", le=bound, route=route)] = count
        told[series_name("wait_seconds_count", route=route)] = 3
        told[series_name("wait_seconds_sum", route=route)] = 9
    shuffled = dict(sorted(told.items(), key=lambda item: hash(item[0])))
    types, samples = publish(shuffled, openmetrics)
    assert types == {"headrace:wait_seconds": "histogram"}
    assert len(samples) == 2 * 5
    assert samples[("headrace:wait_seconds_bucket", (("le", "5.0"), ("route", "/a")))] == 2


def test_a_histogram_may_be_called_like_a_counter(openmetrics: bool) -> None:
    types, samples = publish(dict(Histogram("size_total", (1,)).series()), openmetrics)
    assert types == {"headrace:size_total": "histogram"}
    assert ("headrace:size_total_count", ()) in samples


def test_values_that_are_no_ordinary_numbers(openmetrics: bool) -> None:
    _, samples = publish({"running": math.nan, "stranger": math.inf, "tokens": 1e300}, openmetrics)
    assert math.isnan(samples[("headrace:running", ())])
    assert samples[("headrace:stranger", ())] == math.inf
    assert samples[("headrace:tokens_total", ())] == 1e300


def test_names_without_a_series_are_there_with_their_kinds(openmetrics: bool) -> None:
    text, _ = exposition({"stranger": 1}, DESCRIBED, prefix="headrace", labels={}, openmetrics=openmetrics)
    types, samples = read(text, openmetrics)
    assert samples == {("headrace:stranger", ()): 1}
    assert types == {
        "headrace:stranger": "gauge",
        "headrace:running": "gauge",
        "headrace:tokens": "counter",
        "headrace:rounds": "counter",
        "headrace:wait_seconds": "histogram",
        "headrace:size_total": "histogram",
    }


# A real engine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Callable[..., Path]) -> Iterator[LLM]:
    path = tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    with LLM(str(path), show_report=False) as made:
        yield made


def test_an_engine_before_and_after_its_first_requests(llm: LLM, openmetrics: bool) -> None:
    """Source: vllm-project/vllm#8612."""
    assert isinstance(llm.client, InProcessClient)
    described = {entry.name: entry.factory() for entry in llm.client.front.registry.entries("metric")}
    labels = {"model_name": "tiny", "engine": "0"}
    seen: Samples = {}
    for _ in range(3):
        text, _ = exposition(llm.metrics(), described, prefix="vllm", labels=labels, openmetrics=openmetrics)
        types, samples = read(text, openmetrics)
        assert {
            f"vllm:{name.removesuffix('_total')}" for name, m in described.items() if m.kind == "counter"
        } <= set(types)
        assert {f"vllm:{name}" for name, m in described.items() if m.kind != "counter"} <= set(types)
        for key, before in seen.items():
            if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                assert samples[key] >= before
        seen = samples
        llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=3), use_tqdm=False)
    ours = (("engine", "0"), ("model_name", "tiny"))
    assert samples[("vllm:generation_tokens_total", ours)] >= 12
    assert samples[("vllm:num_requests_running", ours)] == 0
    assert samples[("vllm:e2e_request_latency_seconds_count", ours)] >= 4
    assert all(set(ours) <= set(labels) for _, labels in samples)
