"""schemathesis on what a server says of itself: whatever is sent, it answers, and never with a fault of its own.

    python benchmarks/serving/fuzz_http.py [MODEL] [--cases 2000] [--output benchmarks/results/fuzz_http.json]
                                           [-- FLAGS OF headrace serve]

It starts `headrace serve` itself, with a short context, so that requests that happen to be right end soon. Runs go on
with one seed after another until there were so many cases. A server error fails it; so does a server that answers no
plain request afterwards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from served import Checks, end, write_results

from headrace.testing.serving import Server, serving

RESULTS = Path(__file__).resolve().parents[1] / "results" / "fuzz_http.json"
FLAGS = ("--max-model-len", "128")
CASES, EXAMPLES, MOST_RUNS = 2000, 250, 40
SHOWN = 20


def run(base_url: str, seed: int, examples: int, folder: Path) -> dict[str, Any]:
    """Run schemathesis once; return its report. Raises `RuntimeError` where it makes none."""
    report = folder / f"report-{seed}.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{base_url}/openapi.json"),
            *("--checks", "not_a_server_error", "--continue-on-failure", "--no-shrink", "--seed", str(seed)),
            *("--max-examples", str(examples), "--request-timeout", "60", "--suppress-health-check", "all"),
            *(
                "--report",
                "json",
                "--report-json-path",
                str(report),
                "--generation-database",
                "none",
                "--no-color",
            ),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if not report.exists():
        raise RuntimeError(
            f"schemathesis ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        )
    found: dict[str, Any] = json.loads(report.read_text())
    # What it says of a failure, with the request to send again, is in its text alone.
    found["text"] = done.stdout if found["failures"] or found["errors"] else ""
    return found


def fuzz(server: Server, checks: Checks, cases: int, examples: int = EXAMPLES) -> dict[str, Any]:
    """Run until there were so many cases, and look whether the server is well."""
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        while sum(found["test_cases"]["generated"] for found in runs) < cases and len(runs) < MOST_RUNS:
            runs.append(run(f"http://127.0.0.1:{server.port}", len(runs) + 1, examples, Path(folder)))
            print(f"seed {len(runs)}: {runs[-1]['test_cases']}", flush=True)
    total = sum(found["test_cases"]["generated"] for found in runs)
    failures = [failure for found in runs for failure in found["failures"]]
    errors = [error for found in runs for error in found["errors"]]
    checks.add("cases", total, f"at least {cases}", total >= cases)
    checks.add("kinds of server errors", len(failures), "0", not failures)
    checks.add("cases without an answer", len(errors), "0", not errors)
    status, _ = server.complete(prompt="The mill", max_tokens=4)
    checks.add("a plain request afterwards", status, "200", status == 200)
    server.wait_drained()
    return {
        "cases": total,
        "schemathesis": runs[0]["schemathesis_version"],
        "operations": runs[0]["operations"]["tested"],
        "failures": failures[:SHOWN],
        "errors": errors[:SHOWN],
        "said": [found["text"][-4000:] for found in runs if found["text"]][:3],
    }


def main() -> None:
    """Start a server, fuzz it, write what it came to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of headrace serve, behind --")
    arguments = parser.parse_args()
    flags = [*FLAGS, *arguments.flags]
    checks = Checks()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), *flags, model=arguments.model) as server,
    ):
        found = fuzz(server, checks, arguments.cases)
        ended = end(server)
    checks.add("exit status after SIGTERM", ended, "0", ended == 0)
    write_results(arguments.output, checks.all, {"model": arguments.model, "flags": flags, **found})


if __name__ == "__main__":
    main()
