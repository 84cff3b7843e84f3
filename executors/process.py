"""What belongs to the process and not to one engine: compute threads. Set here and nowhere else."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil
import torch

__all__ = ["allowed_cores", "available_memory", "set_threads"]

logger = logging.getLogger("headrace")


def allowed_cores() -> int:
    """Physical cores this process may use: affinity and the container's quota included, at least 1."""
    logical = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    siblings = max(1, (psutil.cpu_count(logical=True) or 1) // (psutil.cpu_count(logical=False) or 1))
    cores = max(1, logical // siblings)
    quota = _cgroup_quota()
    return max(1, min(cores, int(quota))) if quota is not None else cores


def _cgroup_quota() -> float | None:
    """CPUs the container may use, or None where there is no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


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


def set_threads() -> int:
    """Let torch compute with one thread a physical core, unless the user's OMP_NUM_THREADS says otherwise.

    Returns the number in use. A process has one thread pool: where it is set already, it stays as it is.
    """
    current = torch.get_num_threads()
    wanted = allowed_cores()
    if "OMP_NUM_THREADS" in os.environ:
        if current > wanted:
            logger.warning("OMP_NUM_THREADS asks for %d threads on %d cores", current, wanted)
        return current
    if current > wanted:
        torch.set_num_threads(wanted)
    return torch.get_num_threads()
