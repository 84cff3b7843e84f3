"""The tree as the house tests see it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    "core": "core",
    "backends": "backends",
    "models": "models",
    "executors": "executors",
    "plugins": "plugins",
    "headrace": "src/headrace",
}


@dataclass(frozen=True)
class Source:
    """One Python file of a room and the name it is imported by."""

    path: Path
    room: str
    module: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    def at(self, node: ast.AST, text: str) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text}"


def room_sources(room: str, folder: Path) -> list[Source]:
    prefix = "headrace" if room == "headrace" else f"headrace.{room}"
    found = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found.append(Source(path, room, ".".join((prefix, *parts))))
    return found


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def rooms() -> dict[str, Path]:
    """Folders by the name of the room."""
    return {room: ROOT / folder for room, folder in ROOMS.items()}


@pytest.fixture(scope="session")
def sources(rooms: dict[str, Path]) -> list[Source]:
    """Every Python file of every room."""
    found = [source for room, folder in rooms.items() for source in room_sources(room, folder)]
    assert {source.room for source in found} == set(ROOMS)
    return found
