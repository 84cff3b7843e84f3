"""What choosing tokens costs: rows of logits over a vocabulary, with the op set's kernels and with the reference.

    python benchmarks/sampling.py [--output benchmarks/results/sampling.json] [--vocabulary 49152]

Each row is a request's. The two ways take turns, and a figure is the median of seven. `end to end` is the speed of 48
requests on SmolLM2, greedy and at temperature 1. All is on one thread and in processor time, which others on the
machine disturb least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

from headrace import LLM, SamplingParams
from headrace.backends.cpu.ops import CpuOps
from headrace.core.interfaces import LogitsRow
from headrace.core.plan import NewRequest
from headrace.core.stash import Stash
from headrace.executors import loading
from headrace.executors.sampler import Sampler, SamplingOps
from headrace.plugins.penalties import penalties

RESULTS = Path(__file__).parent / "results" / "sampling.json"
ROWS = (1, 64)
REPEATS = 7
TOKENS = 600
"""Known to each request: penalties look at them."""

MIXES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "top_k 20": {"top_k": 20},
    "top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_p 0.9": {"top_p": 0.9},
    "temperature 0.6, top_p 0.9": {"temperature": 0.6, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "penalties": {"temperature": 0, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    "logprobs 0": {"temperature": 0, "logprobs": 0},
    "logprobs 5": {"temperature": 0, "logprobs": 5},
    "temperature 1, logprobs 20": {"temperature": 1.0, "logprobs": 20},
}


def make_rows(mix: dict[str, Any], count: int, vocabulary: int) -> list[LogitsRow]:
    """Return rows of requests of their own."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (TOKENS,), generator=draw).numpy()
    return [
        LogitsRow(f"r{i}", SamplingParams(seed=i, **mix), Stash(), TOKENS // 2, TOKENS, tokens, TOKENS)
        for i in range(count)
    ]


def make_sampler(rows: Sequence[LogitsRow], vocabulary: int, ops: SamplingOps | None) -> Sampler:
    """Return a sampler that knows the rows' requests."""
    sampler = Sampler([("penalties", penalties, "penalties")], [], vocabulary, ops)
    for row in rows:
        sampler.add(
            NewRequest(
                request_id=row.request_id,
                token_ids=[0],
                num_prompt_tokens=1,
                params=row.params,
                start=0,
                count=1,
                block_ids=[[1]],
            )
        )
    return sampler


def measure(vocabulary: int) -> list[dict[str, Any]]:
    """Milliseconds of one slice of logits, by what is asked, rows, and way."""
    found = CpuOps()
    draw, score = found.get("draw"), found.get("score")
    if draw is None or score is None:
        raise SystemExit("the op set has no sampling")
    ways = {"reference": None, "kernels": SamplingOps(draw.fn, score.fn)}
    table = []
    for count in ROWS:
        logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(count)) * 3
        for name, mix in MIXES.items():
            rows = make_rows(mix, count, vocabulary)
            samplers = {way: make_sampler(rows, vocabulary, ops) for way, ops in ways.items()}
            times: dict[str, list[float]] = {way: [] for way in ways}
            tokens = set()
            for _ in range(REPEATS):
                for way, sampler in samplers.items():
                    own = logits.clone()
                    started = time.thread_time()
                    sampled = sampler.sample(rows, own)
                    times[way].append(1e3 * (time.thread_time() - started))
                    tokens.add(tuple(one.token_id for one in sampled))
            if len(tokens) != 1:
                raise SystemExit(f"{name}: the two ways draw different tokens")
            table.append(
                {"asked": name, "rows": count, **{way: statistics.median(t) for way, t in times.items()}}
            )
    return table


def end_to_end() -> dict[str, float]:
    """Output tokens a second of 48 requests, by what is asked and way."""
    prompts = [list(range(100 + i, 164 + i)) for i in range(48)]
    engines = {"kernels": _start(), "reference": _start_without()}
    runs = [
        ("greedy", 0.0, "kernels"),
        ("temperature 1", 1.0, "kernels"),
        ("temperature 1", 1.0, "reference"),
    ]
    times: dict[str, list[float]] = {}
    for repeat in range(4):
        for name, temperature, way in runs:
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=64, ignore_eos=True)
            started = time.process_time()
            engines[way].generate(prompts, params, use_tqdm=False)
            if repeat > 0:
                times.setdefault(f"{name}, {way}", []).append(time.process_time() - started)
    return {name: 48 * 64 / statistics.median(seconds) for name, seconds in times.items()}


def _start() -> LLM:
    return LLM("smollm2", dtype="bfloat16", max_model_len=512, kv_cache_memory="256MiB", show_report=False)


def _start_without() -> LLM:
    """An engine that samples without the op set."""
    before = loading.SamplingOps
    loading.SamplingOps = lambda *ops: SamplingOps()  # type: ignore[assignment, misc]
    try:
        return _start()
    finally:
        loading.SamplingOps = before  # type: ignore[misc]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # engines keep to it
    table = measure(arguments.vocabulary)
    rates = end_to_end()
    found = {**provenance(), "vocabulary": arguments.vocabulary, "tier": CpuOps().numerics, "rows": table}
    arguments.output.write_text(json.dumps({**found, "output_tok_s": rates}, indent=2) + "\n")
    print(f"{'asked':<28} {'rows':>4} {'reference ms':>13} {'kernels ms':>11} {'ratio':>6}")
    for row in table:
        print(
            f"{row['asked']:<28} {row['rows']:>4} {row['reference']:>13.2f} {row['kernels']:>11.2f} "
            f"{row['reference'] / row['kernels']:>6.1f}"
        )
    print("end to end:", ", ".join(f"{name}: {rate:.0f} tok/s" for name, rate in rates.items()))


if __name__ == "__main__":
    main()
