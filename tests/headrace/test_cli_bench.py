"""`headrace bench` on tiny models: what runs, what is refused, what the JSON holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.cpu.compiler import find_compiler
from headrace.bench import measure
from headrace.bench.datasets import Vocabulary, prepare_dataset
from headrace.bench.facts import mean, percentile, percentiles
from headrace.bench.workloads import (
    BenchRequest,
    prefix_repetition_requests,
    random_requests,
    read_workload,
)
from headrace.cli import main
from headrace.core.errors import ConfigError, EngineError

VLLM_THROUGHPUT = {
    "elapsed_time",
    "num_requests",
    "total_num_tokens",
    "requests_per_second",
    "tokens_per_second",
}
VLLM_LATENCY = {"avg_latency", "latencies", "percentiles"}
VLLM_STARTUP = {"avg_warm_startup_time", "warm_startup_times", "warm_startup_percentiles"}
VLLM_COLD = {"avg_cold_startup_time", "cold_startup_times", "cold_startup_percentiles"}
OURS = {"headrace", "date", "model", "engine", "machine", "workload"}


def call(capsys: Any, *words: str, code: int = 0) -> str:
    """Run a command in this process; return what it says, on standard error where it fails."""
    with pytest.raises(SystemExit) as exit:
        main(words)
    captured = capsys.readouterr()
    assert (exit.value.code or 0) == code, captured
    return captured.err if code else captured.out


def bench(capsys: Any, folder: Path, *words: str) -> tuple[str, dict[str, Any]]:
    """Run a benchmark with `--output-json`; return its text and its figures."""
    file = folder / "figures.json"
    text = call(capsys, "bench", *words, "--no-show-report", "--output-json", str(file))
    return text, json.loads(file.read_text())


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.json"
    requests = [{"prompt_ids": list(range(n, 2 * n - 1)), "max_tokens": 40 - n} for n in (4, 20, 33)]
    path.write_text(json.dumps(requests))
    return path


# Throughput ------------------------------------------------------------------------------------------


def test_throughput_of_a_file(capsys: Any, tmp_path: Path, tiny_llama_folder: Path, workload: Path) -> None:
    text, found = bench(
        capsys, tmp_path, "throughput", str(tiny_llama_folder), "--dataset-path", str(workload)
    )
    assert set(found) >= VLLM_THROUGHPUT | OURS
    assert (found["num_requests"], found["total_input_tokens"]) == (3, 3 + 19 + 32)
    assert found["total_output_tokens"] == 36 + 20 + 7
    assert found["total_num_tokens"] == found["total_input_tokens"] + found["total_output_tokens"]
    assert found["tokens_per_second"] == pytest.approx(found["total_num_tokens"] / found["elapsed_time"])
    assert found["requests_per_second"] == pytest.approx(3 / found["elapsed_time"])
    assert found["output_tokens_per_second"] == pytest.approx(63 / found["elapsed_time"])
    assert 0 < found["mean_ttft_ms"] <= found["p99_ttft_ms"] < 1000 * found["elapsed_time"]
    assert 0 < found["median_tpot_ms"] < 1000 * found["elapsed_time"] / 6
    assert found["engine"]["architecture"] == "LlamaForCausalLM"
    assert found["engine"]["max_model_len"] == 128
    assert found["machine"]["cores_allowed"] >= 1
    assert found["workload"]["dataset_name"] == "workload"
    assert f"{found['output_tokens_per_second']:.2f} output tokens/s" in text
    # The warm-up filled the prefix cache, which was emptied before the run.
    assert found["workload"]["num_warmups"] == 4
    assert found["num_cached_tokens"] == 0


def test_engine_options_are_flags(
    capsys: Any, tmp_path: Path, tiny_llama_folder: Path, workload: Path
) -> None:
    _, found = bench(
        capsys,
        tmp_path,
        *("throughput", str(tiny_llama_folder), "--dataset-path", str(workload), "--num-prompts", "2"),
        *("--output-len", "9", "--max-num-seqs", "1", "--block-size", "8", "--no-enable-prefix-caching"),
    )
    assert found["num_requests"] == 2
    assert found["total_output_tokens"] == 18
    engine = found["engine"]
    assert (engine["max_num_seqs"], engine["block_size"], engine["prefix_caching"]) == (1, 8, False)


def test_shared_prefixes_meet_the_prefix_cache(capsys: Any, tmp_path: Path, tiny_llama_folder: Path) -> None:
    _, found = bench(
        capsys,
        tmp_path,
        *("throughput", str(tiny_llama_folder), "--dataset-name", "prefix_repetition", "--num-prompts", "6"),
        *("--prefix-repetition-num-prefixes", "2", "--prefix-repetition-prefix-len", "32"),
        *("--prefix-repetition-suffix-len", "4", "--prefix-repetition-output-len", "2"),
        *("--max-num-seqs", "1", "--num-warmups", "0"),
    )
    assert found["total_input_tokens"] == 6 * 36
    assert found["num_cached_tokens"] == 4 * 32


def test_random_requests_are_drawn_by_the_seed(capsys: Any, tmp_path: Path, tiny_llama_folder: Path) -> None:
    words = ["throughput", str(tiny_llama_folder), "--num-prompts", "5", "--random-input-len", "20"]
    words += ["--output-len", "10", "--range-ratio", "0.5"]
    totals = []
    for seed in ("1", "1", "3"):
        _, found = bench(capsys, tmp_path, *words, "--seed", seed)
        totals.append((found["total_input_tokens"], found["total_output_tokens"]))
    assert totals[0] == totals[1] != totals[2]


def test_what_would_end_early_is_refused(capsys: Any, tiny_llama_folder: Path, workload: Path) -> None:
    err = call(
        capsys,
        *("bench", "throughput", str(tiny_llama_folder), "--dataset-path", str(workload)),
        *("--output-len", "120", "--no-show-report"),
        code=2,
    )
    assert "request 1 has 19 prompt and 120 output tokens, 139 together, and max_model_len is 128" in err


def test_a_failed_request_is_no_figure() -> None:
    class Output:
        error = "no luck"

    class Broken:
        def generate(self, *args: Any, **rest: Any) -> list[Output]:
            return [Output()]

        def reset_prefix_cache(self) -> bool:
            return True

        front = type("Front", (), {"max_model_len": 64})

    broken: Any = Broken()
    with pytest.raises(
        EngineError, match="1 of 1 requests failed, so there is no figure; the first: no luck"
    ):
        measure.throughput(broken, [BenchRequest([1], 1)])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("--dataset-name", "radom"),
            "must be one of workload, sharegpt, random, prefix_repetition, got 'radom'",
        ),
        (("--dataset-name", "sharegpt"), "--dataset-name sharegpt needs --dataset-path FILE"),
        (("--dataset-path", "nowhere.json"), "--dataset-path nowhere.json: it cannot be read: No such file"),
        (("--dataset-path", "{file}", "--input-len", "3"), "--input-len is not for --dataset-name workload"),
        (("--prefix-repetition-prefix-len", "3"), "it is for prefix_repetition"),
        (("--range-ratio", "1"), "--range-ratio must be at least 0 and below 1, got 1.0"),
        (
            ("--dataset-name", "prefix_repetition", "--num-prompts", "3"),
            "--num-prompts 3 is less than --prefix-repetition-num-prefixes 10",
        ),
        (("--dataset-name", "sharegpt", "--dataset-path", "{file}"), "needs --dataset-name workload"),
        (("--output-json", "nowhere/x.json"), "--output-json nowhere/x.json cannot be written"),
    ],
)
def test_wrong_calls_end_before_a_model_is_loaded(
    capsys: Any, workload: Path, words: tuple[str, ...], text: str
) -> None:
    words = tuple(word.format(file=workload) for word in words)
    err = call(capsys, "bench", "throughput", "no-such-model", *words, code=2)
    assert text in err
    assert err.count("\n") == 1


# Latency and start-up --------------------------------------------------------------------------------


def test_latency(capsys: Any, tmp_path: Path, tiny_llama_folder: Path) -> None:
    text, found = bench(
        capsys,
        tmp_path,
        *("latency", str(tiny_llama_folder), "--input-len", "40", "--output-len", "4", "--batch-size", "2"),
        *("--num-iters-warmup", "1", "--num-iters", "3"),
    )
    assert set(found) >= VLLM_LATENCY | OURS
    assert len(found["latencies"]) == 3
    assert found["avg_latency"] == pytest.approx(mean(found["latencies"]))
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert found["percentiles"]["50"] == sorted(found["latencies"])[1]
    assert found["output_tokens_per_second"] == pytest.approx(8 / found["avg_latency"])
    assert "99% percentile latency" in text


def test_latency_computes_every_prompt(tiny_llama_folder: Path) -> None:
    from headrace import LLM

    requests = [BenchRequest(list(range(40)), 2)]
    with LLM(str(tiny_llama_folder), show_report=False) as llm:
        measure.latency(llm, requests, num_iters_warmup=2, num_iters=3)
        assert llm.metrics()["prompt_tokens"] == 5 * 40
        assert llm.metrics()["prefix_cache_hits"] == 0
        llm.generate(requests[0].prompt_token_ids, use_tqdm=False)
        assert llm.metrics()["prefix_cache_hits"] == 32


def test_startup(capsys: Any, tmp_path: Path, tiny_llama_folder: Path) -> None:
    text, found = bench(
        capsys,
        tmp_path,
        *("startup", str(tiny_llama_folder), "--num-iters-warmup", "0", "--num-iters-warm", "2"),
        *("--max-num-seqs", "3", "--input-len", "5"),
    )
    assert set(found) >= VLLM_STARTUP | OURS
    assert list(found["stages"]) == ["interpreter", "imports", "engine", "first_token"]
    assert all(seconds > 0 for seconds in found["stages"].values())
    assert sum(found["stages"].values()) == pytest.approx(found["avg_time_to_first_token"])
    assert found["avg_warm_startup_time"] == pytest.approx(found["stages"]["engine"])
    assert len(found["times_to_first_token"]) == 2
    assert found["engine"]["max_num_seqs"] == 3
    assert "Avg time to first token" in text


def test_cold_starts_compile_kernels_and_leave_the_cache_alone(
    capsys: Any, tmp_path: Path, tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known by what the compiler is asked, in a cache folder of the test's own; it is quick and does not optimize."""
    cache, log, compiler = tmp_path / "cache", tmp_path / "compiled", tmp_path / "g++"
    found = find_compiler()
    assert found is not None
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *-shared*) echo x >> {log};; esac\nexec {found.command[0]} "$@" -O0\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HEADRACE_CACHE", str(cache))
    (cache / "models").mkdir(parents=True)
    words = ("startup", str(tiny_llama_folder), "--num-iters-warmup", "0", "--num-iters-warm", "1")
    text, found_cold = bench(capsys, tmp_path, *words, "--num-iters-cold", "1")
    assert set(found_cold) >= VLLM_STARTUP | VLLM_COLD
    assert log.read_text().split() == ["x"] * 2  # the cold start, and the first warm one
    assert len(found_cold["cold_startup_times"]) == 1
    assert found_cold["avg_cold_startup_time"] > 0.5
    assert "seconds cold" in text
    assert sorted(path.name for path in cache.iterdir()) == ["kernels", "models"]
    _, found_warm = bench(capsys, tmp_path, *words)
    assert not VLLM_COLD & set(found_warm)
    assert log.read_text().split() == ["x"] * 2


