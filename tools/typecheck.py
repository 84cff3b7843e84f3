"""Run mypy over all rooms as the one package `headrace` that they become when installed.

`mypy -p headrace` on an editable install sees only `src/headrace` and reports success, so it is given a tree of
links, `build/typing/headrace`, and the check fails where mypy saw fewer files than there are.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOMS = ("core", "backends", "models", "executors", "plugins")


def link_tree(root: Path, target: Path) -> int:
    """Make `target/headrace` from links to the rooms; return how many Python files are in it."""
    package = target / "headrace"
    shutil.rmtree(target, ignore_errors=True)
    package.mkdir(parents=True)
    links = {path.name: path for path in (root / "src" / "headrace").iterdir() if path.name != "__pycache__"}
    links |= {room: root / room for room in ROOMS if (root / room).is_dir()}
    for name, path in links.items():
        (package / name).symlink_to(path.resolve())
    return sum(1 if path.suffix == ".py" else len(list(path.rglob("*.py"))) for path in links.values())


def mypy(root: Path, tree: Path, *arguments: str) -> tuple[int, int, str]:
    """Run mypy; return its exit status, how many files it says it checked, and its output."""
    config = root / "pyproject.toml"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(config), *arguments],
        cwd=tree,
        env={**os.environ, "MYPYPATH": str(tree), "MYPY_CACHE_DIR": str(root / ".mypy_cache")},
        text=True,
        capture_output=True,
    )
    output = done.stdout + done.stderr
    counts = re.findall(r"(\d+) source files?\)?$", output.strip())
    return done.returncode, int(counts[-1]) if counts else 0, output


def check(root: Path) -> int:
    """Check the rooms, then each package in `examples/plugins`; return an exit status."""
    tree = root / "build" / "typing"
    files = link_tree(root, tree)
    status, seen, output = mypy(root, tree, "-p", "headrace")
    sys.stdout.write(output)
    if seen < files and "errors prevented further checking" not in output:
        sys.stdout.write(f"typecheck: mypy saw {seen} files of the {files} in the rooms\n")
        status = status or 1
    for example in sorted((root / "examples" / "plugins").glob("*/")):
        code, seen, output = mypy(root, tree, "--exclude", "/(build|tests)/", str(example.resolve()))
        sys.stdout.write(f"{example.name}: {output}")
        status = status or code or int(seen == 0)
    return status


def main() -> None:
    """Check the repository this file is in, or the one named by `--root`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    sys.exit(check(parser.parse_args().root.resolve()))


if __name__ == "__main__":
    main()
