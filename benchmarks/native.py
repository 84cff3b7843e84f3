"""What the native CPU backend makes of this machine: shares of the floor, a long prompt, the prefix cache.

    python benchmarks/native.py [--output benchmarks/results/native.json] [--models smollm2,gemma3-270m]

Looks at the floor and runs of Headrace alternate, since machines drift. A run's share is of the mean of the looks
before and behind it, and the median of all runs is told. Gemma's weights come under terms: see `headrace pull`.

    one stream    64 prompt and 128 output tokens of one request, greedy
    workload      the requests of `workloads/mixed48.json`
    prompt        2,000 tokens of one request until its first token, against the rate of large bfloat16 products;
                  `split` gives each kernel's share, from a pass that is not recorded
    prefix        32 requests that share 1,024 tokens: time to the last first token, with and without the cache; and
                  what the cache costs where nothing is shared, as the engine counts it
    memory        resident bytes of an engine over those of `import torch`, its weights and its KV pool

Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import floor as floors
from provenance import provenance

from headrace import LLM, SamplingParams
from headrace.backends.cpu.library import Kernels

BENCHMARKS = Path(__file__).parent
RESULTS = BENCHMARKS / "results" / "native.json"
GEMMA3 = replace(
    floors.SMOLLM2,
    layers=18,
    kv_heads=1,
    head_size=256,
    linear_parameters=100_270_080,
    weight_bytes=2 * 268_098_176,
)
SHAPES = {"smollm2": floors.SMOLLM2, "gemma3-270m": GEMMA3}
QUERY_SIZE = {"smollm2": 9 * 64, "gemma3-270m": 4 * 256}
PROMPT = 2000
REPEATS = 9


def params(max_tokens: int) -> SamplingParams:
    """Greedy, exactly so many tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@dataclass(frozen=True)
class Looks:
    """Times of runs, and the floor around each."""

    times: list[float]
    floor: list[dict[str, float]]

    def shares(self, name: str, amount: float) -> list[float]:
        """Return `amount` a second as a share of the floor, for each run."""
        return [amount / time / floor[name] for time, floor in zip(self.times, self.floor, strict=True)]


def seconds(call: Callable[[], object], repeats: int = REPEATS, *, warm: bool = True) -> list[float]:
    """Return the times of some calls, after one that is not counted where that is to `warm` up."""
    if warm:
        call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return times


def start(model: str, **options: Any) -> LLM:
    """Start an engine without a prefix cache."""
    settings = {"max_model_len": 2560, "enable_prefix_caching": False, "show_report": False, **options}
    return LLM(model, dtype="bfloat16", **settings)


def among_looks(call: Callable[[], object], look: Callable[[], dict[str, float]], repeats: int) -> Looks:
    """Return the times of some calls, after one that is not counted, and the floor around each."""
    call()
    times: list[float] = []
    looks = [look()]
    for _ in range(repeats):
        times += seconds(call, 1, warm=False)
        looks.append(look())
    floor = [
        {name: (before[name] + behind[name]) / 2 for name in before} for before, behind in pairwise(looks)
    ]
    return Looks(times, floor)


