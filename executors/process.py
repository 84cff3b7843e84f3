"""What belongs to the process and not to one engine: compute threads, and memory. Set here and nowhere else."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from headrace.executors.topology import Topology, read_topology

__all__ = ["ThreadChoice", "available_memory", "choose_threads", "give_back_memory", "set_threads"]

logger = logging.getLogger("headrace")

THREADS_VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class ThreadChoice:
    """How many threads compute, and why.

    count: threads of this process.
    why: for the start-up report.
    asked: whether the user named the number.
    warning: what is wrong with a number that was asked for; empty where nothing is.
    """

    count: int
    why: str
    asked: bool = False
    warning: str = ""


def choose_threads(
    workers: int = 1, topology: Topology | None = None, environ: Mapping[str, str] = os.environ
) -> ThreadChoice:
    """Choose one thread a physical core of one memory node, within affinity and quota; `OMP_NUM_THREADS` wins.

    workers: processes that share the cores: together they get no more threads than there are cores, or one each.
    topology: None reads this machine's.
    """
    topology = topology or read_topology()
    total = topology.cores
    reasons = [f"{topology.cores} physical cores allowed"]
    if len(topology.cpus) != topology.machine_cpus:
        reasons.append(f"affinity holds {len(topology.cpus)} of {topology.machine_cpus} CPUs")
    if topology.quota is not None:
        total = max(1, min(total, int(topology.quota)))
        reasons.append(f"the container's quota is {topology.quota:g} CPUs")
    count = max(1, min(topology.nodes[topology.node], total // workers))
    if len(topology.nodes) > 1:
        reasons.append(f"{len(topology.nodes)} memory nodes, {topology.nodes[topology.node]} cores on one")
    if workers > 1:
        reasons.append(f"{workers} workers share them")
    asked = environ.get(THREADS_VARIABLE, "").partition(",")[0].strip()
    if not asked.isdigit() or int(asked) == 0:
        return ThreadChoice(count, f"{', '.join(reasons)} ({THREADS_VARIABLE} changes it)")
    warning = ""
    if int(asked) * workers > total:
        warning = (
            f"{THREADS_VARIABLE} asks for {asked} threads"
            + (f" in each of {workers} workers" if workers > 1 else "")
            + f", more than the cores there are for them ({', '.join(reasons)}): they will wait for each other; "
            f"{count} would not"
        )
    return ThreadChoice(int(asked), f"{THREADS_VARIABLE} says so; {', '.join(reasons)}", True, warning)


def available_memory() -> int:
    """Bytes that can still be used: the machine's, or the container's limit if that is lower."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass  # no container, or one that does not say
    return max(0, available)


def set_threads(workers: int = 1) -> ThreadChoice:
    """Let torch, and with it native kernels, compute with `choose_threads`; return what is in use.

    workers: processes that share the cores. A process has one pool of threads for all engines in it: a smaller
    number that was set before stays, which the choice then says, unless `OMP_NUM_THREADS` names one.
    """
    choice = choose_threads(workers)
    if choice.warning:
        logger.warning("%s", choice.warning)
    current = torch.get_num_threads()
    if current < choice.count and not choice.asked:
        return replace(choice, count=current, why=f"set in this process before; {choice.why}")
    if current != choice.count:  # torch itself cuts OMP_NUM_THREADS down to the machine's CPUs
        torch.set_num_threads(choice.count)
    return choice


def give_back_memory() -> None:
    """Return to the system what was freed: GNU's allocator keeps it, 150 MB after a small model was loaded."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # other C libraries on Linux have none
        trim(0)