def test_startup_says_why_a_process_failed(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    err = call(capsys, "bench", "startup", str(tmp_path), "--num-iters-warmup", "0", code=1)
    assert "error: a start ended with status 1: " in err
    assert str(tmp_path) in err


def test_startup_refuses_before_a_process_is_started(capsys: Any) -> None:
    assert "error: no model is called 'nowhere'" in call(capsys, "bench", "startup", "nowhere", code=1)
    assert "nothing" in call(capsys, "bench", "startup", "x", "--scheduling-policy", "nothing", code=2)


def test_help_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from headrace.cli import main\n"
        "try: main(['bench', 'throughput', '--help'])\n"
        "finally: print(*(m for m in ('torch', 'numpy', 'tokenizers') if m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.split() == []
    assert "--dataset-name" in done.stdout


# Workloads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[", "it is not JSON"),
        ("{}", "it must be a JSON list with at least one entry"),
        ("[]", "it must be a JSON list with at least one entry"),
        ("[7]", "entry 0 is 7"),
        ('[{"prompt_ids": [1], "max_tokens": 1}, {"prompt_ids": [], "max_tokens": 1}]', "entry 1 is"),
        ('[{"prompt_ids": [1, true], "max_tokens": 1}]', "entry 0 is"),
        ('[{"prompt_ids": [1], "max_tokens": 0}]', "max_tokens, at least 1"),
        ('[{"conversations": []}]', "a ShareGPT file needs --dataset-name sharegpt"),
    ],
)
def test_wrong_files(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=text):
        read_workload(path)


