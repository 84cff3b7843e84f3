"""The type check sees every file of every room: mypy on an editable install would see only some."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture
def small(tmp_path, root):
    """A small tree of the same shape, without an error in it."""
    (tmp_path / "pyproject.toml").write_text("[tool.mypy]\nstrict = true\n")
    for folder in ("src/headrace", "core"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").write_text('"""Docs."""\n')
    (tmp_path / "core" / "errors.py").write_text("ANSWER: int = 42\n")
    return tmp_path


def check(root, small) -> tuple[int, str]:
    command = [sys.executable, str(root / "tools" / "typecheck.py"), "--root", str(small)]
    done = subprocess.run(command, text=True, capture_output=True)
    return done.returncode, done.stdout + done.stderr


def test_a_clean_tree_passes(root, small):
    assert check(root, small) == (0, "Success: no issues found in 3 source files\n")


def test_a_wrong_type_in_a_room_is_found(root, small):
    """The module has the name of an installed one: mypy must read the tree's."""
    (small / "core" / "errors.py").write_text('ANSWER: int = "42"\n')
    status, output = check(root, small)
    assert status == 1
    assert "core/errors.py:1: error: Incompatible types" in output


def test_a_file_that_mypy_cannot_see_is_a_failure(root, small):
    (small / "pyproject.toml").write_text("[tool.mypy]\nstrict = true\nexclude = 'hidden'\n")
    (small / "core" / "hidden.py").write_text("ANSWER: int = 42\n")
    status, output = check(root, small)
    assert status == 1
    assert "mypy saw 3 files of the 4 in the rooms" in output
