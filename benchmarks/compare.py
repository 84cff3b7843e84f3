"""Headrace and the engines a user would take instead, one after another, between two looks at the machine's floor.

    python benchmarks/compare.py [--only headrace,floor] [--repeat 3] [--output FILE.json]
    python benchmarks/compare.py --table

Each engine is a process of its own; peers run from the environments that `make peers` makes, and those that are not
set up, or fail, are told with the reason. A whole run writes `results/compare.json` and `results/compare.png`; one of
some engines writes where `--output` says, or nothing. `--table` runs nothing: it puts the last results into
`docs/performance.md`.

Nothing else should run meanwhile. Compare ratios within a run: figures of one machine at two times differ.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison import markdown, write_plot
from provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
PEERS = ROOT / "build" / "peers"
WORKLOAD = BENCHMARKS / "workloads" / "mixed48.json"
RESULTS = BENCHMARKS / "results" / "compare.json"
PAGE = ROOT / "docs" / "performance.md"
MODEL_FILE = PEERS / "models" / "smollm2.gguf"
MODEL_FOLDER = PEERS / "models" / "smollm2-bfloat16"
MARKS = re.compile(r"(<!-- compare: [^\n]*-->\n).*?(<!-- /compare -->)", re.DOTALL)

Environment = Callable[[Path], Mapping[str, str]]


@dataclass(frozen=True)
class Engine:
    """A row of the comparison."""

    name: str
    script: str
    """In `benchmarks/peers`."""
    model: str | Path
    """What it is given: an alias of Headrace, or what `make peers` made of the same weights."""
    peer: str | None = None
    """The environment in `build/peers`; None: the one this runs in."""
    environment: Environment = lambda venv: {}
    """What it needs in the process environment, given its own one's folder."""


def vllm_environment(venv: Path) -> dict[str, str]:
    """Return what makes vLLM fastest on few cores: all of them compute, with Intel's OpenMP where it is installed."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    library = next(iter(sorted(venv.rglob("libiomp5.so"))), None)
    return {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        **({"LD_PRELOAD": str(library)} if library else {}),
    }


ENGINES = (
    Engine("headrace", "run_headrace.py", "smollm2"),
    Engine("headrace-packed", "run_headrace_packed.py", "smollm2-q4"),
    Engine("vllm", "run_vllm.py", MODEL_FOLDER, "vllm", vllm_environment),
    Engine("vllm-defaults", "run_vllm.py", MODEL_FOLDER, "vllm"),
    Engine("openvino", "run_openvino.py", MODEL_FILE, "openvino"),
    Engine("llamacpp", "run_llamacpp.py", MODEL_FILE, "llamacpp"),
    Engine("transformers", "run_transformers.py", MODEL_FOLDER, "transformers"),
    Engine("transformers-continuous", "run_transformers_continuous.py", MODEL_FOLDER, "transformers"),
)
FLOOR = "floor"


def run_script(
    command: Sequence[str | Path], environment: Mapping[str, str], timeout: float
) -> dict[str, Any]:
    """Run a script that writes its figures to the file named by `--output`; return them, or `{"reason": text}`."""
    with tempfile.TemporaryDirectory(prefix="headrace-compare-") as folder:
        output = Path(folder) / "figures.json"
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(
                [*map(str, command), "--output", str(output)],
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                return {"reason": f"no result after {timeout:.0f} s"}
            finally:
                _end_group(process)
            if status == 0 and output.exists():
                figures: dict[str, Any] = json.loads(output.read_text())
                return figures
            log.seek(0)
            lines = [line.strip() for line in log if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    # Results are published: they hold no paths of this machine.
    last = last.replace(f"{ROOT}/", "").replace(str(Path.home()), "~")[:200]
    return {"reason": f"it ended with status {status}: {last}"}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process and its own processes, so that the next engine has the machine to itself."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def run_engine(engine: Engine, workload: Path, repeat: int, timeout: float) -> dict[str, Any]:
    """Return an engine's row."""
    _tell(engine.name)
    python, environment = Path(sys.executable), engine.environment(Path(sys.prefix))
    if engine.peer is not None:
        venv = PEERS / engine.peer
        if not (venv / "peer.stamp").exists():
            return {"engine": engine.name, "reason": f"not set up; make peers PEERS={engine.peer} does it"}
        python, environment = venv / "bin" / "python", engine.environment(venv)
    script = BENCHMARKS / "peers" / engine.script
    command = [python, script, engine.model, workload, "--repeat", str(repeat)]
    return {"engine": engine.name, **run_script(command, environment, timeout)}


