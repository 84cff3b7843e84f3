"""The comparison: its table and plot from given figures, and how engines are run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Script = Callable[[str], ModuleType]
ROOT = Path(__file__).resolve().parents[2]


def rates(single: float, mixed: float) -> dict[str, float]:
    return {"read_gb_s": 20.0, "single_tok_s": single, "mixed_tok_s": mixed}


@pytest.fixture
def results() -> dict[str, Any]:
    return {
        "date": "2030-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "changed": False,
        "machine": {"processor": "A|B", "cores": 4, "cores_allowed": 2, "memory_bytes": 8 * 2**30},
        "workload": {"file": "mixed48.json", "requests": 48},
        "repeat": 3,
        "floor": {
            "before": {"plain": rates(70, 400), "huge": rates(110, 600)},
            "after": {"plain": rates(90, 600), "huge": rates(130, 800)},
        },
        "rows": [
            {
                "engine": "ours",
                "version": "1.0",
                "weights": "bfloat16",
                "load_s": 1.26,
                "single_tok_s": [41.0, 40.0, 44.0],
                "mixed_tok_s": [250.0],
            },
            {"engine": "absent", "reason": "not set up"},
            {
                "engine": "lone",
                "version": "2",
                "weights": "4-bit",
                "load_s": 0.2,
                "single_tok_s": [60.0],
                "mixed_tok_s": [],
            },
        ],
    }


def test_the_table(script: Script, results: dict[str, Any]) -> None:
    lines = script("comparison").markdown(results).splitlines()
    assert len({line.count(" | ") for line in lines}) == 1
    assert lines[2] == "| floor, plain pages, before |  | bfloat16 |  | 70 |  | 400 |  |"
    assert [line.split(" | ")[0] for line in lines[6:]] == ["| ours", "| lone", "| absent"]
    # Medians, and shares of the mean of both floors with plain pages: 80 and 500.
    assert lines[6] == "| ours | 1.0 | bfloat16 | 1.3 | 41 (40 to 44) | 51% | 250 | 50% |"
    assert lines[7] == "| lone | 2 | 4-bit | 0.2 | 60 | 75% | – | – |"
    assert lines[8].startswith("| absent | not measured: not set up | ")


def test_the_table_without_a_floor(script: Script, results: dict[str, Any]) -> None:
    results["floor"] = {}
    lines = script("comparison").markdown(results).splitlines()
    assert lines[2] == "| ours | 1.0 | bfloat16 | 1.3 | 41 (40 to 44) | – | 250 | – |"


def test_the_table_fills_the_page(script: Script, results: dict[str, Any], benchmarks: Path) -> None:
    compare = script("compare")
    page = (benchmarks.parent / "docs" / "performance.md").read_text()
    filled = compare.fill(page, results)
    assert "| ours | 1.0 |" in filled
    assert (
        "A|B, 2 of 4 cores, 8 GiB; 2030-01-02, commit 0123456789ab; `mixed48.json`, 3 repetitions." in filled
    )
    assert compare.fill(filled, results) == filled
    assert filled.partition("<!-- compare")[0] == page.partition("<!-- compare")[0]
    with pytest.raises(ValueError, match="0 places for the table"):
        compare.fill("nothing", results)


def test_the_plot(script: Script, results: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    script("comparison").write_plot(results, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    results["floor"], results["rows"] = {}, results["rows"][1:2]
    script("comparison").write_plot(results, path)


def test_names(script: Script) -> None:
    compare = script("compare")
    assert compare.selected(None)[:2] == ["floor", "headrace"]
    assert compare.selected("floor, vllm") == ["floor", "vllm"]
    with pytest.raises(
        ValueError, match="there is no torch; there are: floor, headrace, headrace-packed, vllm"
    ):
        compare.selected("torch")


def test_every_engine_has_a_script_and_its_peer_a_recipe(script: Script, benchmarks: Path) -> None:
    engines = script("compare").ENGINES
    assert {engine.script for engine in engines} == {p.name for p in (benchmarks / "peers").glob("run_*.py")}
    assert {engine.peer for engine in engines} - {None} == set(script("setup").RECIPES)


def test_a_peer_that_is_not_set_up_is_told(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compare = script("compare")
    monkeypatch.setattr(compare, "PEERS", tmp_path)
    engine = next(engine for engine in compare.ENGINES if engine.name == "vllm")
    row = compare.run_engine(engine, Path("x.json"), 1, 60)
    assert row == {"engine": "vllm", "reason": "not set up; make peers PEERS=vllm does it"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("print('first'); raise SystemExit('no wheels')", "it ended with status 1: no wheels"),
        ("pass", "it ended with status 0: it said nothing"),
        (f"raise SystemExit({str(ROOT / 'build' / 'x')!r})", "it ended with status 1: build/x"),
        ("import time; time.sleep(60)", "no result after 1 s"),
    ],
)
def test_an_engine_that_fails_is_told(script: Script, tmp_path: Path, body: str, reason: str) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(body)
    assert script("compare").run_script([sys.executable, broken], {}, 1 if "sleep" in body else 60) == {
        "reason": reason
    }


def test_nothing_an_engine_started_outlives_it(script: Script, tmp_path: Path) -> None:
    """An engine core left behind would take the next engine's cores."""
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import json, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open(sys.argv[2], 'w').write(json.dumps({'pid': child.pid}))\n"
    )
    found = script("compare").run_script([sys.executable, parent], {}, 60)
    for _ in range(600):
        try:
            state = Path(f"/proc/{found['pid']}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return
        if state.rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {found['pid']} still runs")


def test_headrace_runs_as_its_peers_do(
    script: Script, tiny_llama_folder: Path, tmp_path: Path, benchmarks: Path
) -> None:
    """The real script, in a process, on a tiny model; a context of 2,048 tokens needs positions for it."""
    config = json.loads((tiny_llama_folder / "config.json").read_text())
    config["max_position_embeddings"] = 2048
    (tiny_llama_folder / "config.json").write_text(json.dumps(config))
    workload = tmp_path / "workload.json"
    workload.write_text(
        json.dumps([{"prompt_ids": [i % 100 for i in range(n)], "max_tokens": 5} for n in (3, 70, 9)])
    )
    found = script("compare").run_script(
        [
            sys.executable,
            benchmarks / "peers" / "run_headrace.py",
            tiny_llama_folder,
            workload,
            "--repeat",
            "2",
        ],
        {},
        120,
    )
    assert "reason" not in found, found
    assert (len(found["single_tok_s"]), len(found["mixed_tok_s"])) == (2, 2)
    assert found["load_s"] > 0


# The harness -----------------------------------------------------------------------------------------


def test_the_harness_refuses_an_engine_that_generates_less(script: Script) -> None:
    harness = script("harness")
    requests = [harness.Request([1] * 64, 5), harness.Request([1], 2)]
    seen: list[Any] = []

    def load() -> Any:
        return lambda given: seen.append(given) or [request.max_tokens for request in given]

    found = harness.measure(load, requests, repeat=2)
    assert [len(given) for given in seen] == [2, 1, 1, 2, 2]
    assert (len(seen[1][0].prompt_ids), seen[1][0].max_tokens) == (64, 128)
    assert len(found["mixed_tok_s"]) == 2
    seen.clear()
    assert harness.measure(load, requests, repeat=1, batches=False)["mixed_tok_s"] == []
    assert all(len(given) == 1 for given in seen)
    with pytest.raises(RuntimeError, match=r"\[4, 1\] tokens instead of \[5, 2\]"):
        harness.measure(lambda: lambda given: [r.max_tokens - 1 for r in given], requests, repeat=1)


def test_the_workload_is_the_one_described(script: Script, benchmarks: Path) -> None:
    requests = script("harness").read_workload(benchmarks / "workloads" / "mixed48.json")
    prompts = [len(request.prompt_ids) for request in requests]
    outputs = [request.max_tokens for request in requests]
    assert (len(requests), sum(prompts), sum(outputs)) == (48, 8029, 4509)
    assert (min(prompts), max(prompts), min(outputs), max(outputs)) == (24, 743, 16, 256)


# Setting up peers ------------------------------------------------------------------------------------


def test_requirements_of_a_wheel(script: Script, tmp_path: Path) -> None:
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "x-1.dist-info/METADATA",
            "Name: x\nVersion: 1\nRequires-Dist: torch==1.0\nRequires-Dist: numpy<3,>=2\n"
            'Requires-Dist: fastapi[standard]>=0.1; python_version >= "3.8"\n'
            'Requires-Dist: old; python_version < "3"\nRequires-Dist: plot; extra == "plots"\n',
        )
    assert script("setup").requirements(wheel) == ["numpy<3,>=2", "fastapi[standard]>=0.1"]


