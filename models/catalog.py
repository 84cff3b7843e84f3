"""What there is to run: models by short name, models in the cache folder, and families of architectures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from headrace.core.errors import CheckpointError
from headrace.models.sources.aliases import ALIASES, Alias
from headrace.models.sources.cache import cache_folder
from headrace.models.sources.reference import PackageReference
from headrace.models.sources.terms import accepted

if TYPE_CHECKING:
    from headrace.core.interfaces import ModelDefinition
    from headrace.core.plugin.registry import Registry

__all__ = ["describe_families", "describe_models"]

_GENERATES = ("generate", "chat", "embed")
_ENCODES = ("embed",)


def describe_models(registry: Registry) -> list[dict[str, Any]]:
    """Return a row for each alias, then for each other model in the cache folder; all values go into JSON.

    Keys: `name` (what other commands take), `family`, `size` in bytes, `licence`, `terms` (their address, or None),
    `accepted` (whether they are; True where there are none), `source`, `cached`, `path`, `supports` (a list of
    "generate", "chat", "embed") and `description`. What only a look into the files could tell is None. An alias whose
    family no plugin brings supports nothing.
    """
    cache = cache_folder()
    families = set(registry.names("model"))
    rows = [_of_alias(alias, cache, families) for alias in ALIASES.values()]
    known = {row["path"] for row in rows}
    return [*rows, *(row for row in (*_of_packages(cache), *_of_hub(cache)) if row["path"] not in known)]


def describe_families(registry: Registry) -> list[dict[str, Any]]:
    """Return a row for each registered family: `name`, `architectures`, `formats` and `supports`, all for JSON.

    No `architectures` means: any decoder that the library of this name knows.
    """
    from headrace.models.gguf.architectures import ARCHITECTURES

    in_gguf = {architecture.hf_class for architecture in ARCHITECTURES.values()}
    in_gguf |= {one.windowed[1] for one in ARCHITECTURES.values() if one.windowed}
    rows = []
    for entry in registry.entries("model"):
        definition: ModelDefinition = entry.factory()
        names = definition.architectures
        generates = not names or any(name.endswith("ForCausalLM") for name in names)
        rows.append(
            {
                "name": entry.name,
                "architectures": list(names),
                "formats": ["safetensors", *(["gguf"] if in_gguf.intersection(names) else [])],
                "supports": list(_GENERATES if generates else _ENCODES),
            }
        )
    return rows


def _of_alias(alias: Alias, cache: Path, families: set[str]) -> dict[str, Any]:
    path = PackageReference.parse(alias.pinned.partition(":")[2]).target(cache)
    cached = path.exists()
    return {
        "name": alias.name,
        "family": alias.family,
        "size": alias.size,
        "licence": alias.licence,
        "terms": alias.terms.url if alias.terms else None,
        "accepted": alias.terms is None or accepted(alias.terms),
        "source": alias.reference,
        "cached": cached,
        "path": str(path) if cached else None,
        "supports": list(alias.supports) if alias.family in families else [],
        "description": alias.description,
    }


def _of_packages(cache: Path) -> Iterator[dict[str, Any]]:
    """Files and folders out of wheels, each by a reference that finds it there."""
    root = cache / "models" / "pypi"
    for path in sorted(root.glob("*/*/**/*")):
        requirement, check, *member = path.relative_to(root).parts
        if not member or any(part.startswith(".") for part in member):
            continue
        is_folder = check.startswith("wheel-")
        if is_folder != path.is_dir():
            continue
        inside = f"{unquote('/'.join(member))}/" if is_folder else "/".join(member)
        _, pinned, pin = check.partition("sha256-")
        name = f"{requirement}/{inside}" + (f"#sha256={pin}" if pinned else "")
        if _target(name, cache) == path:
            yield _found(f"pypi:{name}", "pypi", path)


def _of_hub(cache: Path) -> Iterator[dict[str, Any]]:
    """Snapshots of the hub's repositories, each by its own revision."""
    for path in sorted((cache / "hub").glob("models--*--*/snapshots/*")):
        organisation, name = path.parent.parent.name.removeprefix("models--").split("--", 1)
        yield _found(f"{organisation}/{name}@{path.name}", "hf", path)


def _found(name: str, source: str, path: Path) -> dict[str, Any]:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return {
        "name": name,
        "family": None,
        "size": sum(file.stat().st_size for file in files),
        "licence": None,
        "terms": None,
        "accepted": True,
        "source": source,
        "cached": True,
        "path": str(path),
        "supports": None,
        "description": None,
    }


def _target(reference: str, cache: Path) -> Path | None:
    try:
        return PackageReference.parse(reference).target(cache)
    except CheckpointError:
        return None
