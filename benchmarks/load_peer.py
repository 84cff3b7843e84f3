"""Two load clients on one server: `headrace bench serve` and guidellm, which must tell the same within 10 %.

    python benchmarks/load_peer.py [--base-url URL] [--requests 96] [--concurrency 8] [--repeat 3]
                                   [--output benchmarks/results/load_peer.json]

guidellm 0.8 is set up once, in an environment of its own below `build/load-peer`; packages come from wherever pip is
configured to look. Both send the same prompts, the one as the ids that the server makes of the other's text, so many
at a time. They run in turn, and each run of the peer is held against the mean of ours before and after it, so that a
machine that drifts does not decide; the median of these shares must be within the limit. Without `--base-url`,
`headrace serve` is started, without a prefix cache: the first run would fill it for the others.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from provenance import provenance

from headrace.bench.remote import Server, text_ids
from headrace.testing.serving import serving

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "load_peer.json"
PEER = ROOT / "build" / "load-peer"
PEER_REQUIREMENT = "guidellm>=0.8,<0.9"
MODEL = "smollm2"
FLAGS = ("--max-model-len", "2048", "--no-enable-prefix-caching")
INPUT_LEN, OUTPUT_LEN = (32, 256), (32, 96)
"""Fewest and most tokens."""
WITHIN = 0.10
PEER_FIGURES = {
    "output_throughput": "output_tokens_per_second",
    "mean_ttft_ms": "time_to_first_token_ms",
    "mean_itl_ms": "inter_token_latency_ms",
}
"""Our key → the peer's metric whose mean is the same thing; its ITL is a mean over requests, each as heavy as it has
tokens after the first, which is the mean over all gaps."""


def set_up() -> Path:
    """Make the peer's environment, unless it is there; return its folder. Raises `CalledProcessError`."""
    stamp = PEER / "peer.stamp"
    # It needs torch to read a file of prompts. The version that is here has a build for this machine.
    torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    key = hashlib.sha256(f"{PEER_REQUIREMENT} {torch} {sys.version}".encode()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != key:
        stamp.unlink(missing_ok=True)
        print(f"setting up {PEER_REQUIREMENT} below {PEER.relative_to(ROOT)}", flush=True)
        subprocess.check_call([sys.executable, "-m", "venv", "--clear", str(PEER)])
        pip = [str(PEER / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-input"]
        subprocess.check_call([*pip, torch, PEER_REQUIREMENT])
        stamp.write_text(key)
    return PEER


def make_workload(server: Server, model: str, number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return prompts of random words as text and as the ids that the server makes of it, and lengths of answers."""
    draw = random.Random(seed)
    vocabulary = text_ids(server, model)
    found = []
    for _ in range(number):
        text = server.decode(model, draw.choices(vocabulary, k=draw.randint(*INPUT_LEN)))
        ids = server.encode(model, text)
        found.append({"prompt": text, "prompt_ids": ids, "max_tokens": draw.randint(*OUTPUT_LEN)})
    return found


def run_ours(
    url: str, model: str, workload: Sequence[Mapping[str, Any]], most: int, folder: Path
) -> dict[str, Any]:
    """Return the figures of `headrace bench serve`. Raises `CalledProcessError`."""
    requests, figures = folder / "workload.json", folder / "ours.json"
    requests.write_text(
        json.dumps([{"prompt_ids": r["prompt_ids"], "max_tokens": r["max_tokens"]} for r in workload])
    )
    subprocess.check_call(
        [
            *(sys.executable, "-m", "headrace", "bench", "serve", "--base-url", url, "--model", model),
            *("--dataset-path", str(requests), "--ignore-eos", "--max-concurrency", str(most)),
            *("--num-warmups", str(most), "--output-json", str(figures)),
        ]
    )
    found: dict[str, Any] = json.loads(figures.read_text())
    return found


def run_peer(
    peer: Path, url: str, model: str, workload: Sequence[Mapping[str, Any]], most: int, folder: Path
) -> dict[str, Any]:
    """Return the figures of guidellm, by our keys. Raises `CalledProcessError`."""
    data, scenario, report = folder / "data.jsonl", folder / "scenario.json", folder / "peer.json"
    with data.open("w") as file:
        for request in workload:
            counts = {
                "prompt_tokens_count": len(request["prompt_ids"]),
                "output_tokens_count": request["max_tokens"],
            }
            file.write(json.dumps({"prompt": request["prompt"], **counts}) + "\n")
    backend = {"kind": "openai_http", "target": url, "model": model, "request_format": "/v1/completions"}
    spec = {
        "backend": {**backend, "extras": {"body": {"temperature": 0}}},
        "profile": {"kind": "concurrent", "streams": [most]},
        "constraints": [{"kind": "max_requests", "count": len(workload)}],
        "data": [{"kind": "json_file", "path": str(data)}],
        "outputs": [{"kind": "json", "path": str(report)}],
        "metrics": {"kind": "generative", "sample_size": 0},
    }
    scenario.write_text(json.dumps({"spec": spec}))
    # One process sends, as with ours: the server needs the other cores. Counts are in the data: no tokenizer is read.
    own = {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.check_call(
        [str(peer / "bin" / "guidellm"), "run", "--config", str(scenario), "--disable-console"],
        env={**os.environ, **own},
        cwd=folder,
    )
    (found,) = json.loads(report.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    means = {ours: found["metrics"][theirs]["successful"]["mean"] for ours, theirs in PEER_FIGURES.items()}
    return {
        "completed": totals["successful"],
        "failed": totals["errored"] + totals["incomplete"],
        "duration": found["duration"],
        "total_output_tokens": found["metrics"]["output_token_count"]["successful"]["total_sum"],
        **means,
    }


def compare(
    ours: Sequence[Mapping[str, Any]], peer: Sequence[Mapping[str, Any]], number: int
) -> dict[str, Any]:
    """Return each figure of both, the peer's shares of ours, and whether they agree.

    ours: one run more than the peer's, which lie between them.
    """
    rows = {}
    for key in PEER_FIGURES:
        around = [(before[key] + after[key]) / 2 for before, after in pairwise(ours)]
        shares = [run[key] / mean for run, mean in zip(peer, around, strict=True)]
        rows[key] = {
            "ours": [run[key] for run in ours],
            "peer": [run[key] for run in peer],
            "peer_by_ours": shares,
            "median": statistics.median(shares),
            "agrees": abs(statistics.median(shares) - 1) <= WITHIN,
        }
    runs = [*ours, *peer]
    complete = all(run["completed"] == number and run["failed"] == 0 for run in runs)
    tokens = {int(run["total_output_tokens"]) for run in runs}
    return {
        "figures": rows,
        "all_completed": complete,
        "same_output_tokens": len(tokens) == 1,
        "passed": complete and len(tokens) == 1 and all(row["agrees"] for row in rows.values()),
    }


@contextlib.contextmanager
def reached(url: str | None) -> Iterator[str]:
    """Yield where the server is: the one named, or one that is started."""
    if url is not None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *FLAGS, model=MODEL) as server:
        yield f"http://127.0.0.1:{server.port}"


def main() -> None:
    """Set the peer up, run both, write what they say; exit with 1 where they do not agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", metavar="URL", help="a running server, best without a prefix cache")
    parser.add_argument("--requests", type=int, default=96, metavar="N")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of the peer")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    number, most = arguments.requests, arguments.concurrency
    peer = set_up()
    with reached(arguments.base_url) as url, tempfile.TemporaryDirectory() as name:
        folder, server = Path(name), Server(url)
        model, _ = server.model()
        workload = make_workload(server, model, number)
        ours, theirs = [run_ours(url, model, workload, most, folder)], []
        for _ in range(arguments.repeat):
            theirs.append(run_peer(peer, url, model, workload, most, folder))
            ours.append(run_ours(url, model, workload, most, folder))
    found = compare(ours, theirs, number)
    version = next((peer / "lib").glob("python*/site-packages/guidellm-*.dist-info")).name.split("-")[1]
    report = {
        **provenance(),
        "peer": f"guidellm {version.removesuffix('.dist')}",
        "model": model,
        "server": None if arguments.base_url else ["headrace", "serve", MODEL, *FLAGS],
        "requests": number,
        "concurrency": most,
        "input_tokens": ours[0]["total_input_tokens"],
        "output_tokens": ours[0]["total_output_tokens"],
        "client_cpu_s": [run["client_cpu_s"] for run in ours],
        **found,
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    for key, row in found["figures"].items():
        values = [", ".join(f"{value:.2f}" for value in row[who]) for who in ("ours", "peer")]
        print(f"{key}: ours {values[0]}; {report['peer']} {values[1]}: {row['median'] - 1:+.1%}")
    if not found["passed"]:
        sys.exit(
            f"they do not agree within {WITHIN:.0%}, or not all requests were served: see {arguments.output}"
        )


if __name__ == "__main__":
    main()