def test_build_options_follow_the_processor(script: Script) -> None:
    options = script("setup").cmake_args("processor : 0\nflags\t\t: fpu avx avx2 fma\n").split()
    assert "-DGGML_NATIVE=OFF" in options
    assert "-DGGML_AVX2=ON" in options
    assert "-DGGML_AVX512=OFF" in options


def test_setup_names_what_there_is(benchmarks: Path) -> None:
    done = subprocess.run(
        [sys.executable, benchmarks / "peers" / "setup.py", "torch"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "no such peer: torch; there are: transformers, openvino, llamacpp, vllm" in done.stderr


# The floor -------------------------------------------------------------------------------------------


def test_the_floor_of_a_small_workload(script: Script) -> None:
    floor = script("floor")
    shape = floor.Shape(layers=2, kv_heads=1, head_size=8, linear_parameters=1000, weight_bytes=4000)
    assert shape.kv_bytes == 64
    machine = floor.Rates(read=1e6, matrix=1e7)
    assert floor.single_rate(shape, machine) == 250
    requests = [{"prompt_ids": [1] * 10, "max_tokens": 4}, {"prompt_ids": [1] * 5, "max_tokens": 2}]
    reading = 4 * 4000 + 64 * (4 * 10 + 8 + 2 * 5 + 2)
    seconds = reading / 1e6 + 2 * 1000 * 15 / 1e7
    assert floor.workload_rate(shape, machine, requests) == pytest.approx(6 / seconds)


def test_rates_are_measured(script: Script) -> None:
    floor = script("floor")
    assert floor.read_rate(1 << 20, huge=False) > 1e6
    assert floor.read_rate(1 << 20, huge=True) > 1e6
    assert floor.matrix_rate(64) > 1e6
