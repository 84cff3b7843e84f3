"""How OpenMP's threads wait for each other: told to its runtime in the environment, before torch loads it.

At the end of each parallel piece of work the quicker threads spin until the slowest is there. GNU's runtime spins
for milliseconds by default, which is quickest while nobody else wants the cores, and ruinous where somebody does: the
thread they wait for stands still while they spin in its place. A bound of some ten microseconds costs a little and
ends that. Measured on 2 cores with SmolLM2, tokens a second of one stream and of 32, alone and beside a busy process:

    turns of the loop     alone          beside a busy process
    300,000 (default)     235 / 1,940    -
     30,000               241 / 1,940     4 / 120
      1,000               220 / 1,950    60 / 880
          0                84 / 1,340   115 / 1,130
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["waiting_environ"]

SPIN_COUNT = 1000
"""Turns of the spinning loop."""


def waiting_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to an environment so that waiting is bounded; nothing where the user decided already."""
    if "OMP_WAIT_POLICY" in environ or "GOMP_SPINCOUNT" in environ:
        return {}
    return {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
