"""Which layers a quantized checkpoint left as they were, by the ways there are to name them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import MappingProxyType

__all__ = ["named_in"]

FUSED = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
)
"""A module that stacks others → what it stacks: a list may name either."""


def named_in(name: str, names: Iterable[str], *, parts: bool = False) -> bool:
    """Whether the layer `name` is in a list of names.

    An entry is a name, or a pattern behind `re:`. With `parts` it may also be some components of a name
    (`lm_head`, `layers.0`). An entry that names a stack stands for all of its parts.
    """
    parent, _, leaf = name.rpartition(".")
    stacks = [f"{parent}.{stack}" for stack, members in FUSED.items() if leaf in members]
    return any(_matches(one, entry, parts=parts) for entry in names for one in (name, *stacks))


def _matches(name: str, entry: str, *, parts: bool) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return name == entry or (parts and f".{entry}." in f".{name}.")
