"""Tracked text speaks of the project alone: no path of one machine, no host of a package registry."""

from __future__ import annotations

import re
import subprocess

import pytest

# Joined here so that this file does not name them. The temporary folder is not among them: every machine has one.
FOLDERS = ("wo" + "rk", "ro" + "ot", "ho" + "me", "op" + "t", "Us" + "ers", "mn" + "t")
HOSTS = (
    "py" + "pi.org",
    "files.python" + "hosted.org",
    "registry." + "npmjs.org",
    "deb." + "debian.org",
    "download." + "pytorch.org",
    "proxy." + "golang.org",
    "crates" + ".io",
    "conda." + "anaconda.org",
)
MACHINE = r"(?<![\w.~<\]*/-])/(?:{})/".format("|".join(FOLDERS))
SIBLING = r"\.\./sha" + "red"
OUTSIDE = re.compile("|".join([MACHINE, SIBLING, *map(re.escape, HOSTS)]))


def test_no_text_names_what_is_outside(root):
    """Tracked files, and those about to be."""
    if not (root / ".git").exists():
        pytest.skip("not a git checkout: nothing is tracked")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    names = sorted({name for name in listed.decode().split("\0") if name})
    assert "pyproject.toml" in names
    found = []
    for name in names:
        path = root / name
        if not path.is_file():
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # not text
        found += [f"{name}:{i}: {line.strip()}" for i, line in enumerate(lines, 1) if OUTSIDE.search(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", [f"see /{FOLDERS[0]}/main", f'open("/{FOLDERS[2]}/me")', HOSTS[0], "../sha" + "red/x"]
)
def test_the_pattern_finds(text):
    assert OUTSIDE.search(text)


@pytest.mark.parametrize(
    "text", ["a framework/tool", "net/work/x", "docs/home/index.md", "/tmp/models", "/proc/self"]
)
def test_the_pattern_spares(text):
    assert not OUTSIDE.search(text)
