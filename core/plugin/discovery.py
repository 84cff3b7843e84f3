"""Where plugins come from: installed distributions, seen without importing them, and files, imported by path."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

__all__ = ["GROUP", "GROUP_PREFIX", "Found", "api_needs", "discover", "import_file"]

GROUP_PREFIX = "headrace.plugins.v"

GROUP = GROUP_PREFIX + "1"
"""Entry points of this group are plugins for major version 1 of the API."""

_NEED = "headrace-api"


@dataclass(frozen=True)
class Found:
    """A plugin that an installed distribution offers."""

    name: str
    """The entry point's name, which must be the plugin's."""
    entry: EntryPoint
    distribution: str
    version: str
    major: str
    """Major version of the API it was made for: what follows `headrace.plugins.v` in its group."""
    needs: str
    """Range of API versions from the distribution's keywords; empty where they say nothing."""

    @property
    def fits(self) -> bool:
        """Whether it was made for our major version."""
        return GROUP_PREFIX + self.major == GROUP


def discover() -> list[Found]:
    """Look through installed distributions; nothing is imported.

    Returns them sorted by name, then distribution, so that the order never depends on the file system. A
    distribution that offers one name for several major versions appears with version 1 alone.
    """
    found: dict[tuple[str, str, str], Found] = {}
    everything = entry_points()
    groups = sorted(group for group in everything.groups if group.startswith(GROUP_PREFIX))
    for entry in (entry for group in groups for entry in everything.select(group=group)):
        dist = entry.dist
        distribution = dist.name if dist is not None else "unknown"
        version = dist.version if dist is not None else "unknown"
        keywords = ",".join(dist.metadata.get_all("Keywords") or []) if dist is not None else ""
        major = entry.group.removeprefix(GROUP_PREFIX)
        key = (entry.name, distribution, "" if major == "1" else major)
        found[key] = Found(entry.name, entry, distribution, version, major, api_needs(keywords))
    current = {key[:2] for key in found if key[2] == ""}
    return [found[key] for key in sorted(found) if key[2] == "" or key[:2] not in current]


def api_needs(keywords: str) -> str:
    """Return the range that keywords such as `headrace-api>=1.2` ask for; several are and-ed by a comma.

    Keywords are separated by commas or blanks; blanks around an operator do not matter.
    """
    joined = re.sub(r"\s*([~<>=!]+)\s*", r"\1", keywords or "")
    needs = []
    for word in re.split(r"[,\s]+", joined):
        match = re.fullmatch(re.escape(_NEED) + r"([~<>=!].*)", word, re.IGNORECASE)
        if match is not None:
            needs.append(match[1])
    return ",".join(needs)


def import_file(path: str | Path) -> ModuleType:
    """Import a Python file under a name made of its path and text.

    The name is the same in every process, unique among files of one stem, and new when the file changed; the
    module is put in `sys.modules`, where dataclasses and pickle look for it. Raises whatever the file raises, and
    `FileNotFoundError` or `ImportError` where there is no such Python file.
    """
    file = Path(path).expanduser().resolve()
    text = file.read_bytes()
    digest = hashlib.sha256(str(file).encode() + b"\0" + text).hexdigest()[:12]
    name = f"headrace_plugin_{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}_{digest}"
    known = sys.modules.get(name)
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
