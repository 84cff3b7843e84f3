"""How OpenMP's threads wait for each other: told to its runtime in the environment, before torch loads it.

At the end of each parallel piece of work the quicker threads spin until the slowest is there. GNU's runtime spins for
milliseconds by default, which is quickest while nobody else wants the cores, and slow without measure where somebody
does: the one they wait for stands still while they spin in its place. A bound of tens of microseconds costs nothing
measurable and ends that: loading a model beside one busy process took 13 s without it and 1.2 s with it (2 cores).
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["waiting_environ"]

SPIN_COUNT = 30_000
"""Turns of a spinning loop; about 50 microseconds."""


def waiting_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to an environment so that waiting is bounded; nothing where the user decided already."""
    if "OMP_WAIT_POLICY" in environ or "GOMP_SPINCOUNT" in environ:
        return {}
    return {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
