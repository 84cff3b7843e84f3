"""The step record: what is written of a step, where, and what happens when it cannot be."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.interfaces import Constraint, EngineListener, Wait
from headrace.core.interfaces.build import CoreContext, HttpContext
from headrace.core.plugin.registry import Registry
from headrace.core.request import Request
from headrace.plugins.step_record import (
    NoStepRecord,
    StepLog,
    StepRecord,
    StepRecordSection,
    add_routes,
    make_step_record,
)
from headrace.testing.simulation import Simulation


class Dev:
    """Stands for the server's section."""

    def __init__(self, dev_mode: bool) -> None:
        self.dev_mode = dev_mode


def config(*, dev: bool | None = None, **section: Any) -> EngineConfig:
    sections: dict[str, Any] = {} if dev is None else {"server": Dev(dev)}
    if section:
        sections["step_record"] = StepRecordSection(**section)
    return EngineConfig(model="none", sections=sections)


def make(config: EngineConfig) -> EngineListener:
    return make_step_record(CoreContext(config, Registry(), threading.Event().set))


class Gate(Constraint):
    """Parks one request."""

    name = "gate"

    def limit(self, request: Request, start: int, count: int) -> int | Wait:
        return Wait("gate") if request.request_id == "parked" else count


def simulate(log: StepLog | None = None, size: int = 256, **options: Any) -> tuple[Simulation, StepRecord]:
    sims: list[Simulation] = []
    record = StepRecord(lambda: sims[0].engine.snapshot(), size, log)
    sims.append(Simulation(listeners=[record], **options))
    return sims[0], record


def run(sim: Simulation) -> None:
    while sim.engine.has_work and sim.num_steps < 200:
        sim.step()


def test_a_record_says_who_ran_who_waits_and_why(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    sim, record = simulate(StepLog(file), constraints=[Gate()], max_num_seqs=2, num_blocks=40)
    sim.add("long", range(100, 170), max_tokens=2)
    sim.add("parked", [7, 8, 9])
    sim.add("short", [1, 2, 3], max_tokens=4)
    sim.add("late", [4, 5], max_tokens=1)
    for _ in range(12):
        sim.step()
    sim.engine.shutdown()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == record.recent(100)
    assert [line["step"] for line in lines] == list(range(len(lines)))
    first, second = lines[:2]
    assert first["requests"] == [{"id": "long", "new": True, "start": 0, "count": 64, "sampled": 0}]
    assert (first["num_tokens"], first["running"], first["waiting"], first["parked"]) == (64, 1, 3, {})
    assert second["requests"] == [
        {"id": "short", "new": True, "start": 0, "count": 3, "sampled": 1},
        {"id": "long", "new": False, "start": 64, "count": 6, "sampled": 1},
    ]
    assert (second["running"], second["waiting"], second["parked"]) == (2, 1, {"gate": 1})
    assert second["blocks"] == {"free": 40 - 18 - 1, "held": 19}
    assert lines[3]["finished"] == [{"id": "long", "reason": "length"}]
    assert all(line["duration"] >= 0 and not line["failed"] for line in lines)
    assert lines[-1]["requests"] == []  # tells workers who is gone


def test_preemptions_and_failed_steps_are_in_it() -> None:
    sim, record = simulate(num_blocks=9, prefix_caching=False, raise_at=frozenset({6}))
    for i in range(3):
        sim.add(str(i), [i] * 9, max_tokens=8)
    run(sim)
    told = record.recent(1000)
    assert sum(len(line["preempted"]) for line in told) == sim.engine.metrics()["num_preemptions"] > 0
    ended = [one["id"] for line in told for one in line["finished"]]
    assert sorted(ended) == ["0", "1", "2"]
    (failed,) = [line for line in told if line["failed"]]
    assert (failed["step"], failed["duration"]) == (6, None)
    (reason,) = {one["reason"] for line in told for one in line["finished"] if one["id"] in sim.errors}
    assert reason == "error"
    assert [line["step"] for line in told] == sorted(line["step"] for line in told)


def test_plans_in_flight_together_have_a_record_each() -> None:
    sim, record = simulate(max_in_flight=3, runs_ahead=True)
    sim.add("a", [1, 2, 3], max_tokens=9)
    sim.run()
    told = record.recent(1000)
    assert [line["step"] for line in told] == [plan.step for plan in sim.plans]
    assert sum(one["sampled"] for line in told for one in line["requests"]) == 9


def test_the_last_ones_are_kept() -> None:
    sim, record = simulate(size=3)
    sim.add("a", [1, 2, 3], max_tokens=9)
    sim.run()
    assert [line["step"] for line in record.recent(100)] == [7, 8, 9]
    assert [line["step"] for line in record.recent(2)] == [8, 9]
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        record.recent(0)


# Whether, and where -------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [config(), config(dev=False), config(size=3)])
def test_nothing_is_recorded_unasked(given: EngineConfig) -> None:
    listener = make(given)
    assert isinstance(listener, NoStepRecord)
    for method in ("on_add", "on_plan", "on_result", "on_preempt", "on_finish", "metrics"):
        assert getattr(NoStepRecord, method) is getattr(EngineListener, method)
    with pytest.raises(ConfigError, match="start with step_log"):
        listener.recent(3)


def test_developer_mode_or_a_file_asks_for_it(tmp_path: Path) -> None:
    assert isinstance(make(config(dev=True)), StepRecord)
    listener = make(config(log=str(tmp_path / "steps")))
    assert isinstance(listener, StepRecord)
    listener.close()


@pytest.mark.parametrize("path", ["/dev/full", "missing/steps.jsonl", "."])
def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=r"step_log: .* cannot be written: \w+") as caught:
        make(config(log=str(tmp_path / path)))
    assert caught.value.option == "step_log"


