"""The comparison with another load client: one workload for both, and when figures agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.bench.remote import Server

Script = Callable[[str], ModuleType]


def figures(**changes: float) -> dict[str, Any]:
    return {
        "completed": 8,
        "failed": 0,
        "total_output_tokens": 500,
        "output_throughput": 100.0,
        "mean_ttft_ms": 50.0,
        "mean_itl_ms": 10.0,
        **changes,
    }


def test_text_and_ids_are_the_same_prompt(
    script: Script, fake_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_peer = script("load_peer")
    workload = load_peer.make_workload(Server(fake_server.url), "fake", 12)
    assert all(request["prompt_ids"] == list(request["prompt"].encode()) for request in workload)
    assert len({request["prompt"] for request in workload}) == 12
    assert all(32 <= len(request["prompt_ids"]) <= 256 for request in workload)
    assert all(32 <= request["max_tokens"] <= 96 for request in workload)
    found = load_peer.run_ours(fake_server.url, "fake", workload, 3, tmp_path)
    assert (found["completed"], found["failed"]) == (12, 0)
    assert found["total_output_tokens"] == sum(request["max_tokens"] for request in workload)
    assert found["total_input_tokens"] == sum(len(request["prompt_ids"]) for request in workload)


@pytest.mark.parametrize(
    ("peer", "passed"),
    [
        ({}, True),
        ({"output_throughput": 108.0, "mean_ttft_ms": 46.0}, True),
        ({"output_throughput": 111.0}, False),
        ({"mean_itl_ms": 8.9}, False),
        ({"completed": 7}, False),
        ({"failed": 1}, False),
        ({"total_output_tokens": 499}, False),
    ],
)
def test_when_they_agree(script: Script, peer: dict[str, float], passed: bool) -> None:
    """A machine that drifts from run to run changes nothing."""
    compare = script("load_peer").compare
    drift = [figures(output_throughput=rate) for rate in (100.0, 80.0, 60.0, 50.0)]
    theirs = [figures(**peer), *(figures(output_throughput=rate) for rate in (70.0, 55.0))]
    found = compare(drift, theirs, 8)
    assert found["figures"]["output_throughput"]["peer_by_ours"][1:] == [1.0, 1.0]
    assert found["passed"] is (
        peer.get("completed", 8) == 8 and "failed" not in peer and "total_output_tokens" not in peer
    )
    found = compare([figures(), figures()], [figures(**peer)], 8)
    assert found["passed"] is passed
    assert found["figures"]["mean_ttft_ms"]["median"] == pytest.approx(peer.get("mean_ttft_ms", 50.0) / 50)
