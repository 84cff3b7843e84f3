"""The Dockerfile's steps, run without Docker in a folder that stands for the image's root.

What differs from a real build, and so is not proved here: there is no base image, so `apt-get`, `useradd` and `chown`
are left out (the compiler is this machine's; the user is a number, or root without rights where Python lies in root's
folder); the Python is the one that runs the tests; `pip` may not go to an index, and finds torch and the other
requirements installed already, through one path file in the new environment; both stages share one root. What is the
same: the order of the steps, what is copied, the wheel that is built and installed, kernels of every tier, and a
start without root's rights, without a compiler, with nothing writable but the cache folder (by file modes, not by a
mount).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.backends.cpu.compiler import find_compiler
from headrace.backends.cpu.isa import TIERS, supported_tiers

LEFT_OUT = ("apt-get", "useradd", "chown", "rm -rf /var/lib/apt/lists/*")
"""Commands that change the machine they run on."""


def instructions(text: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions, lines joined, comments dropped."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in joined.splitlines()]


@pytest.fixture(scope="module")
def steps(root: Path) -> list[tuple[str, str]]:
    return instructions((root / "Dockerfile").read_text())


def arguments(steps: list[tuple[str, str]], name: str) -> list[str]:
    return [text for found, text in steps if found == name]


def test_what_is_copied_is_there(root, steps):
    copied = [shlex.split(text) for text in arguments(steps, "COPY") if "--from" not in text]
    assert len(copied) > 5
    assert not [name for *names, _ in copied for name in names if not (root / name).exists()]


def test_every_room_is_copied(steps, rooms, root):
    copied = {name for text in arguments(steps, "COPY") for name in text.split()[:-1]}
    assert {folder.relative_to(root).parts[0] for folder in rooms.values()} <= copied


def test_the_image_runs_without_root_and_writes_to_its_volume_alone(steps):
    last = steps[max(i for i, (name, _) in enumerate(steps) if name == "FROM") :]
    (user,), (volume,) = arguments(last, "USER"), arguments(last, "VOLUME")
    assert int(user) > 0
    assert f"--uid {user} " in " ".join(arguments(last, "RUN"))
    environment = dict(pair.split("=", 1) for text in arguments(last, "ENV") for pair in shlex.split(text))
    assert environment["HEADRACE_CACHE"] == environment["HOME"] == volume
    assert "g++" not in " ".join(text for _, text in last)


@dataclass
class Image:
    """A folder that stands for `/`, and what the steps have said so far."""

    root: Path
    places: list[str]
    environment: dict[str, str]
    workdir: str = "/"
    entry: list[str] = field(default_factory=list)

    def inside(self, text: str) -> str:
        """Return a text with the image's own absolute paths moved below the root."""
        places = "|".join(map(re.escape, sorted(self.places, key=len, reverse=True)))
        return re.sub(rf"(?<![\w./])({places})(?=[/:\s]|$)", lambda match: f"{self.root}{match[1]}", text)

    def run(self, text: str) -> None:
        """Run what of a step does not change this machine."""
        wanted = [c.strip() for c in text.split("&&") if not c.strip().startswith(LEFT_OUT)]
        if not wanted:
            return
        command = self.inside(" && ".join(wanted))
        done = subprocess.run(
            ["sh", "-ec", command],
            cwd=self.inside(self.workdir),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if "-m venv " in text:
            self.add_requirements(Path(self.inside(text.split()[-1])))

    def add_requirements(self, environment: Path) -> None:
        """Let a new environment see what is installed here."""
        torch = importlib.util.find_spec("torch")
        assert torch is not None
        assert torch.origin is not None
        (packages,) = environment.glob("lib/python*/site-packages")
        for bundled in packages.glob("setuptools*"):  # older than the pins; pip would fetch the pinned one
            shutil.rmtree(bundled)
        (packages / "requirements.pth").write_text(f"{Path(torch.origin).parents[1]}\n")

    def copy(self, tree: Path, text: str) -> None:
        """Copy from the tree; between the stages, which share this root, there is nothing to do."""
        if text.startswith("--from"):
            return
        *names, target = text.split()
        to = Path(self.inside(self.workdir), target)
        for name in names:
            if (tree / name).is_dir():
                shutil.copytree(tree / name, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(tree / name, to / name)

    def apply(self, tree: Path, name: str, text: str) -> None:
        """Follow one instruction."""
        if name == "RUN":
            self.run(text)
        elif name == "COPY":
            self.copy(tree, text)
        elif name == "WORKDIR":
            self.workdir = text
            Path(self.inside(text)).mkdir(parents=True, exist_ok=True)
        elif name == "ENV":
            pairs = (pair.split("=", 1) for pair in shlex.split(text))
            self.environment |= {key: self.inside(value) for key, value in pairs}
        elif name in ("ENTRYPOINT", "CMD"):
            self.entry += json.loads(text)
        else:
            assert name in ("FROM", "ARG", "USER", "VOLUME"), f"unknown instruction {name}"


def own_paths(steps: list[tuple[str, str]]) -> list[str]:
    """Return the absolute paths the image is made of: working folders, volumes, what is copied between stages."""
    named = [*arguments(steps, "WORKDIR"), *arguments(steps, "VOLUME")]
    return named + [text.split()[-1] for text in arguments(steps, "COPY") if text.startswith("--from")]


@pytest.fixture(scope="module")
def image(root: Path, steps: list[tuple[str, str]]) -> Iterator[Image]:
    """All steps followed, then everything but the cache folder made read-only."""
    if find_compiler() is None:
        pytest.skip("no C++ compiler here, and apt-get is left out")
    folder = Path(tempfile.mkdtemp(prefix="image-"))  # not pytest's, which no other user may enter
    folder.chmod(0o755)
    ours = ("PIP_", "HEADRACE_", "PYTHON")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    # pip reads PIP_NO_BUILD_ISOLATION=0 as no isolation: the build backend is the one installed here.
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_CONFIG_FILE": os.devnull}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    made = Image(folder, own_paths(steps), inherited | offline | {"PATH": path})
    try:
        for name, text in steps:
            if name == "RUN" and "kernels build" in text:
                with_a_kernel(made)
            made.apply(root, name, text)
        (volume,) = arguments(steps, "VOLUME")
        set_writable(folder, False)
        Path(made.inside(volume)).chmod(0o777)
        yield made
    finally:
        set_writable(folder, True)
        shutil.rmtree(folder)


def with_a_kernel(image: Image) -> None:
    """Give the installed package one small kernel, if it has none."""
    (package,) = image.root.glob("usr/local/headrace/lib/python*/site-packages/headrace/backends/cpu")
    if not list(package.glob("csrc/*.cpp")):
        (package / "csrc").mkdir()
        (package / "csrc" / "one.cpp").write_text('extern "C" int one() { return 1; }\n')


def set_writable(folder: Path, writable: bool) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            path.chmod(mode | 0o200 if writable else mode & ~0o222)


def as_user(user: int) -> list[str]:
    """Return the prefix that takes root's rights away: another user; or root without them, where Python is root's."""
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("run as root, and no setpriv here to become less")
    other = [setpriv, f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    done = subprocess.run([*other, sys.executable, "-S", "-c", ""], capture_output=True)
    return other if done.returncode == 0 else [setpriv, "--inh-caps=-all", "--bounding-set=-all"]


def start(image: Image, user: int, *command: str) -> str:
    """Run a command as the image's user, with no other programs than the image's own."""
    programs = image.inside("/usr/local/headrace/bin")
    done = subprocess.run(
        [*as_user(user), f"{programs}/{command[0]}", *command[1:]],
        cwd="/",
        env=image.environment | {"PATH": programs},
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


USE = """
import json, sys
from pathlib import Path
import headrace
from headrace.backends.cpu.build import build_package_kernels, load_kernels
from headrace.core.folders import cache_folder
kernels = build_package_kernels()
load_kernels(kernels)
(cache_folder() / "written").write_text("x")
try:
    Path(sys.prefix, "written").write_text("x")
except OSError:
    print(json.dumps([headrace.__file__, str(kernels)]))
"""


@pytest.mark.slow
def test_the_steps_make_an_image_that_starts(image, steps):
    (user,) = map(int, arguments(steps, "USER"))
    listed = start(image, user, "headrace", "kernels", "list")
    assert [line.split("\t")[:2] for line in listed.splitlines()] == [
        # The backend's own kernels, and those of adapters.
        ["prebuilt", name]
        for name in sorted(tier.name for tier in TIERS)
        for _ in range(2)
    ]
    report = start(image, user, *image.entry, "--json")
    facts = json.loads(report)
    assert facts["native"]["compiler"] == "none"
    assert facts["native"]["tier"] == supported_tiers()[0].name
    assert facts["cache"]["writable"]
    assert not [line for line in facts["advice"] if "compiler" in line or "cache" in line]
    package, kernels = json.loads(start(image, user, "python", "-c", USE))
    assert Path(package).is_relative_to(image.root)
    assert Path(kernels).is_relative_to(image.root / "usr/local/headrace/kernels")
