"""The front half: a name becomes a version of an adapter, for requests and for those who ask what there is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.core.errors import RequestError, nearest
from headrace.core.interfaces import ModelVariant, ProcessedInput
from headrace.core.interfaces.build import FrontContext
from headrace.core.request import BlockKey
from headrace.plugins.lora.location import check_root, digest_of, stamp
from headrace.plugins.lora.options import LORA, AdapterRef, LoraSection

__all__ = ["LoraFront"]


class LoraFront:
    """Finds adapters by name: among those the core told of, and in `lora_folder`.

    An input processor, and the adapters' `ModelVariants`. The KV of a request is its adapter's: the adapter's content
    is part of every block's name, so a new version never meets what an old one computed.
    """

    name = "lora"

    def __init__(self, context: FrontContext) -> None:
        self._section = context.config.section("lora", LoraSection)
        self._shared = context.shared
        self._folder = None if self._section.folder is None else Path(self._section.folder).expanduser()
        self._digests: dict[str, tuple[Any, str]] = {}
        """Of adapters in the folder: what their files looked like, and the digest they had then."""

    def process(self, item: ProcessedInput) -> None:
        """Note a request's adapter. Raises `RequestError` for one that nobody knows."""
        given = item.params.options.get("lora")
        if given is None:
            return
        if not self._section.is_on:
            raise RequestError(
                "lora: this engine has no adapters; start it with lora_modules, lora_folder or enable_lora_loading",
                param="lora",
            )
        ref = self._ref(given)
        if ref is None:
            known = list(self._told())
            raise RequestError(
                f"lora: there is no adapter {given!r:.300}{nearest(given, known)}; there are: "
                f"{', '.join(known) or 'none'}",
                param="lora",
            )
        item.stash[LORA] = ref
        item.block_keys.append(BlockKey(0, None, b"lora:" + bytes.fromhex(ref.digest)))

    def all(self) -> Sequence[ModelVariant]:
        """Adapters that are loaded."""
        return [_variant(name, str(entry[0])) for name, entry in self._told().items()]

    def find(self, name: str) -> ModelVariant | None:
        """Return an adapter that is loaded or lies in the folder."""
        try:
            ref = self._ref(name)
        except RequestError:
            return _variant(
                name, name
            )  # there is something of that name: the request itself will say what is wrong
        return None if ref is None else _variant(name, ref.path)

    def _told(self) -> dict[str, list[Any]]:
        return dict(self._shared.get("lora") or {})

    def _ref(self, name: str) -> AdapterRef | None:
        entry = self._told().get(name)
        if entry is not None and not entry[2]:
            return AdapterRef(name, entry[0], entry[1])
        return self._in_folder(name)

    def _in_folder(self, name: str) -> AdapterRef | None:
        """Look in the folder, each time anew: whoever puts another version there means it."""
        if (
            self._folder is None
            or not name
            or name.startswith(".")
            or Path(name).name != name
            or "\0" in name
        ):
            return None
        path = self._folder / name
        if not path.is_dir():
            return None
        check_root(path, self._section.allowed_roots())
        seen = stamp(path)
        known = self._digests.get(name)
        if known is None or known[0] != seen:
            known = self._digests[name] = (seen, digest_of(path))
        return AdapterRef(name, str(path), known[1], found=True)


def _variant(name: str, root: str) -> ModelVariant:
    return ModelVariant(name, root, {"lora": name})