def test_sharegpt(tmp_path: Path) -> None:
    """Ids are characters here: lengths outside of vLLM's limits are passed over, as are lone turns."""
    turns = [
        ("a" * 10, "b" * 20),
        ("a" * 3, "b" * 20),
        ("a" * 1025, "b" * 20),
        ("a" * 1000, "b" * 1049),
        ("", "b"),
        ("a" * 12, "b" * 3),
        ("a" * 14, "b" * 24),
    ]
    entries = [{"conversations": [{"value": value} for value in pair]} for pair in turns]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([*entries, {"conversations": [{"value": "alone"}]}]))
    vocabulary = Vocabulary(range(128), lambda text: [*text.encode()])

    def lengths(**options: Any) -> list[tuple[int, int]]:
        number = options.pop("num_prompts", None)
        dataset = prepare_dataset("sharegpt", {"dataset_path": path, **options}, num_prompts=number)
        return [(len(r.prompt_token_ids), r.max_tokens) for r in dataset.make(vocabulary)]

    assert sorted(lengths()) == [(10, 20), (14, 24)]
    assert sorted(lengths(output_len=2)) == [(10, 2), (12, 2), (14, 2), (1000, 2)]
    assert len(lengths(num_prompts=1)) == 1
    path.write_text(json.dumps(entries[1:2]))
    with pytest.raises(ConfigError, match="none of its 1 conversations"):
        lengths()


