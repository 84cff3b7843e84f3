"""The Makefile says what it does, and does nothing where nothing changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest


def environment() -> dict[str, str]:
    """What make is run with as by a user, not as a child of the make that runs these tests."""
    return {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}}


def make(root, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make as a user would."""
    return subprocess.run(["make", *arguments], cwd=root, env=environment(), text=True, capture_output=True)


def test_help_lists_every_target(root):
    phony = re.search(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    listed = [line.split()[1] for line in make(root, "help").stdout.splitlines()]
    assert phony is not None
    assert sorted(listed) == sorted(phony[1].split())


def test_setup_is_a_no_op_when_nothing_changed(root):
    python = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if subprocess.run([python, str(root / "tools" / "setup.py"), "--check"]).returncode != 0:
        pytest.skip(".venv was not made by `make setup` from what is here now")
    with subprocess.Popen(
        ["make", "setup", f"PYTHON={python}"], cwd=root, env=environment(), text=True, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert (process.returncode, said) == (0, "setup: .venv is up to date\n")
    assert usage.ru_utime + usage.ru_stime < 2, "processor time: the machine may stand still"


def test_ci_runs_the_same_targets(root):
    script = (root / ".ci" / "run").read_text()
    assert re.search(r"^make setup check test$", script, re.MULTILINE)
    assert os.access(root / ".ci" / "run", os.X_OK)


def test_the_pins_cover_the_requirements(root):
    """Every requirement by name; torch without a local label, so that any build of it fits."""
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", (root / "constraints.txt").read_text(), re.MULTILINE))
    text = (root / "pyproject.toml").read_text()
    wanted = re.findall(r'^ +"([A-Za-z0-9._-]+)(?:>=[^"]*)?",$', text, re.MULTILINE)
    assert len(wanted) > 20
    assert not [n for n in wanted if re.sub(r"[-_.]+", "-", n).lower() not in pins]
    assert "+" not in pins["torch"]
