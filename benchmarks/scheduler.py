"""What a step costs without a model: scheduler, KV accounting and loop around a fake executor.

    python benchmarks/scheduler.py [--output benchmarks/results/scheduler.json]

Three loads at 64 and at 1,000 running requests: steady decode, decode with every request crossing a block border,
and admission of long prompts in chunks. The figure is milliseconds a step: `schedule` and `update`, without the
fake executor's own time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from provenance import provenance

from headrace.core.interfaces.build import KVCacheBuild, SchedulerBuild
from headrace.core.kv.manager import PagedKVCacheManager
from headrace.core.plan import RequestResult, StepPlan, StepResult
from headrace.core.request import EngineRequest
from headrace.core.sampling_params import SamplingParams
from headrace.core.scheduler.policies import FCFSPolicy
from headrace.core.scheduler.scheduler import UnifiedScheduler
from headrace.testing import fake_layout

LIMITS_MS = {64: 1.0, 1000: 10.0}
BLOCK_SIZE = 16


def build(num_seqs: int, budget: int) -> UnifiedScheduler:
    """A scheduler with room for every request."""
    layout = fake_layout(block_size=BLOCK_SIZE)
    kv = PagedKVCacheManager(KVCacheBuild(layout, num_seqs * 80, True, budget))
    return UnifiedScheduler(
        SchedulerBuild(
            kv=kv,
            policy=FCFSPolicy(),
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=4096,
        )
    )


def answer(plan: StepPlan, lengths: dict[str, int]) -> StepResult:
    """What a worker would answer: one token for each request whose last known token is in the plan."""
    results = {}
    for entry in [*plan.new, *plan.continued]:
        end = entry.start + entry.count
        known = lengths.get(entry.request_id, 0)
        tokens = [7] if end >= known else []
        lengths[entry.request_id] = known + len(tokens)
        results[entry.request_id] = RequestResult(tokens=tokens, num_computed=end)
    return StepResult(step=plan.step, requests=results)


def measure(num_seqs: int, prompt_tokens: int, budget: int, steps: int, warm: int) -> list[float]:
    """Return milliseconds of each of `steps` steps after `warm` ones."""
    scheduler = build(num_seqs, budget)
    lengths: dict[str, int] = {}
    for i in range(num_seqs):
        name = f"request-{i}"
        lengths[name] = prompt_tokens
        scheduler.add(
            EngineRequest(
                request_id=name,
                prompt_token_ids=[(i * 31 + j) % 5000 for j in range(prompt_tokens)],
                params=SamplingParams(max_tokens=1000),
                arrival_time=float(i),
            )
        )
    times = []
    for step in range(warm + steps):
        started = time.perf_counter()
        plan = scheduler.schedule()
        spent = time.perf_counter() - started
        result = answer(plan, lengths)
        started = time.perf_counter()
        scheduler.update(plan, result)
        spent += time.perf_counter() - started
        if step >= warm:
            times.append(1000 * spent)
    return times


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "scheduler.json")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for num_seqs, limit in LIMITS_MS.items():
        for load, prompt, budget, steps, warm in (
            ("decode", 64, num_seqs * 64, 200, 2),
            ("long prompts in chunks", 512, 2048, num_seqs * 512 // 2048, 0),
        ):
            times = measure(num_seqs, prompt, budget, steps, warm)
            rows.append(
                {
                    "running": num_seqs,
                    "load": load,
                    "mean_ms": round(statistics.fmean(times), 3),
                    "median_ms": round(statistics.median(times), 3),
                    "max_ms": round(max(times), 3),
                    "limit_ms": limit,
                    "steps": len(times),
                }
            )
    report = {**provenance(), "rows": rows}
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{'running':>8} {'load':<24} {'mean ms':>8} {'median':>8} {'max':>8} {'limit':>6}")
    for row in rows:
        print(
            f"{row['running']:>8} {row['load']:<24} {row['mean_ms']:>8} {row['median_ms']:>8} {row['max_ms']:>8} "
            f"{row['limit_ms']:>6}"
        )


if __name__ == "__main__":
    main()