def test_a_file_is_added_to(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    for _ in range(2):
        sim, _record = simulate(StepLog(file))
        sim.add("a", [1], max_tokens=1)
        sim.run()
        sim.engine.shutdown()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 1, 0, 1]


class FullLater:
    """A file on a disk that is full after some bytes."""

    closed = False

    def __init__(self, room: int) -> None:
        self.room = room
        self.calls = 0

    def write(self, data: bytes) -> int:
        self.calls += 1
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = min(self.room, len(data))
        self.room -= taken
        return taken

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("room", "why"), [(600, "the disk is full"), (0, "No space left on device")])
def test_a_disk_that_is_full_later_is_said_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int, why: str
) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    log._file.close()
    log._file = full = FullLater(room)  # type: ignore[assignment]
    sim, record = simulate(log)
    sim.add("a", [1, 2, 3], max_tokens=20)
    with caplog.at_level(logging.ERROR):
        sim.run()
    assert sim.tokens["a"] == sim.expected("a")
    assert len(record.recent(100)) == 21
    (said,) = caplog.messages
    assert why in said
    assert "steps.jsonl" in said
    assert full.closed
    assert full.calls < 5


# In an engine and over HTTP -----------------------------------------------------------------------------


async def get(app: FastAPI, target: str) -> tuple[int, Any]:
    """Ask an application without a server: status, and body read as JSON."""
    url = urlsplit(target)
    scope = {
        "type": "http",
        "method": "GET",
        "path": url.path,
        "query_string": url.query.encode(),
        "headers": [],
        "http_version": "1.1",
        "server": ("test", 80),
        "scheme": "http",
    }
    sent: list[Mapping[str, Any]] = []

    async def receive() -> Mapping[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    return int(sent[0]["status"]), json.loads(body)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Callable[..., Path]) -> str:
    return str(tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


def test_steps_of_an_engine_over_http(tiny: str) -> None:
    async def ask() -> list[tuple[int, Any]]:
        app = FastAPI()
        async with await AsyncLLM.start(tiny, engine_process=False, dev_mode=True) as llm:
            add_routes(HttpContext(app, llm, llm.front.config, llm.front.registry))
            async for _ in llm.generate([11, 12, 13], SamplingParams(max_tokens=5, ignore_eos=True)):
                pass
            async with asyncio.timeout(60):  # the last plan, which has no request, tells workers who is gone
                while (await get(app, "/debug/steps?limit=1"))[1]["steps"][0]["requests"]:
                    await asyncio.sleep(0.01)
            return [
                await get(app, f"/debug/steps{query}") for query in ("", "?limit=2", "?limit=0", "?limit=x")
            ]

    everything, two, *wrong = asyncio.run(ask())
    assert everything[0] == 200
    steps = everything[1]["steps"]
    assert sum(one["sampled"] for step in steps for one in step["requests"]) == 5
    assert [step["step"] for step in two[1]["steps"]] == [step["step"] for step in steps][-2:]
    assert [status for status, _ in wrong] == [422, 422]


def test_the_route_is_for_developers() -> None:
    app = FastAPI()
    engine: Any = types.SimpleNamespace()
    add_routes(HttpContext(app, engine, config(dev=False), Registry()))
    assert asyncio.run(get(app, "/debug/steps"))[0] == 404


def test_a_log_holds_no_token_of_anybody(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    with LLM(tiny, step_log=str(file), step_record_size=4, show_report=False) as llm:
        outputs = llm.generate(
            [[41, 42, 43], [51] * 20], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False
        )
        assert len(llm.client.call("step_record", "recent", 100)) == 4
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert sum(one["sampled"] for line in lines for one in line["requests"]) == 12
    assert "token_ids" not in text
    for ids in (output.prompt_token_ids for output in outputs):
        assert str(ids).strip("[]") not in text
    for line in lines:
        assert set(line) == {
            *("step", "time", "duration", "failed", "num_tokens", "requests", "preempted", "finished"),
            *("running", "waiting", "parked", "blocks"),
        }
        for one in line["requests"]:
            assert set(one) == {"id", "new", "start", "count", "sampled"}


def test_a_start_in_a_process_of_its_own_fails_with_the_option(tiny: str) -> None:
    with pytest.raises(ConfigError, match="step_log: /dev/full cannot be written: No space left"):
        LLM(tiny, step_log="/dev/full", engine_process=True, show_report=False)


def test_a_step_that_stops_the_engine_is_written_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    sim, _record = simulate(StepLog(file), raise_at=frozenset(range(10)))
    sim.add("a", [1, 2, 3])
    while not sim.reasons:
        sim.step()
    sim.engine.shutdown()
    sim.engine.shutdown()
    (line,) = map(json.loads, file.read_text().splitlines())
    assert (line["step"], line["failed"], line["requests"][0]["id"]) == (0, True, "a")
