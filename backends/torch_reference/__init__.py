"""The reference: attention and ops in plain torch, on any device torch has."""

from __future__ import annotations

__all__: list[str] = []
