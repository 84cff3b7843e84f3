"""What of the machine this process may use: cores, memory nodes, the container's quota. Read only, never set.

The system's files are read below a root, so that other machines' can be looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Topology", "cpu_quota", "read_topology"]

_ROOT = Path("/")


@dataclass(frozen=True)
class Topology:
    """The processors this process may run on.

    cpus: hardware threads in the affinity mask.
    nodes: physical cores that have one of those, by memory node; the nodes without any are left out.
    machine_cpus: hardware threads of the whole machine.
    quota: CPUs' worth of time the container may use, or None where there is no limit.
    """

    cpus: frozenset[int]
    nodes: dict[int, int]
    machine_cpus: int
    quota: float | None

    @property
    def cores(self) -> int:
        """Physical cores in the affinity mask, of all nodes."""
        return sum(self.nodes.values())

    @property
    def node(self) -> int:
        """The node with the most of them, the first of equals: threads that share memory stay on one."""
        return max(self.nodes, key=lambda node: (self.nodes[node], -node))


def read_topology(root: Path = _ROOT, cpus: frozenset[int] | None = None) -> Topology:
    """Read the machine's description.

    root: where `proc` and `sys` are. cpus: the affinity mask; None takes this process's.
    A system that does not describe its cores counts each hardware thread as one, in one node.
    """
    if cpus is None:
        cpus = _affinity()
    nodes: dict[int, int] = {}
    for node, members in _nodes(root, cpus):
        cores = {_siblings(root, cpu) for cpu in members & cpus}
        if cores:
            nodes[node] = len(cores)
    return Topology(cpus, nodes, max(os.cpu_count() or 1, len(cpus)), cpu_quota(root))


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _nodes(root: Path, cpus: frozenset[int]) -> list[tuple[int, frozenset[int]]]:
    found = []
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        found.append((int(path.name.removeprefix("node")), _cpu_list(_text(path / "cpulist"))))
    covered = frozenset[int]().union(*(members for _, members in found))
    # A virtual machine may describe no nodes, or not all: what is in none counts as one more.
    rest = [(len(found), cpus - covered)] if cpus - covered else []
    return sorted(found) + rest


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    """Return the hardware threads of a CPU's core: the same set for each of them."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    text = _text(folder / "core_cpus_list") or _text(folder / "thread_siblings_list")
    return _cpu_list(text) or frozenset({cpu})


def _cpu_list(text: str) -> frozenset[int]:
    """Return the numbers of a list such as `0-3,8,10-11`."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the CPUs' worth of time this process may use: the least of its control groups; None without a limit."""
    limits = [limit for folder in _groups(root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups and of all above them, version 1 and 2.

    A container may see its own group as the top, or see the host's path of a folder that it cannot see: folders that
    are not there are passed over on the way up.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            tops = [mounts, mounts / "unified"]
        elif "cpu" in controllers.split(","):
            tops = [mounts / controllers, mounts / "cpu"]
        else:
            continue
        group = Path(path.lstrip("/"))
        for top in tops:
            yield from (top / part for part in (group, *group.parents))


def _limit(folder: Path) -> float | None:
    """Return one group's own limit, of version 2 or 1."""
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None  # "max" and -1 say that there is no limit
    return int(quota) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
