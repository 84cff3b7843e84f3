"""Terms that a user accepts once, before a model that is given under them is fetched."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import CheckpointError
from headrace.models.sources.cache import cache_folder

__all__ = ["GEMMA", "Terms", "accepted", "require_acceptance"]

VARIABLE = "HEADRACE_ACCEPT_LICENSE"
"""Environment variable: names of terms that are accepted, with commas between."""


@dataclass(frozen=True)
class Terms:
    """Terms of use."""

    name: str
    """What a user writes to accept them."""
    title: str
    url: str


GEMMA = Terms("gemma", "Gemma Terms of Use", "https://ai.google.dev/gemma/terms")


def accepted(terms: Terms) -> bool:
    """Whether the user accepted them before, or does so in the environment."""
    return terms.name in _named_in_environment() or _marker(terms).is_file()


def require_acceptance(terms: Terms, model: str, given: Collection[str] = ()) -> None:
    """Return where the terms are accepted, and remember it in the cache folder.

    model: the name to pull; given: names of terms that the caller accepts.
    Raises `CheckpointError` saying where the terms are and how they are accepted.
    """
    if _marker(terms).is_file():
        return
    if terms.name not in {*given, *_named_in_environment()}:
        other = f" ({', '.join(sorted(given))} was accepted, which is not asked for)" if given else ""
        raise CheckpointError(
            f"{model} comes under the {terms.title}, which you must accept first{other}: read {terms.url}, then run "
            f"`headrace pull {model} --accept-license {terms.name}`, or set {VARIABLE}={terms.name}"
        )
    # A cache folder that cannot be written asks again next time.
    with contextlib.suppress(OSError):
        _marker(terms).parent.mkdir(parents=True, exist_ok=True)
        _marker(terms).write_text(f"{terms.title}: {terms.url}\n", encoding="utf-8")


def _marker(terms: Terms) -> Path:
    return cache_folder() / "accepted" / terms.name


def _named_in_environment() -> set[str]:
    return {name.strip() for name in os.environ.get(VARIABLE, "").split(",")}