def run_floor(workload: Path, timeout: float) -> dict[str, Any]:
    """Measure the floor. Raises `RuntimeError`: without it there is nothing to compare with."""
    _tell(FLOOR)
    found = run_script([sys.executable, BENCHMARKS / "floor.py", workload], {}, timeout)
    if "reason" in found:
        raise RuntimeError(f"the floor: {found['reason']}")
    return found


def _tell(name: str) -> None:
    print(f"{name} …", file=sys.stderr, flush=True)


def compare(names: Sequence[str], workload: Path, repeat: int, timeout: float) -> dict[str, Any]:
    """Run what is named, one after another, and return everything."""
    requests = json.loads(workload.read_text())
    results: dict[str, Any] = {
        **provenance(),
        "load_average": os.getloadavg()[0],
        "workload": {
            "file": workload.name,
            "requests": len(requests),
            "prompt_tokens": sum(len(request["prompt_ids"]) for request in requests),
            "output_tokens": sum(request["max_tokens"] for request in requests),
        },
        "repeat": repeat,
        "floor": {},
        "rows": [],
    }
    if FLOOR in names:
        results["floor"]["before"] = run_floor(workload, timeout)
    for engine in ENGINES:
        if engine.name in names:
            results["rows"].append(run_engine(engine, workload, repeat, timeout))
    if FLOOR in names:
        results["floor"]["after"] = run_floor(workload, timeout)
    return results


def fill(page: str, results: Mapping[str, Any]) -> str:
    """Return a page with the table between its marks. Raises `ValueError` where it has none, or two."""
    machine = results["machine"]
    changed = ", with changes" if results["changed"] else ""
    note = (
        f"{machine['processor']}, {machine['cores_allowed']} of {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB; {results['date'][:10]}, commit {results['commit'][:12]}"
        f"{changed}; `{results['workload']['file']}`, {results['repeat']} repetitions.\n"
    )
    filled, places = MARKS.subn(lambda match: f"{match[1]}{markdown(results)}\n{note}{match[2]}", page)
    if places != 1:
        raise ValueError(f"the page has {places} places for the table, not one")
    return filled


def selected(text: str | None) -> list[str]:
    """Return the names that `--only` gives, or all. Raises `ValueError` for a name that is none."""
    known = [FLOOR, *(engine.name for engine in ENGINES)]
    names = known if text is None else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only: there is no {', '.join(unknown)}; there are: {', '.join(known)}")
    return names


def main() -> None:
    """Compare, print the table, write figures and plot; or put the last table into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAMES", help="floor and engines, separated by commas")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="times each load is run")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="seconds for one engine")
    parser.add_argument("--workload", type=Path, default=WORKLOAD, metavar="FILE")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--table", action="store_true", help=f"put the last results into {PAGE.name}")
    arguments = parser.parse_args()
    if arguments.table:
        results = json.loads((arguments.output or RESULTS).read_text())
        PAGE.write_text(fill(PAGE.read_text(), results))
        return
    try:
        names = selected(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    results = compare(names, arguments.workload, arguments.repeat, arguments.timeout)
    print(markdown(results), end="")
    output = arguments.output or (RESULTS if arguments.only is None else None)
    if output is None:
        return
    output.write_text(json.dumps(results, indent=2) + "\n")
    try:
        write_plot(results, output.with_suffix(".png"))
    except ImportError:
        print("no plot: pip install matplotlib draws one", file=sys.stderr)


if __name__ == "__main__":
    main()
