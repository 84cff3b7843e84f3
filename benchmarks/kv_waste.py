"""How much KV memory paging wastes, against reserving a request's memory when it begins.

    python benchmarks/kv_waste.py [WORKLOAD.json] [--pool-tokens 8192] [--output benchmarks/results/kv_waste.json]

The real scheduler runs the workload over simulated memory, once for each way to allocate; no model is needed, for
what is held does not depend on what is said. A slot is room for the keys and values of one token. In each step

    allocated    slots of all blocks that are not free, those that wait for a step in flight included
    used         slots that hold a token once the step is done: nothing is counted that may come later

and waste is 1 - used / allocated, both summed over all steps. The prefix cache is off: blocks kept for others to find
would be counted neither way.

`paged` grants a block when a token needs it. The others hold what a request may come to from its first step on:
`reserved, exact` its prompt and output, as if its length were known; `reserved, power of two` that, rounded up;
`reserved, max_model_len` the longest there may be.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from provenance import provenance

from headrace.core.interfaces import EngineListener
from headrace.core.interfaces.build import KVCacheBuild
from headrace.core.interfaces.kv_cache import PrefixHit
from headrace.core.kv.manager import PagedKVCacheManager
from headrace.core.plan import StepPlan
from headrace.core.request import Request
from headrace.testing import Simulation, fake_layout

BENCHMARKS = Path(__file__).parent
WORKLOAD = BENCHMARKS / "workloads" / "mixed48.json"
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 64
BLOCK_SIZES = (8, 16, 32)
DEFAULT_BLOCK_SIZE = 16

Reserve = Callable[[Request], int]
"""How many slots a request holds from its first step on."""


class ReservingManager(PagedKVCacheManager):
    """Grants all that a request may come to with its first block."""

    def __init__(self, build: KVCacheBuild, reserve: Reserve) -> None:
        super().__init__(build)
        self._reserve = reserve

    def shortfall(self, request: Request, num_tokens: int) -> int:
        """Blocks `request` still lacks; before its first step, those of its whole reservation."""
        return super().shortfall(request, max(num_tokens, self._reserve(request)))

    def allocate(
        self, request: Request, num_tokens: int, *, lookahead: int = 0, hit: PrefixHit | None = None
    ) -> list[list[int]] | None:
        """Give `request` its reservation, or change nothing."""
        slots = max(num_tokens, self._reserve(request))
        return super().allocate(request, slots, lookahead=lookahead, hit=hit)


def power_of_two(request: Request) -> int:
    """The reservation of allocators that deal in powers of two."""
    return min(MAX_MODEL_LEN, 1 << (request.max_tokens_total - 1).bit_length())


RESERVATIONS: dict[str, Reserve] = {
    "reserved, exact": lambda request: request.max_tokens_total,
    "reserved, power of two": power_of_two,
    "reserved, max_model_len": lambda request: MAX_MODEL_LEN,
}


class Slots(EngineListener):
    """Counts, for each plan that computes: requests that hold blocks, slots allocated, slots used."""

    def __init__(self, block_size: int) -> None:
        self.running: list[int] = []
        self.allocated: list[int] = []
        self.used: list[int] = []
        self.num_preemptions = 0
        self.manager: PagedKVCacheManager | None = None
        """Whose blocks are counted; set when it is built."""
        self._block_size = block_size
        self._requests: dict[str, Request] = {}

    def on_add(self, request: Request) -> None:
        """Watch it."""
        self._requests[request.request_id] = request

    def on_finish(self, request: Request) -> None:
        """It holds nothing more."""
        del self._requests[request.request_id]

    def on_preempt(self, request: Request) -> None:
        """Count it."""
        self.num_preemptions += 1

    def on_plan(self, plan: StepPlan) -> None:
        """Count what is held and used in this step."""
        if self.manager is None or not plan.num_tokens:
            return
        holders = [request for request in self._requests.values() if request.block_ids]
        self.running.append(len(holders))
        self.allocated.append((self.manager.num_blocks - self.manager.num_free) * self._block_size)
        self.used.append(sum(request.num_scheduled for request in holders))


def simulate(
    requests: Sequence[dict[str, Any]], *, pool_tokens: int, block_size: int, reserve: Reserve | None = None
) -> dict[str, Any]:
    """Run the workload and return what it held and used. reserve: None is paged."""
    slots = Slots(block_size)

    def manager(build: KVCacheBuild) -> PagedKVCacheManager:
        made = PagedKVCacheManager(build) if reserve is None else ReservingManager(build, reserve)
        slots.manager = made
        return made

    simulation = Simulation(
        num_blocks=pool_tokens // block_size,
        layout=fake_layout(block_size=block_size),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=2048,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=False,
        listeners=[slots],
        manager=manager,
    )
    for index, request in enumerate(requests):
        simulation.add(str(index), request["prompt_ids"], max_tokens=request["max_tokens"], ignore_eos=True)
    simulation.run()
    peak = max(range(len(slots.allocated)), key=slots.allocated.__getitem__)
    return {
        "block_size": block_size,
        "waste": 1 - sum(slots.used) / sum(slots.allocated),
        "waste_at_peak": 1 - slots.used[peak] / slots.allocated[peak],
        "peak_allocated_slots": slots.allocated[peak],
        "mean_requests_at_once": statistics.fmean(slots.running),
        "max_requests_at_once": max(slots.running),
        "steps": len(slots.running),
        "preemptions": slots.num_preemptions,
    }


def measure(requests: Sequence[dict[str, Any]], pool_tokens: int) -> list[dict[str, Any]]:
    """Return a row for each way to allocate."""
    rows = []
    for size in BLOCK_SIZES:
        row = simulate(requests, pool_tokens=pool_tokens, block_size=size)
        rows.append({"allocation": f"paged, blocks of {size}", **row})
    for name, reserve in RESERVATIONS.items():
        row = simulate(requests, pool_tokens=pool_tokens, block_size=DEFAULT_BLOCK_SIZE, reserve=reserve)
        rows.append({"allocation": name, **row})
    return rows


def main() -> None:
    """Simulate, print a table, write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", type=Path, nargs="?", default=WORKLOAD)
    parser.add_argument("--pool-tokens", type=int, default=8192, help="slots of the whole KV cache")
    parser.add_argument("--output", type=Path, default=BENCHMARKS / "results" / "kv_waste.json")
    arguments = parser.parse_args()
    rows = measure(json.loads(arguments.workload.read_text()), arguments.pool_tokens)
    report = {
        **provenance(),
        "workload": arguments.workload.name,
        "pool_tokens": arguments.pool_tokens,
        "max_model_len": MAX_MODEL_LEN,
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(
        f"{'allocation':<26} {'waste':>6} {'at peak':>8} {'at once':>8} {'most':>5} {'steps':>6} {'preempted':>10}"
    )
    for row in rows:
        print(
            f"{row['allocation']:<26} {row['waste']:>6.1%} {row['waste_at_peak']:>8.1%} "
            f"{row['mean_requests_at_once']:>8.1f} {row['max_requests_at_once']:>5} {row['steps']:>6} "
            f"{row['preemptions']:>10}"
        )


if __name__ == "__main__":
    main()
