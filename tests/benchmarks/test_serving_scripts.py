"""The scripts that abuse a server, against a small one without a model: what they find right, and what wrong."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headrace.testing.serving import Server

pytestmark = pytest.mark.alone  # clients and server take turns by the clock

Script = Callable[[str], ModuleType]


@pytest.fixture
def server(fake_server: Any, tmp_path: Path) -> Server:
    """The fake server as the scripts know one; its process is this one."""
    log = tmp_path / "log"
    log.touch()
    process: Any = SimpleNamespace(pid=os.getpid())
    return Server(process, int(fake_server.url.rpartition(":")[2]), log, tmp_path)


def run(checks: Any, function: Callable[..., Any], server: Server, served: ModuleType, **rest: Any) -> Any:
    async def main() -> Any:
        client = served.Client.open(server)
        async with client.session:
            return await function(server, client, checks, **rest)

    return asyncio.run(main())


def failed(checks: Any) -> list[str]:
    return [check.name for check in checks.all if not check.passed]


def test_streams_that_are_as_they_should_be(script: Script, server: Server, fake_server: Any) -> None:
    abuse, served = script("abuse"), script("served")
    fake_server.behaviour.ttft = 0.3  # none has ended before the last has begun
    checks = served.Checks()
    found = run(checks, abuse.streams, server, served, number=20)
    assert not failed(checks)
    assert fake_server.behaviour.most_running == 20
    asked = [body for _, body in fake_server.behaviour.asked]
    assert len(asked) == 20 * (1 + abuse.ROUNDS)
    assert len({json.dumps(body, sort_keys=True) for body in asked}) == 40
    assert len(found["rss"]) == 1 + abuse.ROUNDS
    assert found["rss"][0]["total"] > 2**20


def test_streams_that_are_lost_or_mixed_up(
    script: Script, server: Server, fake_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    abuse, served = script("abuse"), script("served")
    fake_server.behaviour.fault = lambda body: (
        "cut" if body.get("stream") and "Story 4 " in body.get("prompt", "") else ""
    )
    answer, calls = fake_server.module.answer, []

    def sometimes_anothers(ids: list[int], most: int, ignore_eos: bool) -> list[str]:
        if "Story 8 " in fake_server.module.decode(ids):  # which of all requests comes last is chance
            calls.append(ids)
            if len(calls) == 4:
                ids = ids[:7]
        return list(answer(ids, most, ignore_eos))

    monkeypatch.setattr(fake_server.module, "answer", sometimes_anothers)
    checks = served.Checks()
    found = run(checks, abuse.streams, server, served, number=10)
    assert failed(checks) == ["streams lost", "streams that differ from their own answer"]
    assert found["lost"] == ["the stream ended without [DONE]"] * 3
    assert len(found["wrong"]) == 1
    assert checks.all[1].found == 1


def test_clients_that_vanish(
    script: Script, server: Server, fake_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    abuse, served = script("abuse"), script("served")
    # Every second answer never ends of itself: however fast the machine, its client leaves.
    fake_server.behaviour.fault = lambda body: "stall" if "messages" in body else ""
    monkeypatch.setattr(abuse, "ABORT_WITHIN", 0.5)
    checks = served.Checks()
    found = run(checks, abuse.aborts, server, served, number=60)
    # How fast a plain request is says nothing on a machine that runs other tests.
    assert failed(checks) in ([], ["a plain request, after by before"])
    assert found["aborts"] + found["completed"] == 60
    assert found["aborts"] >= 30
    assert found["completed"] > 2
    assert fake_server.behaviour.running == 0


def test_what_vanished_clients_leave_is_found(
    script: Script, server: Server, fake_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    abuse, served = script("abuse"), script("served")
    fake_server.behaviour.running = 1
    settled = abuse.settled
    monkeypatch.setattr(abuse, "settled", lambda server: settled(server, 0.2))
    monkeypatch.setattr(abuse, "DRAINED_WITHIN", 0.1)
    checks = served.Checks()
    run(checks, abuse.aborts, server, served, number=3)
    assert failed(checks)[:2] == ["seconds until drained", "running, waiting, KV cache in use"]


def test_a_soak(script: Script, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    soak, served = script("soak"), script("served")
    refused = (soak.COMPLETIONS, b"{"), (soak.COMPLETIONS, []), ("/v1/nothing", {})
    monkeypatch.setattr(soak, "BAD", refused)
    checks = served.Checks()
    clients = {"chat": 2, "long": 1, "vanish": 1, "bad": 1}
    found = asyncio.run(soak.soak(server, checks, 2.0, 0.1, clients))
    assert failed(checks) in ([], ["growth of memory"])
    assert set(found["counts"]) == {"chat right", "long right", "vanish right", "bad right"}
    assert len(found["samples"]) > 3
    assert found["line"]["mean"] > 2**20
    soak.write_plot(found["samples"], found["line"], tmp_path / "soak.png")
    assert (tmp_path / "soak.png").stat().st_size > 1000
    monkeypatch.setattr(soak, "BAD", ((soak.COMPLETIONS, {"prompt": "x"}),))
    checks = served.Checks()
    found = asyncio.run(soak.soak(server, checks, 1.0, 0.1, {"bad": 1}))
    assert "requests that got another answer than they should" in failed(checks)
    assert found["surprises"][0].startswith("bad: {'prompt': 'x'}: HTTP 200")


def test_the_line_through_memory(script: Script) -> None:
    samples = [
        {"seconds": 10.0 * n, "rss": {"total": 1000 if n < 3 else 2000 + 30 * n + (-1) ** n}}
        for n in range(16)
    ]
    found = script("soak").line(samples)
    assert found["from_second"] == 30.0
    assert found["slope"] == pytest.approx(3.0, rel=0.01)
    assert found["growth"] == pytest.approx(3.0 * 120 / 2270, rel=0.01)


@pytest.mark.slow
def test_fuzzing(script: Script, server: Server, fake_server: Any) -> None:
    fuzz_http, served = script("fuzz_http"), script("served")
    checks = served.Checks()
    found = fuzz_http.fuzz(server, checks, cases=20, examples=10)
    assert not failed(checks)
    assert found["cases"] >= 20
    fake_server.behaviour.faulty = True
    checks = served.Checks()
    found = fuzz_http.fuzz(server, checks, cases=10, examples=10)
    assert "kinds of server errors" in failed(checks)
    assert "/detokenize" in found["said"][0]


def test_results_tell_where_they_are_from(script: Script, tmp_path: Path) -> None:
    served = script("served")
    good, bad = served.Check("a", 1, "1", True), served.Check("b", 2, "1", False)
    served.write_results(tmp_path / "good.json", [good], {"figure": 3})
    found = json.loads((tmp_path / "good.json").read_text())
    assert (found["passed"], found["figure"]) == (True, 3)
    assert {"date", "commit", "machine"} <= set(found)
    with pytest.raises(SystemExit):
        served.write_results(tmp_path / "bad.json", [good, bad], {})
    found = json.loads((tmp_path / "bad.json").read_text())
    assert found["passed"] is False
    assert found["checks"][1] == {"name": "b", "found": 2, "wanted": "1", "passed": False}
