"""Rewrite `constraints.txt`: every package that `.venv` gets, direct or not, at the newest version that fits.

A temporary environment is filled from `pyproject.toml` (dependencies, development tools, build backend) with torch
at the version named on the command line, and listed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = """\
# Every package of the development environment, direct or not. Rewritten by `make lock`; do not edit by hand.
# Local version labels such as +cpu are left out, so that any build of torch at this version fits.
"""


def requirements() -> list[str]:
    """Return what `pyproject.toml` asks for, in any of its lists."""
    file = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = file["project"]["optional-dependencies"].values()
    return [*file["build-system"]["requires"], *file["project"]["dependencies"], *chain(*extras)]


def pins(freeze: str) -> list[str]:
    """Turn `pip freeze` into sorted `name==version` lines. Raises `ValueError` for anything else in it."""
    lines = []
    for line in freeze.splitlines():
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^+\s]+)(\+\S+)?", line)
        if match is None:
            raise ValueError(f"a package without a version: {line!r}; the lock holds released packages only")
        lines.append(f"{re.sub(r'[-_.]+', '-', match[1]).lower()}=={match[2]}")
    return sorted(lines)


def main() -> None:
    """Fill a temporary environment and write what is in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--torch", required=True, help="version of torch, such as 2.13.0")
    torch = f"torch=={parser.parse_args().torch}"
    with tempfile.TemporaryDirectory(prefix="headrace-lock-") as folder:
        subprocess.check_call([sys.executable, "-m", "venv", folder])
        pip = [f"{folder}/bin/python", "-m", "pip"]
        install = [*pip, "install", "--quiet", "--no-input", "--disable-pip-version-check"]
        subprocess.check_call([*install, torch])
        subprocess.check_call([*install, torch, *requirements()])
        freeze = subprocess.check_output([*pip, "freeze", "--all", "--exclude", "pip"], text=True)
    (ROOT / "constraints.txt").write_text(HEADER + "".join(f"{pin}\n" for pin in pins(freeze)))


if __name__ == "__main__":
    main()
