"""Which proposer runs: at most one."""

from __future__ import annotations

from headrace.core.errors import ConfigError
from headrace.core.interfaces import Proposer
from headrace.core.interfaces.build import WorkerContext

__all__ = ["build_proposer"]


def build_proposer(context: WorkerContext) -> Proposer | None:
    """Ask every registered proposer whether the configuration wants it. Raises `ConfigError` if two say yes."""
    wanted: list[Proposer] = [
        proposer
        for entry in context.registry.entries("proposer")
        if (proposer := entry.factory(context)) is not None
    ]
    if len(wanted) > 1:
        raise ConfigError(
            f"two proposers are configured, {wanted[0].name!r} and {wanted[1].name!r}; one can run at a time"
        )
    return wanted[0] if wanted else None
