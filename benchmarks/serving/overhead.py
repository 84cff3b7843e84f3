"""What serving costs over the same engine called from a program: CPU, throughput, time between tokens.

    python benchmarks/serving/overhead.py [--rounds 5] [--output benchmarks/results/serve_overhead.json]

The same random requests, greedy and of exact lengths, go to `LLM.generate` in a process of its own and to
`headrace serve` over HTTP, by turns, so that a machine whose speed drifts treats both alike. Medians of the rounds
are compared. The load client takes CPU from the server where both share the cores; how much is told, and its share is
taken off. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from served import Checks, end, write_results

from headrace.bench.payloads import APIS, Prompt, body
from headrace.bench.serving import Load, Run, run_load
from headrace.bench.workloads import random_requests
from headrace.testing.serving import Server, serving

RESULTS = Path(__file__).resolve().parents[1] / "results" / "serve_overhead.json"
MODEL = "smollm2"
CLIENTS = 32
REQUESTS = 64
INPUT, OUTPUT = 64, 128
VOCABULARY = 49_152
MAX_CPU = 1.10
MIN_THROUGHPUT = 0.90
MAX_ADDED_MS = 2.0
OPTIONS = {"max_num_seqs": CLIENTS, "enable_prefix_caching": False, "max_model_len": 1024}


def requests(count: int, seed: int) -> list[Any]:
    """The workload of a round."""
    return random_requests(count, list(range(100, VOCABULARY)), input_len=INPUT, output_len=OUTPUT, seed=seed)


def offline() -> None:
    """The child: read rounds from standard input, and answer each with a line."""
    import time

    from headrace import LLM, SamplingParams

    llm = LLM(MODEL, show_report=False, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    llm.generate([[200] * INPUT], params, use_tqdm=False)
    for line in sys.stdin:
        seed = int(line)
        many = [request.prompt_token_ids for request in requests(REQUESTS, seed)]
        cpu, begun = time.process_time(), time.perf_counter()
        llm.generate(many, params, use_tqdm=False)
        told = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
        times = []
        for _ in llm.stream(many[0], params):
            times.append(time.perf_counter())
        told["itl_ms"] = 1000 * statistics.median(b - a for a, b in pairwise(times))
        print(json.dumps(told), flush=True)


def cpu_seconds(server: Server) -> dict[str, float]:
    """CPU seconds of the server's processes so far, by name."""
    children = psutil.Process(server.process.pid).children()
    return {child.cmdline()[0]: sum(child.cpu_times()[:2]) for child in children}


def load(server: Server, count: int, seed: int, clients: int) -> Run:
    """Send requests to the server."""
    prompts = [Prompt(r.prompt_token_ids, INPUT, r.max_tokens) for r in requests(count, seed)]
    api = APIS["openai"]
    bodies = [body(api, MODEL, prompt, {"temperature": 0, "ignore_eos": True}) for prompt in prompts]
    url = f"http://127.0.0.1:{server.port}{api.endpoint}"
    headers = {"Content-Type": "application/json"}
    run = run_load(Load(url, headers, [0.0] * count, max_concurrency=clients), prompts, bodies)
    failed = [answer.error for answer in run.answers if answer.error]
    if failed:
        sys.exit(f"{len(failed)} requests failed: {failed[0]}")
    return run


def served(server: Server, seed: int) -> dict[str, Any]:
    """One round over HTTP."""
    before = cpu_seconds(server)
    run = load(server, REQUESTS, seed, CLIENTS)
    after = cpu_seconds(server)
    [alone] = load(server, 1, seed, 1).answers
    gaps = [b - a for a, b in pairwise(alone.times)]
    chunks = [len(answer.times) for answer in run.answers]
    return {
        "seconds": run.duration,
        "cpu": {name: after[name] - before[name] for name in after},
        "client_cpu": run.client_cpu_s,
        "itl_ms": 1000 * statistics.median(gaps),
        "chunks_per_token": sum(chunks) / (REQUESTS * OUTPUT),
    }


def main() -> None:
    """Run the rounds, compare, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline:
        offline()
        return
    child = subprocess.Popen(
        [sys.executable, __file__, "--offline"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    rounds: list[dict[str, Any]] = []
    flags = ["--max-num-seqs", str(CLIENTS), "--no-enable-prefix-caching", "--max-model-len", "1024"]
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *flags, model=MODEL) as server:
        load(server, 4, 1000, 4)
        for seed in range(args.rounds):
            child.stdin.write(f"{seed}\n")
            child.stdin.flush()
            rounds.append({"offline": json.loads(child.stdout.readline()), "served": served(server, seed)})
            print(json.dumps(rounds[-1]), flush=True)
        end(server)
    child.stdin.close()
    child.wait()
    tokens, cores = REQUESTS * OUTPUT, len(os.sched_getaffinity(0))

    def median(of: Any) -> float:
        return statistics.median(of(one) for one in rounds)

    cpu = median(lambda one: sum(one["served"]["cpu"].values()) / one["offline"]["cpu"])
    # What the client took of the cores it shares with the server, as wall time of all of them.
    share = median(
        lambda one: (
            one["offline"]["seconds"] / (one["served"]["seconds"] - one["served"]["client_cpu"] / cores)
        )
    )
    plain = median(lambda one: one["offline"]["seconds"] / one["served"]["seconds"])
    added = median(lambda one: one["served"]["itl_ms"] - one["offline"]["itl_ms"])
    chunks = median(lambda one: one["served"]["chunks_per_token"])
    checks = Checks()
    checks.add("CPU seconds a token, served over offline", round(cpu, 3), f"<= {MAX_CPU}", cpu <= MAX_CPU)
    checks.add(
        "throughput, served over offline, the client's share taken off",
        round(share, 3),
        f">= {MIN_THROUGHPUT}; {plain:.3f} as it is",
        share >= MIN_THROUGHPUT,
    )
    checks.add(
        "milliseconds added between tokens of one stream",
        round(added, 3),
        f"<= {MAX_ADDED_MS}",
        added <= MAX_ADDED_MS,
    )
    checks.add("chunks a token and client", chunks, "= 1", chunks == 1)
    figures = {
        "clients": CLIENTS,
        "tokens": tokens,
        "offline_tokens_per_second": median(lambda one: tokens / one["offline"]["seconds"]),
        "served_tokens_per_second": median(lambda one: tokens / one["served"]["seconds"]),
        "offline_cpu_us_per_token": median(lambda one: 1e6 * one["offline"]["cpu"] / tokens),
        "api_cpu_us_per_token": median(lambda one: 1e6 * one["served"]["cpu"]["headrace-api-0"] / tokens),
        "client_cpu_us_per_token": median(lambda one: 1e6 * one["served"]["client_cpu"] / tokens),
        "offline_itl_ms": median(lambda one: one["offline"]["itl_ms"]),
        "served_itl_ms": median(lambda one: one["served"]["itl_ms"]),
        "rounds": rounds,
    }
    write_results(args.output, checks.all, figures)


if __name__ == "__main__":
    main()
