"""A file imports only from the floors below its own, by absolute names, and core from a short list of packages."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

import pytest

MAY_IMPORT = {
    "core": {"core"},
    "backends": {"backends", "core"},
    "models": {"models", "core"},
    "executors": {"executors", "core", "models"},  # a backend arrives as an object
    "plugins": {"plugins", "core", "models", "backends", "executors"},
    "headrace": {"headrace", "core", "models", "backends", "executors"},  # plugins by name only
}
CORE_PACKAGES = {
    "headrace",
    "pluggy",
    "pydantic",
    "pydantic_core",
    "msgspec",
    "packaging",
    "typing_extensions",
}


def imports(tree: ast.AST, typing_only: bool = False) -> Iterator[tuple[ast.stmt, str, bool]]:
    """Yield each import in a tree, at any depth: the statement, the dotted name, whether it is for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            if base == "headrace":  # `from headrace import core` imports headrace.core
                yield from ((node, f"headrace.{alias.name}", typing_only) for alias in node.names)
            elif base == "headrace.plugins":
                yield from ((node, f"headrace.plugins.{alias.name}", typing_only) for alias in node.names)
            else:
                yield node, base, typing_only
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from imports(ast.Module(node.body, []), True)
            yield from imports(ast.Module(node.orelse, []), typing_only)
        else:
            yield from imports(node, typing_only)


def room_of(name: str) -> str:
    """Return the room that a dotted name starting with `headrace` leads to."""
    second = name.split(".")[1:2]
    return second[0] if second and second[0] in MAY_IMPORT else "headrace"


def allowed_in_core(typing_only: bool) -> set[str]:
    """Return the packages of others that core may import; torch for annotations only."""
    return CORE_PACKAGES | sys.stdlib_module_names | ({"torch"} if typing_only else set())


def violations(room: str, module: str, tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Yield what a file imports and must not."""
    for node, name, typing_only in imports(tree):
        top = name.split(".")[0]
        if name.startswith("."):
            yield node, f"relative import {name}"
        elif top in MAY_IMPORT and top != "headrace":
            yield node, f"{name}: write headrace.{name}"
        elif top == "headrace":
            target = room_of(name)
            if target not in MAY_IMPORT[room]:
                yield node, f"{room} imports {name}"
            elif target == room == "plugins" and name.split(".")[2:3] != module.split(".")[2:3]:
                yield node, f"plugin {module} imports its sibling {name}"
        elif room == "core" and top not in allowed_in_core(typing_only):
            yield node, f"core imports {name}"


def test_every_import_goes_down(sources):
    found = [s.at(node, text) for s in sources for node, text in violations(s.room, s.module, s.tree)]
    assert not found, "\n".join(found)


def test_nobody_outside_the_rooms_names_a_room_bare(root):
    found = []
    for folder in ("tests", "benchmarks", "examples", "tools"):
        for path in sorted((root / folder).rglob("*.py")):
            for node, name, _ in imports(ast.parse(path.read_text())):
                top = name.split(".")[0]
                if top in MAY_IMPORT and top != "headrace":
                    found.append(f"{path.relative_to(root)}:{node.lineno}: {name}: write headrace.{name}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("room", "module", "code"),
    [
        ("core", "core.x", "import torch"),
        ("core", "core.x", "def f():\n    import numpy"),
        ("core", "core.x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy"),
        ("core", "core.x", "if TYPE_CHECKING:\n    from headrace.models.llama import Llama"),
        ("core", "core.x", "import headrace"),
        ("core", "core.x", "from .errors import ConfigError"),
        ("models", "models.x", "from headrace.backends.torch import ops"),
        ("backends", "backends.x", "from headrace import models"),
        ("executors", "executors.x", "import headrace.backends"),
        ("executors", "executors.x", "from core.request import Request"),
        ("plugins", "plugins.a", "from headrace.plugins.b import f"),
        ("plugins", "plugins.a.x", "from headrace.plugins import b"),
        ("plugins", "plugins.a", "from headrace import LLM"),
        ("headrace", "cli", "try:\n    import headrace.plugins.a\nexcept ImportError:\n    pass"),
    ],
)
def test_a_forbidden_import_is_seen(room, module, code):
    assert list(violations(room, f"headrace.{module}", ast.parse(code)))


@pytest.mark.parametrize(
    ("room", "module", "code"),
    [
        ("core", "core.x", "import pluggy, json\nif TYPE_CHECKING:\n    import torch"),
        ("models", "models.x", "import torch\nfrom headrace.models.layers import Norm"),
        (
            "plugins",
            "plugins.a.x",
            "from headrace.plugins.a.y import f\nfrom headrace.executors.runner import R",
        ),
        ("headrace", "cli", "import headrace\nfrom headrace.core.errors import ConfigError"),
    ],
)
def test_an_allowed_import_passes(room, module, code):
    assert not list(violations(room, f"headrace.{module}", ast.parse(code)))
