"""The periodic line: its figures, and its silence."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace import AsyncLLM, SamplingParams
from headrace.core.errors import EngineError
from headrace.server.stats_log import log_stats, stats_line

IDLE = {
    "prompt_tokens": 1000.0,
    "generation_tokens": 500.0,
    "num_requests_running": 0.0,
    "num_requests_waiting": 0.0,
    "kv_cache_usage_perc": 0.0,
    "prefix_cache_queries": 900.0,
    "prefix_cache_hits": 100.0,
    "num_preemptions": 4.0,
}


def test_a_busy_interval() -> None:
    now = IDLE | {
        "prompt_tokens": 1500.0,
        "generation_tokens": 525.0,
        "num_requests_running": 3.0,
        "num_requests_waiting": 2.0,
        "kv_cache_usage_perc": 0.1234,
        "prefix_cache_queries": 1300.0,
        "prefix_cache_hits": 300.0,
        "num_preemptions": 6.0,
    }
    assert stats_line(IDLE, now, 10.0) == (
        "prompts 50.0 tokens/s, answers 2.5 tokens/s, running 3, waiting 2, KV cache 12.3 %, "
        "prefix cache hits 50.0 %, preemptions 2"
    )


def test_what_did_not_happen_is_left_out() -> None:
    now = IDLE | {"generation_tokens": 600.0, "num_requests_running": 1.0}
    assert stats_line(IDLE, now, 2.0) == (
        "prompts 0.0 tokens/s, answers 50.0 tokens/s, running 1, waiting 0, KV cache 0.0 %"
    )


def test_an_idle_engine_says_nothing_and_one_that_just_ended_says_so_once() -> None:
    after = IDLE | {"generation_tokens": 501.0}
    assert stats_line(IDLE, IDLE, 1.0) is None
    assert stats_line(IDLE, after, 1.0) is not None
    assert stats_line(after, after, 1.0) is None
    assert stats_line({}, {}, 1.0) is None


@pytest.mark.parametrize("name", ["num_requests_running", "num_requests_waiting"])
def test_requests_that_get_nowhere_are_worth_a_line(name: str) -> None:
    assert stats_line(IDLE, IDLE | {name: 1.0}, 1.0) is not None


def test_an_engine_that_was_started_anew_counts_from_zero() -> None:
    now = dict.fromkeys(IDLE, 0.0) | {"generation_tokens": 30.0}
    assert "answers 3.0 tokens/s" in (stats_line(IDLE, now, 10.0) or "")


# The loop -----------------------------------------------------------------------------------------------


class Engine:
    """Tells one reading after the other; None: it is gone."""

    def __init__(self, *readings: dict[str, float] | None) -> None:
        self.readings = list(readings)
        self.done = asyncio.Event()

    async def call(self, plugin: str, method: str, *args: Any) -> Any:
        raise AssertionError("not asked for")

    async def metrics(self) -> Mapping[str, float]:
        if not self.readings:
            self.done.set()
            return {}
        reading = self.readings.pop(0)
        if reading is None:
            raise EngineError("gone")
        return reading


async def logged(engine: Engine) -> None:
    task = asyncio.create_task(log_stats(engine, 0.001))
    await engine.done.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_lines_come_while_there_is_something_to_say(caplog: pytest.LogCaptureFixture) -> None:
    busy = IDLE | {"generation_tokens": 600.0, "num_requests_running": 1.0}

    async def run() -> None:
        await logged(
            Engine(IDLE, IDLE, busy, IDLE, None, None, busy | {"num_requests_running": 7.0}, IDLE, IDLE)
        )

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    running = [re.search(r"running (\d)", line) for line in caplog.messages]
    # The last reading of 500 tokens after 600 is one of an engine that was started anew.
    assert [match[1] for match in running if match] == ["1", "0", "0"]


class Counting:
    """An engine's readings, and how many there were."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.count = 0

    async def call(self, plugin: str, method: str, *args: Any) -> Any:
        raise AssertionError("not asked for")

    async def metrics(self) -> Mapping[str, float]:
        found = await self.llm.metrics()
        self.count += 1
        return found

    async def more(self, count: int) -> None:
        """Wait until it was read so many times from now."""
        until = self.count + count
        while self.count < until:
            await asyncio.sleep(0.005)


def test_a_line_of_a_real_engine(
    caplog: pytest.LogCaptureFixture, tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    async def run() -> None:
        path = tiny_gguf(tmp_path / "tiny.gguf", {"llama.context_length": 32768})
        async with await AsyncLLM.start(str(path), engine_process=False) as llm:
            readings = Counting(llm)
            task = asyncio.create_task(log_stats(readings, 0.02))
            answer = llm.generate([1, 2, 3], SamplingParams(max_tokens=30_000, ignore_eos=True))
            async with contextlib.aclosing(answer):
                async for _ in answer:
                    if any("running 1" in line for line in caplog.messages):
                        break
            await readings.more(
                3
            )  # the one that was under way when it ended, the one that tells of it, and one more
            told = len(caplog.messages)
            await readings.more(3)
            assert len(caplog.messages) == told
            task.cancel()

    with caplog.at_level(logging.INFO, logger="headrace.stats"):
        asyncio.run(run())
    rates = [re.search(r"answers ([\d.]+) tokens/s, running (\d+)", line) for line in caplog.messages]
    assert rates
    assert any(match and float(match[1]) > 0 and match[2] == "1" for match in rates)
