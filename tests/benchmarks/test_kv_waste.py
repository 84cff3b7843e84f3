"""What paging wastes, counted by the benchmark and by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Script = Callable[[str], ModuleType]


def test_one_request_by_hand(script: Script) -> None:
    """Three prompt tokens and five answers in blocks of four: the last answer is never computed."""
    simulate = script("kv_waste").simulate
    requests = [{"prompt_ids": [1, 2, 3], "max_tokens": 5}]
    found = simulate(requests, pool_tokens=16, block_size=4)
    used, allocated = 3 + 4 + 5 + 6 + 7, 4 + 4 + 8 + 8 + 8
    assert found["waste"] == pytest.approx(1 - used / allocated)
    assert found["waste_at_peak"] == pytest.approx(1 - 5 / 8)
    assert (found["steps"], found["max_requests_at_once"], found["preemptions"]) == (5, 1, 0)
    reserved = simulate(requests, pool_tokens=16, block_size=4, reserve=lambda request: 16)
    assert reserved["waste"] == pytest.approx(1 - used / (5 * 16))


def test_reservations(script: Script) -> None:
    kv_waste = script("kv_waste")
    request = type("Request", (), {"max_tokens_total": 33})
    held = {name: reserve(request) for name, reserve in kv_waste.RESERVATIONS.items()}
    assert held == {
        "reserved, exact": 33,
        "reserved, power of two": 64,
        "reserved, max_model_len": 2048,
    }
    request.max_tokens_total = 32
    assert kv_waste.power_of_two(request) == 32


def test_a_reservation_that_does_not_fit_waits(script: Script) -> None:
    requests = [{"prompt_ids": [1, 2, 3], "max_tokens": 5}] * 3
    simulate = script("kv_waste").simulate
    reserved = simulate(requests, pool_tokens=20, block_size=4, reserve=lambda request: 8)
    assert (reserved["max_requests_at_once"], reserved["preemptions"]) == (2, 0)
    paged = simulate(requests, pool_tokens=20, block_size=4)
    assert paged["max_requests_at_once"] == 3


def test_paging_wastes_less_than_four_percent_of_the_workload(script: Script, benchmarks: Path) -> None:
    kv_waste = script("kv_waste")
    requests = json.loads((benchmarks / "workloads" / "mixed48.json").read_text())
    paged = kv_waste.simulate(requests, pool_tokens=8192, block_size=kv_waste.DEFAULT_BLOCK_SIZE)
    exact = kv_waste.simulate(
        requests, pool_tokens=8192, block_size=16, reserve=kv_waste.RESERVATIONS["reserved, exact"]
    )
    assert 0 < paged["waste"] < 0.04 < exact["waste"]
    assert paged["mean_requests_at_once"] > exact["mean_requests_at_once"]
    assert paged["steps"] < exact["steps"]
