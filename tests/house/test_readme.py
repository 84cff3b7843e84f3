"""A newcomer copies what README shows, and it works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest


def blocks(root: Path, language: str) -> list[str]:
    """Return README's fenced blocks of a language."""
    found = re.findall(
        rf"^```{language}\n(.*?)^```$", (root / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert found
    return found


def commands(root: Path) -> list[str]:
    """Return README's calls of `headrace`."""
    lines = "\n".join(blocks(root, "sh")).splitlines()
    return [line.removeprefix(".venv/bin/") for line in lines if line.startswith(".venv/bin/headrace ")]


def run(command: list[str], folder: Path) -> str:
    """Run a command in a folder, from this environment; return its standard output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_make_target_named_in_a_page_exists(root):
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"):
        named = re.findall(r"(?:^|`)make ([a-z-]+)", (root / page).read_text(), re.MULTILINE)
        assert set(named) <= targets, page


def test_every_file_linked_in_a_page_exists(root):
    for page in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"):
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (root / page).read_text())
        assert not [link for link in links if not (root / link).exists()], page


@pytest.mark.weights
@pytest.mark.slow
def test_the_python_examples_run_as_one_plain_script(root, tmp_path):
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks(root, "python")))
    output = run([sys.executable, str(script)], tmp_path)
    assert len(output.splitlines()) >= 4


@pytest.mark.weights
@pytest.mark.slow
def test_the_commands_run(root, tmp_path):
    (tmp_path / "engine.yaml").write_text("\n".join(blocks(root, "yaml")))
    shown = commands(root)
    assert len(shown) >= 5
    for command in shown:
        assert run(shlex.split(command), tmp_path).strip(), command
