"""How many threads compute: what affinity, cores, memory nodes, quotas and the user say."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from headrace.executors.process import choose_threads
from headrace.executors.topology import cpu_quota, read_topology

pytestmark = pytest.mark.alone  # threads are what it is about


def machine(root: Path, nodes: list[str], siblings: int = 2, **files: str) -> Path:
    """Describe a machine below a folder: memory nodes by CPU list, CPU n and n + half are one core's threads."""
    count = 0
    for number, cpus in enumerate(nodes):
        write(root / f"sys/devices/system/node/node{number}/cpulist", f"{cpus}\n")
        for part in cpus.split(","):
            count = max(count, int(part.rpartition("-")[2]) + 1)
    for cpu in range(count):
        first = cpu % (count // siblings)
        threads = ",".join(str(first + i * (count // siblings)) for i in range(siblings))
        write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", f"{threads}\n")
    for path, text in files.items():
        write(root / path, text)
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def threads(root: Path, cpus: set[int], workers: int = 1, **environ: str) -> int:
    return choose_threads(workers, read_topology(root, frozenset(cpus)), environ).count


def test_one_thread_a_physical_core_of_one_node(tmp_path):
    root = machine(tmp_path, ["0-7,16-23", "8-15,24-31"])
    topology = read_topology(root, frozenset(range(32)))
    assert (topology.cores, topology.nodes) == (16, {0: 8, 1: 8})
    assert threads(root, set(range(32))) == 8


@pytest.mark.parametrize(
    ("cpus", "count"),
    [
        ({0, 1}, 2),
        ({0, 16}, 1),  # two threads of one core
        ({0, 1, 8, 9, 10}, 3),  # node 1 has more
        ({5}, 1),
    ],
)
def test_affinity_counts_cores_not_hardware_threads(tmp_path, cpus, count):
    """Source: ollama/ollama#17916, llmmanorg/llmman#322."""
    assert threads(machine(tmp_path, ["0-7,16-23", "8-15,24-31"]), cpus) == count


def test_the_node_with_most_cores_is_the_first_of_equals(tmp_path):
    root = machine(tmp_path, ["0-7,16-23", "8-15,24-31"])
    assert read_topology(root, frozenset({0, 8})).node == 0
    assert read_topology(root, frozenset({0, 8, 9})).node == 1


def test_a_machine_that_describes_nothing_counts_cpus(tmp_path):
    assert threads(tmp_path, {0, 1, 2}) == 3
    write(tmp_path / "sys/devices/system/node/node0/cpulist", "0-1")
    assert read_topology(tmp_path, frozenset({0, 1, 2})).nodes == {0: 2, 1: 1}


V1 = {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/b/cpu.max": "100000 100000", "a/cpu.max": "400000 100000"}, 1.0),
        ("0::/kubepods/hidden", {"cpu.max": "300000 100000"}, 3.0),
        ("4:cpu,cpuacct:/a\n1:memory:/", {f"cpu,cpuacct/a/{name}": text for name, text in V1.items()}, 2.5),
        ("1:cpu:/docker/hidden", {f"cpu/{name}": text for name, text in V1.items()}, 2.5),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("1:memory:/\n0::/", {"unified/cpu.max": "50000 100000"}, 0.5),
        ("1:cpuset:/x", {"cpu.max": "100000 100000"}, None),
        ("0::/", {"cpu.max": "what"}, None),
        ("0::/", {"cpu.max": "100000 0"}, None),
        (None, {"cpu.max": "100000 100000"}, 1.0),
        (None, {}, None),
    ],
)
def test_the_quota_of_both_versions_of_control_groups(tmp_path, groups, files, quota):
    if groups is not None:
        write(tmp_path / "proc/self/cgroup", f"{groups}\n")
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    assert cpu_quota(tmp_path) == quota


def with_quota(root: Path, cpus: float) -> Path:
    write(root / "sys/fs/cgroup/cpu.max", f"{int(cpus * 100000)} 100000")
    write(root / "proc/self/cgroup", "0::/")
    return root


@pytest.mark.parametrize(("quota", "count"), [(2, 2), (2.9, 2), (0.5, 1), (64, 8)])
def test_the_quota_bounds_the_threads(tmp_path, quota, count):
    """Source: ollama/ollama#17916, llmmanorg/llmman#322: counted by the host's cores, speed collapses."""
    root = with_quota(machine(tmp_path, ["0-7,8-15"]), quota)
    assert threads(root, set(range(16))) == count
    why = choose_threads(topology=read_topology(root, frozenset(range(16))), environ={}).why
    assert f"the container's quota is {quota:g} CPUs" in why


@pytest.mark.parametrize(("workers", "each"), [(1, 4), (2, 2), (3, 1), (4, 1), (9, 1)])
def test_workers_share_what_is_allowed(tmp_path, workers, each):
    root = with_quota(machine(tmp_path, ["0-7,8-15"]), 4)
    assert threads(root, set(range(16)), workers) == each


def test_workers_may_use_all_nodes(tmp_path):
    root = machine(tmp_path, ["0-7,16-23", "8-15,24-31"])
    assert threads(root, set(range(32)), workers=2) == 8


def test_the_users_number_wins_and_a_number_too_high_is_a_warning(tmp_path):
    """Source: vllm-project/vllm#10971."""
    topology = read_topology(with_quota(machine(tmp_path, ["0-7,8-15"]), 4), frozenset(range(16)))
    assert choose_threads(topology=topology, environ={"OMP_NUM_THREADS": "3"}).count == 3
    assert choose_threads(topology=topology, environ={"OMP_NUM_THREADS": "4,2"}).warning == ""
    high = choose_threads(topology=topology, environ={"OMP_NUM_THREADS": "8"})
    assert high.count == 8
    assert high.warning.startswith("OMP_NUM_THREADS asks for 8 threads, more than the cores")
    assert "quota is 4 CPUs" in high.warning
    assert "4 would not" in high.warning
    shared = choose_threads(2, topology, {"OMP_NUM_THREADS": "4"})
    assert "4 threads in each of 2 workers" in shared.warning
    for nonsense in ("", "many", "0", "-2"):
        assert choose_threads(topology=topology, environ={"OMP_NUM_THREADS": nonsense}).count == 4


def test_what_is_said_at_start_names_what_changes_it(tmp_path):
    root = machine(tmp_path, ["0-7,16-23", "8-15,24-31"])
    why = choose_threads(2, read_topology(root, frozenset(range(32))), {}).why
    assert "16 physical cores allowed" in why
    assert "2 memory nodes, 8 cores on one" in why
    assert "2 workers share them" in why
    assert why.endswith("(OMP_NUM_THREADS changes it)")
    assert "affinity" in choose_threads(1, read_topology(root, frozenset({3})), {}).why or os.cpu_count() == 1


# A library's own threads spin for a moment when it is imported: a tenth of a second is not computing.
COMPUTE = """
import os, time
from pathlib import Path
from headrace.executors.process import set_threads
import torch
choice = set_threads()
x = torch.randn(1 << 20)
# Half a second of each thread's own time, which neighbours on the same cores do not take from.
end = time.process_time() + 0.5 * choice.count
while time.process_time() < end:
    torch.exp(x)
def ticks(task):
    return sum(map(int, (task / "stat").read_text().rpartition(")")[2].split()[11:13]))
busy = [task for task in Path("/proc/self/task").iterdir() if ticks(task) >= 20]
allowed = {frozenset(os.sched_getaffinity(int(task.name))) for task in busy}
print(choice.count, torch.get_num_threads(), len(busy), allowed == {frozenset(os.sched_getaffinity(0))})
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is Linux's")
@pytest.mark.parametrize("asked", [None, "3"])
@pytest.mark.parametrize("pinned", [True, False], ids=["one CPU", "all CPUs"])
def test_the_process_computes_with_the_threads_it_announced(asked, pinned):
    """Source: ollama/ollama#17916, vllm-project/vllm#10971. Processor time by thread, in a process of its own."""
    cpus = sorted(os.sched_getaffinity(0))[: 1 if pinned else None]
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMPUTE)],
        env={**environ, **({"OMP_NUM_THREADS": asked} if asked else {})},
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    chosen = asked or str(choose_threads(topology=read_topology(cpus=frozenset(cpus)), environ={}).count)
    assert done.stdout.split() == [chosen, chosen, chosen, "True"]
    assert bool(asked and len(cpus) < 3) == ("OMP_NUM_THREADS asks for 3 threads" in done.stderr)
