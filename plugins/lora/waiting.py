"""The core's half: which adapters there are, whose request may run, and what is loaded meanwhile."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError, HeadraceError, PluginCallError, RequestError
from headrace.core.interfaces import Constraint, Wait
from headrace.core.interfaces.build import CoreContext
from headrace.core.plan import StepPlan
from headrace.core.request import Request, RequestState
from headrace.plugins.lora.adapter import Adapter
from headrace.plugins.lora.location import AdapterMissingError, check_root
from headrace.plugins.lora.options import LORA, AdapterRef, LoraSection
from headrace.plugins.lora.store import AdapterStore

__all__ = ["LOADING", "SLOT", "LoraAdapters"]

LOADING = "lora_loading"
"""Why a request waits: its adapter is being loaded."""
SLOT = "lora_slot"
"""Or: a step holds as many adapters as it may."""
MAX_NAME = 256


@dataclass(frozen=True)
class _Load:
    """An adapter that a client asked for by name."""

    name: str
    path: Path
    adapter: Future[Adapter]


class LoraAdapters(Constraint):
    """Names of adapters, and the limit on those of a step.

    In a step, adapters are those of the requests in its plan: running ones first, then waiting ones in the policy's
    order. Who finds no place for its adapter waits, parked; newcomers that would keep the adapter with the fewest
    requests in its place wait as well then, so that one place gets free.
    """

    name = "lora"

    def __init__(self, context: CoreContext, section: LoraSection, store: AdapterStore) -> None:
        self._section = section
        self._store = store
        store.call_when_loaded(context.wake)
        self._share = context.share
        self._roots = section.allowed_roots()
        self._base_names = {context.config.model, *_served_names(context)}
        self._adapters: dict[str, AdapterRef] = {}
        self._loads: dict[int, _Load] = {}
        self._tickets = itertools.count()
        self._waited: dict[str, Future[Adapter]] = {}
        """By request: what it waits for."""
        self._used: dict[str, str] = {}
        """By request: adapters of those that were admitted, held until they end."""
        self._in_step: Counter[str] = Counter()
        """Requests by adapter, of the plan that is being made."""
        self._wanted: set[str] = set()
        """Adapters that this step's waiting requests may have loaded."""
        self._leaving: str | None = None
        """The adapter that is to make room."""
        self._load_all()

    # Adapters come and go ----------------------------------------------------------------------------

    def _load_all(self) -> None:
        """Load what the configuration names. Raises `ConfigError`."""
        for name, path in self._section.modules.items():
            try:
                self._check_name(name)
                adapter = self._store.load(Path(path)).result()
            except RequestError as error:
                raise ConfigError(f"lora_modules: {name!r:.100}: {error}", option="lora_modules") from None
            self._adapters[name] = AdapterRef(name, path, adapter.digest)
        self._tell()

    def _check_name(self, name: str) -> None:
        if not name or len(name) > MAX_NAME:
            raise RequestError(
                f"an adapter's name has 1 to {MAX_NAME} characters, got {name!r:.100}", param="lora_name"
            )
        if name in self._base_names:
            raise RequestError(
                f"{name!r} is the name of the base model; an adapter needs another", param="lora_name"
            )

    def _tell(self) -> None:
        """Tell every front end which adapters there are."""
        self._share(
            "lora",
            {name: [ref.path, ref.digest, ref.found] for name, ref in self._adapters.items()},
        )

    def load(self, name: str, path: str, in_place: bool) -> dict[str, Any]:
        """Begin to load an adapter; returns a `ticket` for `loaded`, or what is wrong: `status` and `text`."""
        try:
            self._check_name(name)
            if name in self._adapters and not in_place:
                raise RequestError(
                    f"an adapter {name!r} is loaded already; load_inplace replaces it", param="lora_name"
                )
            check_root(Path(path), self._roots)
        except RequestError as error:
            return _refused(error)
        ticket = next(self._tickets)
        self._loads[ticket] = _Load(name, Path(path), self._store.load(Path(path)))
        return {"ticket": ticket}

    def loaded(self, ticket: int) -> dict[str, Any] | None:
        """Return `status` and `text` of a load that has ended, once; None while it goes on."""
        load = self._loads.get(ticket)
        if load is not None and not load.adapter.done():
            return None
        if load is None:
            return {"status": 404, "text": f"no adapter is loaded under the ticket {ticket}"}
        del self._loads[ticket]
        error = load.adapter.exception()
        if error is not None:
            return _refused(error)
        self._adapters[load.name] = AdapterRef(load.name, str(load.path), load.adapter.result().digest)
        self._tell()
        return {"status": 200, "text": f"Success: LoRA adapter '{load.name}' added successfully."}

    def unload(self, name: str) -> dict[str, Any]:
        """Forget a name; requests that run keep their adapter to their end. Returns `status` and `text`."""
        if self._adapters.pop(name, None) is None:
            return {"status": 404, "text": f"there is no adapter {name!r:.300}"}
        self._tell()
        return {"status": 200, "text": f"Success: LoRA adapter '{name}' removed successfully."}

    # Requests ----------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Forget the last step."""
        self._in_step.clear()
        self._wanted = set(self._used.values())
        self._leaving = None

    def limit(self, request: Request, start: int, count: int) -> int | Wait:
        """All, none, or `Wait`. Raises `RequestError` where the adapter cannot be loaded."""
        ref = request.stash.get(LORA)
        if ref is None:
            return count
        has_place = ref.digest in self._in_step or len(self._in_step) < self._section.max_loras
        if request.state is RequestState.RUNNING:
            return count if has_place else 0
        if not has_place:
            if self._leaving is None:
                self._leaving = min(self._in_step, key=self._in_step.__getitem__)
            return Wait(SLOT)
        if ref.digest == self._leaving:
            return Wait(SLOT)
        if request.request_id in self._used:  # it was preempted
            return count
        return self._ready(request, ref, count)

    def _ready(self, request: Request, ref: AdapterRef, count: int) -> int | Wait:
        """Let a request begin once its adapter is in memory, where there is room for it."""
        if ref.digest not in self._wanted:
            if len(self._wanted) >= self._section.max_cpu_loras:
                return Wait(LOADING)
            self._wanted.add(ref.digest)
        loading = self._waited.get(request.request_id) or self._store.get(ref)
        if not loading.done():
            self._waited[request.request_id] = loading
            return Wait(LOADING)
        self._waited.pop(request.request_id, None)
        error = loading.exception()
        if isinstance(error, HeadraceError):
            raise error
        if error is not None:
            raise PluginCallError(
                f"adapter {ref.name!r} could not be loaded: {type(error).__name__}: {error}", plugin=self.name
            ) from error
        if ref.found and self._adapters.get(ref.name) != ref:
            self._adapters[ref.name] = ref
            self._tell()
        return count

    def commit(self, request: Request, start: int, count: int, plan: StepPlan) -> None:
        """Count its adapter, and keep that in memory until the request ends."""
        ref = request.stash.get(LORA)
        if ref is None:
            return
        self._in_step[ref.digest] += 1
        if request.request_id not in self._used:
            self._store.hold(ref)
            self._used[request.request_id] = ref.digest

    def revoke(self, request: Request, plan: StepPlan) -> None:
        """Count its adapter no more."""
        ref = request.stash.get(LORA)
        if ref is not None:
            self._in_step[ref.digest] -= 1
            if not self._in_step[ref.digest]:
                del self._in_step[ref.digest]

    def on_finish(self, request: Request) -> None:
        """Let go of its adapter."""
        self._waited.pop(request.request_id, None)
        digest = self._used.pop(request.request_id, None)
        if digest is not None:
            self._store.release(digest)

    def metrics(self) -> Mapping[str, float]:
        """How many adapters there are by name, and in memory."""
        return {"lora_adapters": len(self._adapters), "lora_adapters_in_memory": self._store.num_kept}


def _served_names(context: CoreContext) -> list[str]:
    """Names clients may call the base model by; the server's section is known by its name alone."""
    names: list[str] = getattr(context.config.sections.get("server"), "served_model_name", [])
    return names


def _refused(error: BaseException) -> dict[str, Any]:
    if isinstance(error, HeadraceError):
        return {"status": 404 if isinstance(error, AdapterMissingError) else 400, "text": str(error)}
    return {"status": 500, "text": f"the adapter could not be loaded: {type(error).__name__}: {error}"}
