"""List files over 400 lines and functions over 60: rooms to split where they hold two ideas. Never an error."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("core", "backends", "models", "executors", "plugins", "src")
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60


def long_parts(path: Path) -> list[str]:
    """Return a line for the file and for each function in it that is too long."""
    text = path.read_text()
    name = path.relative_to(ROOT)
    count = len(text.splitlines())
    found = [f"{name}: {count} lines"] if count > MOST_FILE_LINES else []
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_FUNCTION_LINES:
                    found.append(f"{name}:{node.lineno}: {node.name} has {length} lines")
    return found


def main() -> None:
    """Print what is long, and the size of each room."""
    for room in ROOMS:
        files = [p for p in sorted((ROOT / room).rglob("*")) if p.suffix in {".py", ".cpp", ".h"}]
        lines = sum(len(path.read_text().splitlines()) for path in files)
        sys.stdout.write(f"{room}: {len(files)} files, {lines} lines\n")
        for path in files:
            for line in long_parts(path):
                sys.stdout.write(f"  {line}\n")


if __name__ == "__main__":
    main()
