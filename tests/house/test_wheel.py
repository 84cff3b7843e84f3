"""The wheel holds the tree: whatever lies in a room is installed, whatever its suffix."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROBES = ("probe.py", "probe.cpp", "probe.h", "probe.yaml", "probe.json", "probe.jinja", "py.typed")
BESIDE = ("pyproject.toml", "README.md", "LICENSE", ".gitignore")


def tree_files(rooms: dict[str, Path]) -> set[str]:
    """Return what should be installed, as paths below site-packages."""
    found = set()
    for room, folder in rooms.items():
        prefix = "headrace" if room == "headrace" else f"headrace/{room}"
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found.add(f"{prefix}/{path.relative_to(folder)}")
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory, root, rooms) -> tuple[set[str], set[str]]:
    """Build the wheel of a copy with a file of each kind added to each room; return files wanted and found."""
    copy = tmp_path_factory.mktemp("tree")
    for name in BESIDE:
        shutil.copy(root / name, copy / name)
    copied = {room: copy / folder.relative_to(root) for room, folder in rooms.items()}
    for room, folder in copied.items():
        shutil.copytree(rooms[room], folder, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "probes").mkdir()
        for probe in PROBES:
            (folder / "probes" / probe).write_text("\n")
    wheels = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", str(wheels), str(copy)], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        return tree_files(copied), set(wheel.namelist())


def test_the_wheel_holds_the_tree(built):
    wanted, found = built
    assert wanted == {name for name in found if ".dist-info/" not in name}
    assert len(wanted) > 6 * len(PROBES)


def test_the_wheel_holds_license_and_command(built):
    names = {name.split(".dist-info/")[1] for name in built[1] if ".dist-info/" in name}
    assert {"licenses/LICENSE", "entry_points.txt", "METADATA"} <= names


def test_gitignore_names_no_folder_of_a_room(root, rooms):
    """The build backend obeys it: a line `models/` would drop `headrace.models` from the wheel."""
    folders = {path.name for room in rooms.values() for path in [room, *room.rglob("*")] if path.is_dir()}
    lines = (root / ".gitignore").read_text().splitlines()
    patterns = {line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#")}
    assert not patterns & (folders - {"__pycache__"})
