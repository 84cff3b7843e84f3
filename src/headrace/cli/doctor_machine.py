"""What `headrace doctor` says of the machine: cores, memory, large pages, and how far native kernels go here."""

from __future__ import annotations

import os
from typing import Any

from headrace.backends.cpu.build import prebuilt_folders
from headrace.backends.cpu.compiler import KernelBuildError, find_compiler
from headrace.backends.cpu.isa import TIERS, choose_tier, why_not
from headrace.core.errors import ConfigError

__all__ = ["machine_facts", "native_facts"]


def machine_facts(advice: list[str]) -> dict[str, Any]:
    """Return cores, threads and memory; append what should be mended to `advice`."""
    from headrace.backends.cpu.arena import huge_pages_setting
    from headrace.executors.process import available_memory, choose_threads
    from headrace.executors.topology import read_topology

    topology = read_topology()
    threads = choose_threads(topology=topology)
    if threads.warning:
        advice.append(threads.warning)
    pages = huge_pages_setting()
    if pages == "never":
        advice.append(
            "transparent huge pages are off, which costs a third of the speed at which weights are read: write "
            "madvise to /sys/kernel/mm/transparent_hugepage/enabled"
        )
    return {
        "cores": os.cpu_count() or 1,
        "cores_allowed": topology.cores,
        "affinity": f"{len(topology.cpus)} of {topology.machine_cpus} CPUs",
        "memory_nodes": len(topology.nodes),
        "cpu_quota": topology.quota if topology.quota is not None else "none",
        "threads": threads.count,
        "threads_why": threads.why,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_available_bytes": available_memory(),
        "huge_pages": pages,
    }


def native_facts(advice: list[str]) -> dict[str, Any]:
    """Return the compiler and the instruction tier, and why it is not a higher one; append to `advice`."""
    prebuilt = [str(folder) for folder in prebuilt_folders() if any(folder.glob("*/*.so"))]
    facts: dict[str, Any] = {"compiler": "none", "prebuilt": ", ".join(prebuilt) or "none"}
    try:
        compiler = find_compiler()
        if compiler is None and not prebuilt:
            advice.append(
                "no C++ compiler found: install g++ or clang for native kernels; torch computes without them"
            )
        elif compiler is not None:
            facts["compiler"] = compiler.title
    except KernelBuildError as error:
        advice.append(str(error))
    try:
        chosen = choose_tier()
        facts["tier"] = "torch" if chosen is None else chosen.name
    except ConfigError as error:
        facts["tier"] = "none"
        advice.append(str(error))
    for tier in TIERS:
        facts[f"tier {tier.name}"] = ", ".join(why_not(tier)) or "can run here"
    return facts