def test_random_lengths_stay_within_the_ratio() -> None:
    vocab = range(5, 50)
    requests = random_requests(200, vocab, input_len=20, output_len=10, range_ratio=0.5, prefix_len=3, seed=1)
    inputs = [len(request.prompt_token_ids) - 3 for request in requests]
    outputs = [request.max_tokens for request in requests]
    assert (min(inputs), max(inputs)) == (10, 30)
    assert (min(outputs), max(outputs)) == (5, 15)
    assert len({tuple(request.prompt_token_ids[:3]) for request in requests}) == 1
    assert {token for request in requests for token in request.prompt_token_ids} == set(vocab)


def test_repeated_prefixes() -> None:
    requests = prefix_repetition_requests(
        11, range(100), prefix_len=8, suffix_len=4, num_prefixes=3, output_len=5
    )
    assert len(requests) == 9
    prefixes = [tuple(request.prompt_token_ids[:8]) for request in requests]
    assert [prefixes.count(prefix) for prefix in set(prefixes)] == [3, 3, 3]
    assert len({tuple(request.prompt_token_ids) for request in requests}) == 9


def test_percentiles_are_those_of_numpy() -> None:
    import numpy as np

    values = [3.0, 1.0, 2.5, 8.0, 0.5, 4.0]
    assert percentiles(values) == pytest.approx(
        {str(p): float(np.percentile(values, p)) for p in (10, 25, 50, 75, 90, 99)}
    )
    assert percentile([7.0], 99) == 7.0
