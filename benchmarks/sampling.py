"""What choosing tokens costs: rows of logits over a vocabulary, with the op set's kernels and with the reference.

    python benchmarks/sampling.py [--output benchmarks/results/sampling.json] [--vocabulary 49152]

Each row is a request's; one thread. The two ways take turns, and a figure is the median of seven. `end to end` is the
decode speed of 48 requests on SmolLM2, greedy and at temperature 1, with the kernels, on all threads.
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
                    started = time.perf_counter()
                    sampled = sampler.sample(rows, own)
                    times[way].append(1e3 * (time.perf_counter() - started))
                    tokens.add(tuple(one.token_id for one in sampled))
            if len(tokens) != 1:
                raise SystemExit(f"{name}: the two ways draw different tokens")
            table.append(
                {"asked": name, "rows": count, **{way: statistics.median(t) for way, t in times.items()}}
            )
    return table


def end_to_end() -> dict[str, float]:
    """Output tokens a second of 48 requests, by temperature."""
    prompts = [list(range(100 + i, 164 + i)) for i in range(48)]
    rates = {}
    with LLM("smollm2", dtype="bfloat16", max_model_len=512, show_report=False) as llm:
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=64, ignore_eos=True)
            times = []
            for _ in range(4):
                started = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                times.append(time.perf_counter() - started)
            rates[f"temperature {temperature:g}"] = 48 * 64 / statistics.median(times[1:])
    return rates


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    arguments = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    table = measure(arguments.vocabulary)
    torch.set_num_threads(threads)
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
