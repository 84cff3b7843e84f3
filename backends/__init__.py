"""Attention backends and op sets, one folder each; they know the core's contracts and nothing else."""

from __future__ import annotations

__all__: list[str] = []
