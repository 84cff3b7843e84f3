"""From a model's name to its files, its checkpoint, its architecture and its tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.errors import CheckpointError, nearest
from headrace.models.quantized import stated_method, unknown_method
from headrace.models.safetensors.folder import read_json
from headrace.models.sources.aliases import ALIASES
from headrace.models.sources.hub import HUB_NAME
from headrace.models.sources.terms import require_acceptance

if TYPE_CHECKING:
    from headrace.core.interfaces import Checkpoint, ModelDefinition, ModelSource, Tokenizer
    from headrace.core.interfaces.checkpoint import Progress
    from headrace.core.plugin.registry import Registry

__all__ = [
    "build_tokenizer",
    "model_definition",
    "open_checkpoint",
    "open_tokenizer",
    "reading_configuration",
    "resolve_model",
]


def resolve_model(
    name: str,
    registry: Registry,
    progress: Progress | None = None,
    *,
    accept_license: str | Collection[str] = (),
) -> Path:
    """Return the file or folder that `name` means: an alias, then `source:reference`, then a path, then `ORG/NAME`.

    A file called like an alias is reached as `./NAME`.
    accept_license: names of terms that the user accepts, such as `"gemma"`; they are asked for once.
    Raises `CheckpointError` listing what there is, or saying which terms must be accepted.
    """
    known = {spelt: alias for alias in ALIASES.values() for spelt in (alias.reference, alias.pinned)}
    alias = ALIASES.get(name) or known.get(name)
    if alias is not None and alias.terms is not None:
        given = (accept_license,) if isinstance(accept_license, str) else accept_license
        require_acceptance(alias.terms, alias.name, given)
    prefix, colon, reference = (alias.pinned if alias else name).partition(":")
    sources = registry.names("model_source")
    if colon and prefix in sources:
        source: ModelSource = registry.get("model_source", prefix).factory()
        return source.resolve(reference, progress)
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if HUB_NAME.fullmatch(name) and "hf" in sources and not name.startswith("."):
        hub: ModelSource = registry.get("model_source", "hf").factory()
        return hub.resolve(name, progress)
    likely = nearest(name, ALIASES) or (nearest(prefix, sources) if colon else "")
    raise CheckpointError(
        f"no model is called {name!r}{likely}: it is no alias ({', '.join(ALIASES)}), no file or folder here, no "
        f"ORG/NAME of the hub, and begins with no source ({', '.join(f'{source}:' for source in sources)}). The "
        "option is model."
    )


def open_checkpoint(path: Path, registry: Registry) -> Checkpoint:
    """Open `path` with the first loader that claims it.

    Raises `CheckpointError`: nothing there, no loader claims it, or what the loader says is wrong.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    for entry in registry.entries("weight_loader"):
        loader = entry.factory()
        if loader.claims(path):
            _refuse_unknown_quantization(path, registry)
            checkpoint: Checkpoint = loader.open(path)
            return checkpoint
    formats = ", ".join(registry.names("weight_loader")) or "none"
    if path.is_dir():
        inside = sorted(child.name for child in path.iterdir())
        shown = ", ".join(inside[:10]) + (", …" if len(inside) > 10 else "")
        raise CheckpointError(
            f"the folder {path} holds no checkpoint of a format known here ({formats}); it holds: "
            f"{shown or 'nothing'}"
        )
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    raise CheckpointError(
        f"{path} is no checkpoint of a format known here ({formats}): it starts with {start!r}"
    )


def _refuse_unknown_quantization(path: Path, registry: Registry) -> None:
    """A packed checkpoint must not be read as if it were not; its configuration says so before weights are read."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file() or path.suffix == ".gguf":
        return
    config = read_json(file)
    stated = stated_method(config)
    methods = (entry.factory() for entry in registry.entries("quantization"))
    if stated is not None and not any(method.claims(config) for method in methods):
        raise CheckpointError(f"{file}: {unknown_method(stated, registry)}")


@contextmanager
def reading_configuration(checkpoint: Checkpoint) -> Iterator[None]:
    """Put the file with the checkpoint's configuration in front of a `CheckpointError` that is raised inside.

    Who reads fields is given the configuration alone; where it came from is known here.
    """
    try:
        yield
    except CheckpointError as error:
        config = checkpoint.path / "config.json"
        raise CheckpointError(f"{config if config.is_file() else checkpoint.path}: {error}") from error


def model_definition(config: Mapping[str, Any], registry: Registry) -> ModelDefinition:
    """Return the definition that serves the configuration's `architectures`, which it has checked.

    Raises `CheckpointError`: `architectures` missing or none of them known, or a field is wrong.
    """
    names = config.get("architectures")
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            "architectures in the model's configuration must be a list of class names such as "
            f"['LlamaForCausalLM'], got {names!r}"
        )
    known: dict[str, ModelDefinition] = {}
    for entry in registry.entries("model"):
        definition: ModelDefinition = entry.factory()
        known.update(dict.fromkeys(definition.architectures, definition))
    for name in names:
        if name in known:
            known[name].check(config)
            return known[name]
    raise CheckpointError(
        f"the model's architecture is {', '.join(names)}{nearest(names[0], known)}; architectures known: "
        f"{', '.join(sorted(known)) or 'none'}. A plugin can add one."
    )


def build_tokenizer(data: Mapping[str, Any] | None, registry: Registry) -> Tokenizer | None:
    """Build a checkpoint's tokenizer from its `Checkpoint.tokenizer`; None where it has none.

    Raises `CheckpointError` if its kind is unknown, listing the known, or if it is damaged.
    """
    if data is None:
        return None
    kinds = registry.names("tokenizer")
    if data["kind"] not in kinds:
        raise CheckpointError(
            f"{data.get('path', 'the checkpoint')}: its tokenizer is of the kind {data['kind']!r}"
            f"{nearest(data['kind'], kinds)}; kinds known: {', '.join(kinds) or 'none'}. A plugin can add one."
        )
    tokenizer: Tokenizer = registry.get("tokenizer", data["kind"]).factory(data)
    return tokenizer


def open_tokenizer(path: Path, registry: Registry) -> Tokenizer | None:
    """Open a checkpoint for its tokenizer alone. Raises as `open_checkpoint` and `build_tokenizer` do."""
    checkpoint = open_checkpoint(path, registry)
    try:
        return build_tokenizer(checkpoint.tokenizer, registry)
    finally:
        checkpoint.close()
