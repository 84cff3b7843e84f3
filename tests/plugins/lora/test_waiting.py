"""Who may run with which adapter: a step's limit, memory's limit, loads, and that nobody waits for ever."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.config import EngineConfig
from headrace.core.errors import RequestError
from headrace.core.interfaces.build import CoreContext
from headrace.core.plugin.registry import Registry
from headrace.plugins.lora.options import LORA, AdapterRef, LoraSection
from headrace.plugins.lora.waiting import LOADING, SLOT, LoraAdapters
from headrace.testing import Simulation


class Store:
    """An `AdapterStore` without files: it loads when it is told to, and never holds more than it may."""

    def __init__(self, capacity: int, *, at_once: bool = True) -> None:
        self.capacity = capacity
        self.at_once = at_once
        self.loading: dict[str, Future[Any]] = {}
        self.kept: dict[str, Future[Any]] = {}
        self.held: list[str] = []
        self.most = 0
        self.wake = threading.Event().set

    def call_when_loaded(self, wake: Any) -> None:
        self.wake = wake

    def get(self, ref: AdapterRef) -> Future[Any]:
        if ref.digest not in self.kept:
            self.kept[ref.digest] = self.loading[ref.digest] = Future()
            if self.at_once:
                self.finish(ref.digest)
        known = self.kept.pop(ref.digest)
        self.kept[ref.digest] = known
        unheld = [digest for digest in self.kept if digest not in self.held]
        for digest in unheld[: max(0, len(self.kept) - self.capacity)]:
            del self.kept[digest]
        self.most = max(self.most, len(self.kept))
        return known

    def finish(self, digest: str, error: Exception | None = None) -> None:
        future = self.loading.pop(digest)
        if error is None:
            future.set_result(SimpleNamespace(digest=digest))
        else:
            future.set_exception(error)
            self.kept.pop(digest, None)
        self.wake()

    def hold(self, ref: AdapterRef) -> Any:
        self.held.append(ref.digest)
        return self.get(ref).result(0)

    def release(self, digest: str) -> None:
        self.held.remove(digest)

    @property
    def num_kept(self) -> int:
        return len(self.kept)


def build(
    store: Store, max_loras: int = 2, **simulation: Any
) -> tuple[Simulation, LoraAdapters, dict[str, Any]]:
    shared: dict[str, Any] = {}
    context = CoreContext(
        config=EngineConfig(model="base"),
        registry=Registry(),
        wake=lambda: None,
        share=shared.__setitem__,
    )
    section = LoraSection(max_loras=max_loras, max_cpu_loras=max(store.capacity, max_loras), loading=True)
    constraint = LoraAdapters(context, section, store)  # type: ignore[arg-type]
    return Simulation(constraints=[constraint], **simulation), constraint, shared


def add(simulation: Simulation, name: str, adapter: str | None, length: int = 5, **more: Any) -> None:
    prompt = [len(simulation.requests) % 50 + 1, *range(1, length)]
    simulation.add(name, prompt, **more)
    if adapter is not None:
        simulation.requests[name].stash[LORA] = AdapterRef(adapter, f"/{adapter}", f"{adapter}-1")


def adapters_of(simulation: Simulation, plan: Any) -> set[str]:
    names = [entry.request_id for entry in (*plan.new, *plan.continued)]
    refs = [simulation.requests[name].stash.get(LORA) for name in names]
    return {ref.digest for ref in refs if ref is not None}


@pytest.mark.parametrize("seed", range(6))
def test_no_step_holds_more_and_everybody_ends(seed: int) -> None:
    draw = random.Random(seed)
    store = Store(capacity=3)
    simulation, _, _ = build(
        store,
        num_blocks=draw.choice([12, 64]),
        max_num_seqs=draw.choice([3, 8]),
        max_num_batched_tokens=draw.choice([4, 64]),
        max_in_flight=draw.choice([1, 2]),
        max_model_len=64,
    )
    for i in range(40):
        add(
            simulation,
            f"r{i}",
            draw.choice([None, "a", "b", "c", "d", "e"]),
            draw.randint(1, 30),
            max_tokens=draw.randint(1, 12),
        )
        if draw.random() < 0.3:
            simulation.step()
        if draw.random() < 0.1:
            simulation.abort(f"r{draw.randint(0, i)}")
    simulation.run()
    assert all(len(adapters_of(simulation, plan)) <= 2 for plan in simulation.plans)
    assert any(len(adapters_of(simulation, plan)) == 2 for plan in simulation.plans)
    for name, reason in simulation.reasons.items():
        assert reason == "abort" or simulation.tokens[name] == simulation.expected(name)
    assert len(simulation.reasons) == 40
    assert store.held == []
    assert store.most <= 4  # one beside the three, while it is asked for


def test_who_waits_for_a_place_gets_one_although_others_keep_coming() -> None:
    simulation, _, _ = build(Store(8), max_loras=2, max_num_seqs=8)
    running = 0
    for adapter in ("a", "b", "a", "b"):
        add(simulation, f"{adapter}{running}", adapter, max_tokens=6)
        running += 1
    simulation.step()
    add(simulation, "late", "c", max_tokens=2)
    for _ in range(60):
        for adapter in ("a", "b"):
            add(simulation, f"{adapter}{running}", adapter, max_tokens=6)
            running += 1
        simulation.step()
        if "late" in simulation.reasons:
            break
    assert simulation.reasons["late"] == "length"
    simulation.run()


def test_a_load_parks_its_requests_and_nobody_else() -> None:
    store = Store(8, at_once=False)
    simulation, constraint, _ = build(store)
    add(simulation, "slow", "a")
    add(simulation, "slow-too", "a")
    add(simulation, "plain", None, max_tokens=3)
    for _ in range(4):
        simulation.step()
    assert simulation.reasons == {"plain": "length"}
    parked = simulation.scheduler.snapshot()["parked"]
    assert [(entry["request_id"], entry["reason"]) for entry in parked] == [
        ("slow", LOADING),
        ("slow-too", LOADING),
    ]
    assert set(store.loading) == {"a-1"}
    assert constraint.metrics()["lora_adapters_in_memory"] == 1
    store.finish("a-1")
    simulation.run()
    assert simulation.tokens["slow"] == simulation.expected("slow")


def test_a_load_that_fails_fails_its_requests_by_name() -> None:
    store = Store(8, at_once=False)
    simulation, _, _ = build(store)
    add(simulation, "bad", "a")
    add(simulation, "broken", "b")
    simulation.step()
    store.finish("a-1", RequestError("rank 99 is above"))
    store.finish("b-1", KeyError("b"))
    add(simulation, "plain", None)
    simulation.run()
    assert simulation.errors["bad"] == "rank 99 is above"
    assert "adapter 'b' could not be loaded: KeyError" in simulation.errors["broken"]
    assert simulation.reasons["plain"] == "length"


def test_loads_that_memory_has_no_room_for_wait_their_turn() -> None:
    store = Store(2, at_once=False)
    simulation, _, _ = build(store)
    for i in range(6):
        add(simulation, f"r{i}", f"a{i}")
    seen = 0
    while len(simulation.reasons) < 6:
        simulation.step()
        assert len(store.kept) <= 2
        for digest in list(store.loading):
            store.finish(digest)
            seen += 1
    assert seen == 6


def test_a_place_in_a_step_is_what_is_waited_for() -> None:
    simulation, _, _ = build(Store(8), max_loras=1)
    add(simulation, "first", "a", max_tokens=20)
    add(simulation, "second", "b")
    simulation.step()
    assert [entry["reason"] for entry in simulation.scheduler.snapshot()["parked"]] == [SLOT]
    simulation.run()
    assert simulation.tokens["second"] == simulation.expected("second")


def test_found_adapters_are_told_once_they_are_loaded() -> None:
    simulation, constraint, shared = build(Store(8))
    add(simulation, "r", None)
    ref = AdapterRef("new", str(Path("/folder/new")), "new-1", found=True)
    simulation.requests["r"].stash[LORA] = ref
    assert shared["lora"] == {}
    simulation.run()
    assert shared["lora"] == {"new": ["/folder/new", "new-1", True]}
    assert constraint.unload("new")["status"] == 200
    assert shared["lora"] == {}