def measure_model(model: str, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One stream, the workload and a long prompt, each among looks at the floor."""
    shape = SHAPES[model]
    look = floors.PlainFloor(requests, shape).look
    llm = start(model)
    prompts = [request["prompt_ids"] for request in requests]
    wanted = [params(request["max_tokens"]) for request in requests]
    tokens = sum(request["max_tokens"] for request in requests)
    long = [list(range(100, 100 + PROMPT))]
    stream = among_looks(lambda: llm.generate([prompts[0][:64]], params(128), use_tqdm=False), look, REPEATS)
    workload = among_looks(lambda: llm.generate(prompts, wanted, use_tqdm=False), look, 5)
    prompt = among_looks(lambda: llm.generate(long, params(1), use_tqdm=False), look, REPEATS)
    linear = 2 * shape.linear_parameters * PROMPT
    # Causal: a token sees half of the prompt in the mean; a product with keys and one with values.
    attention = 4 * PROMPT * (PROMPT / 2) * QUERY_SIZE[model] * shape.layers
    return {
        "single_tok_s": [128 / s for s in stream.times],
        "mixed_tok_s": [tokens / s for s in workload.times],
        "floor": {"single_tok_s": stream.floor, "mixed_tok_s": workload.floor, "prompt": prompt.floor},
        "of_floor": {
            "single_tok_s": stream.shares("single_tok_s", 128),
            "mixed_tok_s": workload.shares("mixed_tok_s", tokens),
        },
        "prompt": {
            "seconds": prompt.times,
            "of_matrix_rate": prompt.shares("matrix_tflop_s", (linear + attention) / 1e12),
            "split": split(model, long),
        },
    }


def split(model: str, prompt: list[list[int]]) -> dict[str, float]:
    """Return the seconds that each kernel takes of a prompt, in an engine that records nothing."""
    spent: dict[str, float] = defaultdict(float)
    by_type = Kernels.by_type

    def timed(self: Kernels, name: str) -> Any:
        functions = by_type(self, name)
        for dtype, function in functions.items():
            functions[dtype] = _timed(function, name, spent)
        return functions

    Kernels.by_type = timed  # type: ignore[method-assign]
    try:
        llm = start(model, enforce_eager=True)
    finally:
        Kernels.by_type = by_type  # type: ignore[method-assign]
    llm.generate(prompt, params(1), use_tqdm=False)
    spent.clear()
    llm.generate(prompt, params(1), use_tqdm=False)
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def _timed(function: Callable[..., None], name: str, spent: dict[str, float]) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        started = time.perf_counter()
        function(*arguments)
        spent[name] += time.perf_counter() - started

    return call


def measure_prefix(requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The prefix cache: what it brings where prompts share, and costs where they do not."""
    draw = random.Random(0)
    shared = [draw.randrange(100, 40_000) for _ in range(1024)]
    prompts = [[*shared, *(draw.randrange(100, 40_000) for _ in range(16))] for _ in range(32)]
    times = {}
    for caching in (False, True):
        llm = start("smollm2", enable_prefix_caching=caching)

        def run(llm: LLM = llm) -> None:
            llm.reset_prefix_cache()
            llm.generate(prompts, params(1), use_tqdm=False)

        times[caching] = seconds(run, 3)
    llm = start("smollm2", enable_prefix_caching=True)
    before = llm.metrics()["prefix_cache_seconds"]
    started = time.perf_counter()
    llm.generate(
        [request["prompt_ids"] for request in requests],
        [params(request["max_tokens"]) for request in requests],
        use_tqdm=False,
    )
    elapsed = time.perf_counter() - started
    metrics = llm.metrics()
    return {
        "time_to_first_token_s": {"without": times[False], "with": times[True]},
        "ratio": statistics.median(times[False]) / statistics.median(times[True]),
        "cost_without_hits": (metrics["prefix_cache_seconds"] - before) / elapsed,
        "hits": metrics["prefix_cache_hits"],
    }


BARE = "import torch"
ENGINE = """
from headrace import LLM, SamplingParams
llm = LLM("smollm2", dtype="bfloat16", kv_cache_memory="64MiB", max_model_len=2048, show_report=False)
llm.generate([list(range(100, 1100))] * 2, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
"""
RESIDENT = """
import re
print(sum(int(n) for n in re.findall(r"Rss(?:Anon|Shmem):\\s+(\\d+)", open("/proc/self/status").read())) * 1024)
"""


def measure_memory() -> dict[str, int]:
    """Memory of a process of its own, in bytes; pages of files, which the system can drop, are not counted."""

    def resident(code: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", code + RESIDENT], check=True, capture_output=True, text=True
        )
        return int(done.stdout)

    bare, engine = resident(BARE), resident(ENGINE)
    weights, pool = floors.SMOLLM2.weight_bytes, 64 << 20
    return {
        "bare": bare,
        "engine": engine,
        "weights": weights,
        "pool": pool,
        "over": engine - bare - weights - pool,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--models", default=",".join(SHAPES))
    arguments = parser.parse_args()
    requests = json.loads(floors.WORKLOAD.read_text())
    found: dict[str, Any] = {**provenance(), "load_average": os.getloadavg()[0], "models": {}}
    for model in arguments.models.split(","):
        found["models"][model] = measure_model(model, requests)
    found["prefix"] = measure_prefix(requests)
    found["memory"] = measure_memory()
    arguments.output.write_text(json.dumps(found, indent=2) + "\n")
    for model, figures in found["models"].items():
        shares = {name: statistics.median(shares) for name, shares in figures["of_floor"].items()}
        print(
            f"{model}: one stream {statistics.median(figures['single_tok_s']):.0f} tok/s "
            f"({shares['single_tok_s']:.0%} of the floor), workload "
            f"{statistics.median(figures['mixed_tok_s']):.0f} tok/s ({shares['mixed_tok_s']:.0%}); "
            f"prompt of {PROMPT} tokens {statistics.median(figures['prompt']['seconds']):.2f} s "
            f"({statistics.median(figures['prompt']['of_matrix_rate']):.0%} of the matrix rate)"
        )
        print("   ", ", ".join(f"{name} {s * 1e3:.0f} ms" for name, s in figures["prompt"]["split"].items()))
    prefix = found["prefix"]
    print(
        f"prefix: first tokens {prefix['ratio']:.1f} times sooner; without hits the cache takes "
        f"{prefix['cost_without_hits']:.2%} of the time"
    )
    print(f"memory: {found['memory']['over'] / 1e6:.0f} MB over torch, weights and KV pool")


if __name__ == "__main__":
    main()
