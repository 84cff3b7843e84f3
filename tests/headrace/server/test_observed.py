"""What a running server shows of itself: metrics, steps, its log. All of one server with two API processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from headrace.testing.serving import Server, serving

pytestmark = pytest.mark.weights

SECRET = "The secret of the purple walrus is"
KEY = "sk-nobody-may-read-this"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("observed")
    steps = folder / "steps.jsonl"
    flags = ["--api-server-count", "2", "--dev-mode", "--metrics-prefix", "vllm", "--step-log", str(steps)]
    flags += ["--log-stats-interval", "0.2", "--enable-log-requests", "--max-model-len", "512"]
    with serving(folder, *flags, "--api-key", KEY) as server:
        server.wait_until(lambda: len(server.children("api")) == 2)
        yield server, steps


def complete(server: Server, **body: object) -> dict[str, int]:
    headers = {"Authorization": f"Bearer {KEY}"}
    status, answer = server.post(
        "/v1/completions", {"prompt": SECRET, "temperature": 0, "ignore_eos": True, **body}, headers
    )
    assert status == 200, answer
    usage: dict[str, int] = answer["usage"]
    return usage


def read(server: Server, openmetrics: bool) -> tuple[dict[str, str], Samples]:
    """Return families with their types, and samples; fail for one that is there twice."""
    accept = "application/openmetrics-text; version=1.0.0" if openmetrics else "*/*"
    status, text = server.ask("GET", "/metrics", headers={"Accept": accept, "Authorization": f"Bearer {KEY}"})
    assert status == 200
    types: dict[str, str] = {}
    samples: Samples = {}
    for family in (openmetrics_parser if openmetrics else parser).text_string_to_metric_families(text):
        assert family.name not in types
        types[family.name] = family.type
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples
            samples[key] = sample.value
    return types, samples


def value(samples: Samples, name: str, **labels: str) -> float:
    (found,) = [
        v
        for (n, pairs), v in samples.items()
        if n == f"vllm:{name}" and labels.items() <= dict(pairs).items()
    ]
    return found


def test_metrics_parse_from_the_start_and_never_go_back(observed: tuple[Server, Path]) -> None:
    """Source: vllm-project/vllm#8612."""
    server, _ = observed
    names = set(
        re.findall(r"^\| (`.+?`) \|", Path(__file__).parents[3].joinpath("docs/metrics.md").read_text(), re.M)
    )
    documented = {name for cell in names for name in re.findall(r"`(\w+)", cell)}
    assert len(documented) > 35
    seen: Samples = {}
    for round_number in range(20):
        types, samples = read(server, openmetrics=round_number % 2 == 1)
        told = {name.removeprefix("vllm:") for name in types}
        assert {name for name in documented if not {name, name.removesuffix("_total")} & told} == set()
        for key, before in seen.items():
            if key[0].endswith(("_total", "_bucket", "_count", "_sum")) and "kv_blocks" not in key[0]:
                assert samples[key] >= before, key
        seen = samples
        if round_number == 1:
            complete(server, max_tokens=3)


def test_sums_are_those_of_the_usages(observed: tuple[Server, Path]) -> None:
    server, _ = observed
    _, before = read(server, openmetrics=False)
    usages = [complete(server, max_tokens=4 + i) for i in range(4)]
    usages += [complete(server, max_tokens=5, n=3, temperature=1.0, seed=i) for i in range(2)]
    usages.append(complete(server, max_tokens=6, prompt=["one two", "three", "four five six", "seven"]))
    _, after = read(server, openmetrics=True)

    def since(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert since("generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    assert since("request_success_total", finished_reason="length") == 4 + 2 * 3 + 4  # by answers
    assert since("e2e_request_latency_seconds_count") == 14
    assert value(after, "num_requests_running") == value(after, "kv_cache_usage_perc") == 0


def test_steps_are_in_the_file_and_at_the_route(observed: tuple[Server, Path]) -> None:
    server, file = observed
    complete(server, max_tokens=7)
    status, answer = server.ask("GET", "/debug/steps?limit=3", headers={"Authorization": f"Bearer {KEY}"})
    assert status == 200
    assert len(answer["steps"]) == 3
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert all(step in lines for step in answer["steps"])
    assert "walrus" not in text
    assert "walrus" not in json.dumps(answer)
    status, _ = server.ask("GET", "/debug/steps?limit=0", headers={"Authorization": f"Bearer {KEY}"})
    assert 400 <= status < 500


def test_the_log_has_a_line_on_load_and_neither_text_nor_key(observed: tuple[Server, Path]) -> None:
    server, _ = observed

    def lines() -> list[str]:
        return re.findall(
            r"headrace\.stats: prompts [\d.]+ tokens/s, answers ([\d.]+) tokens/s", server.log.read_text()
        )

    count = len(lines())
    for _ in range(4):
        complete(server, max_tokens=60)
    server.wait_until(lambda: len(lines()) > count)
    assert max(map(float, lines())) > 1
    log = server.log.read_text()
    assert "walrus" not in log
    assert KEY not in log
