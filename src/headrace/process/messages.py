"""What front ends and the engine core say to each other, and how it becomes bytes: msgpack, by msgspec.

front end → core: Hello, Submit, Finish, Call, Gone
core → front end: Ready, Outputs, Answer, Shared, Died
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.plan import EngineOutput
from headrace.core.request import EngineRequest
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash, StashKeys
from headrace.front_half import ModelFacts
from headrace.report import StartupReport

__all__ = [
    "Answer",
    "Call",
    "Codec",
    "Died",
    "Finish",
    "Gone",
    "Hello",
    "Outputs",
    "Ready",
    "Shared",
    "Submit",
    "ToCore",
    "ToFront",
]


class Hello(msgspec.Struct, tag=True):
    """A front end is there; the answer is `Ready`, once the engine is."""


class Submit(msgspec.Struct, tag=True):
    """A request; its outputs go to the front end that sent it."""

    request: EngineRequest


class Finish(msgspec.Struct, tag=True):
    """End requests; unknown ids are passed over."""

    request_ids: list[str]
    reason: str


class Call(msgspec.Struct, tag=True):
    """Call a method of a plugin (`EngineCore.call`), or of the engine where `plugin` is empty. `Answer` follows."""

    call_id: int
    plugin: str
    method: str
    args: list[Any]


class Gone(msgspec.Struct, tag=True):
    """A front end's process is gone, says who watched it: its requests end."""

    front: str


class Ready(msgspec.Struct, tag=True):
    """The engine answers requests from now on."""

    pid: int
    facts: ModelFacts
    report: StartupReport
    shared: dict[str, Any]


class Outputs(msgspec.Struct, tag=True):
    """What one step came to, for this front end's requests."""

    outputs: list[EngineOutput]


class Answer(msgspec.Struct, tag=True):
    """What a call returned, or the error it raised."""

    call_id: int
    value: Any = None
    error: str | None = None
    error_kind: str = ""


class Shared(msgspec.Struct, tag=True):
    """A plugin keeps a value for all front ends."""

    name: str
    value: Any


class Died(msgspec.Struct, tag=True):
    """The engine stopped; nothing more will come."""

    error: str


ToCore = Hello | Submit | Finish | Call | Gone
ToFront = Ready | Outputs | Answer | Shared | Died


class Codec:
    """Messages to bytes and back. Not thread-safe.

    stash_keys: the keys that the engine's plugins declared; both sides load the same plugins.
    """

    def __init__(self, stash_keys: StashKeys) -> None:
        self._keys = stash_keys
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._to_core = msgspec.msgpack.Decoder(ToCore, dec_hook=self._rebuild)
        self._to_front = msgspec.msgpack.Decoder(ToFront, dec_hook=self._rebuild)

    def encode(self, message: ToCore | ToFront) -> bytes:
        """Return a message's bytes. Raises `TypeError` for a value in a stash or a call that is not plain."""
        return self._encoder.encode(message)

    def decode_to_core(self, data: bytes) -> ToCore:
        """Read what a front end sent. Raises `PluginError` for a stash key nobody declared here."""
        return self._to_core.decode(data)

    def decode_to_front(self, data: bytes) -> ToFront:
        """Read what the core sent. Raises `PluginError` for a stash key nobody declared here."""
        return self._to_front.decode(data)

    def _rebuild(self, kind: type, value: Any) -> Any:
        if kind is Stash:
            return self._keys.from_wire(value) if value else Stash()
        if kind is SamplingParams:
            return SamplingParams.model_construct(**value)  # the sender validated it
        raise TypeError(f"cannot rebuild a {kind.__name__}")


def _plain(value: Any) -> Any:
    if isinstance(value, Stash):
        return value.to_wire() if value else {}
    if isinstance(value, SamplingParams):
        return value.model_dump(exclude_defaults=True)
    raise TypeError(f"a {type(value).__name__} cannot cross processes; use plain values or msgspec structs")
