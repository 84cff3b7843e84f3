"""A typed side pocket for plugins on the objects that travel through the engine.

Requests, plans, step results and engine outputs each carry a `Stash`. A plugin keeps its state there
under a key of its own, so that no core dataclass ever gains a field for a feature.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar, cast

import msgspec

from headrace.core.errors import PluginError

__all__ = ["Direction", "Stash", "StashKey", "StashKeys"]

T = TypeVar("T")

Direction = Literal["request", "plan", "result", "output", "local"]
"""Where a key may ride: front → core → worker with a request, core → worker with a plan, worker → core
with a step result, core → front with an output; `local` never leaves the object it was put on."""


class StashKey(Generic[T]):
    """One entry's name, type and direction; two keys of one name are the same key.

    Parameters
    ----------
    name: `"plugin/entry"`.
    type: what a value is; values that cross processes are encoded and decoded by it (msgspec).
    direction: on which objects the key may ride.
    """

    __slots__ = ("direction", "name", "type")

    def __init__(self, name: str, type: Any = Any, *, direction: Direction = "request") -> None:
        if "/" not in name:
            raise ValueError(f"a stash key is named 'plugin/entry', got {name!r}")
        self.name = name
        self.type = type
        self.direction: Direction = direction

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StashKey) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"StashKey({self.name!r}, {self.direction})"


class Stash:
    """A small mapping from `StashKey[T]` to `T`."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[StashKey[Any], Any] = {}

    def __getitem__(self, key: StashKey[T]) -> T:
        return cast(T, self._values[key])

    def __setitem__(self, key: StashKey[T], value: T) -> None:
        self._values[key] = value

    def __delitem__(self, key: StashKey[Any]) -> None:
        del self._values[key]

    def __contains__(self, key: StashKey[Any]) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[StashKey[Any]]:
        return iter(self._values)

    def __repr__(self) -> str:
        return f"Stash({[key.name for key in self._values]})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stash) and other._values == self._values

    __hash__ = None  # type: ignore[assignment]

    def get(self, key: StashKey[T], default: T | None = None) -> T | None:
        """Return the entry, or `default` where there is none."""
        return cast("T | None", self._values.get(key, default))

    def update(self, other: Stash) -> None:
        """Take over every entry of `other`."""
        self._values.update(other._values)

    def to_wire(self) -> dict[str, Any]:
        """Return what crosses a process border: plain values by name, `local` keys left behind."""
        return {
            key.name: msgspec.to_builtins(value)
            for key, value in self._values.items()
            if key.direction != "local"
        }


class StashKeys:
    """The keys an engine's plugins declared: what makes a stash readable on the other side.

    Raises `PluginError` when two plugins declare one name with different types or directions, and when
    a stash arrives with a key nobody declared.
    """

    def __init__(self, keys: Iterable[StashKey[Any]] = ()) -> None:
        self._by_name: dict[str, StashKey[Any]] = {}
        for key in keys:
            self.add(key)

    def add(self, key: StashKey[Any]) -> None:
        """Declare one key."""
        known = self._by_name.setdefault(key.name, key)
        if known.type != key.type or known.direction != key.direction:
            raise PluginError(
                f"stash key {key.name!r} is declared twice: as {known.type!r} ({known.direction}) and as "
                f"{key.type!r} ({key.direction})",
                plugin=key.name.split("/")[0],
            )

    def __iter__(self) -> Iterator[StashKey[Any]]:
        return iter(self._by_name.values())

    def from_wire(self, values: Mapping[str, Any]) -> Stash:
        """Rebuild a stash from `Stash.to_wire`'s result."""
        stash = Stash()
        for name, value in values.items():
            key = self._by_name.get(name)
            if key is None:
                raise PluginError(
                    f"a stash arrived with the unknown key {name!r}; declared here: {sorted(self._by_name)}. "
                    "Both sides must load the same plugins.",
                    plugin=name.split("/")[0],
                )
            stash[key] = msgspec.convert(value, key.type)
        return stash
