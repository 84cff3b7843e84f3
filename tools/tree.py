"""Rewrite the tree in ARCHITECTURE.md: every file of every room with the first sentence of its docstring."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
ROOMS = ("src/headrace", "plugins", "executors", "backends", "models", "core")
BORDERS = re.compile(r"(<!-- tree: [^\n]*-->\n```text\n).*?(```\n<!-- /tree -->)", re.DOTALL)


def phrase(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0].removesuffix(".")


def lines(folder: Path, name: str, depth: int) -> list[str]:
    """Return a folder's line, those of its files, then those of its folders."""
    indent = "  " * depth
    init = folder / "__init__.py"
    found = [f"{indent}{name + '/':<{30 - len(indent)}} {phrase(init) if init.exists() else ''}".rstrip()]
    indent += "  "
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path != init:
            found.append(f"{indent}{path.name:<{30 - len(indent)}} {phrase(path)}".rstrip())
    for path in sorted(folder.iterdir()):
        if path.is_dir() and any(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
            found += lines(path, path.name, depth + 1)
    return found


def wanted() -> str:
    """Return the page as it should be. Raises `ValueError` where the page has no place for the tree."""
    tree = "\n".join("\n".join(lines(ROOT / room, room, 0)) for room in ROOMS)
    page, places = BORDERS.subn(lambda match: f"{match[1]}{tree}\n{match[2]}", PAGE.read_text())
    if places != 1:
        raise ValueError(f"{PAGE.name} has {places} trees between its marks, not one")
    return page


def main() -> None:
    """Rewrite the page, or with `--check` only say by the exit status whether it is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if the tree is out of date"
    )
    if not parser.parse_args().check:
        PAGE.write_text(wanted())
    elif PAGE.read_text() != wanted():
        sys.exit(f"{PAGE.name}: the tree is out of date; `make format` rewrites it")


if __name__ == "__main__":
    main()
