"""An engine that fails says why: in the log, first, and to everybody who waits; without anybody's text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.core.config import CacheSection, EngineConfig, PluginsSection
from headrace.core.errors import EngineError
from headrace.process.redaction import config_for_log
from headrace.server.options import ServerSection

PLUGIN = """
import math
import time
from headrace import hookimpl
from headrace.core.interfaces import RunnerListener

name = "poison"
headrace_api = ">=1,<2"

class Poison(RunnerListener):
    name = "poison"

    def __init__(self, context):
        self.added = {}

    def on_add(self, request):
        self.added[request.request_id] = request.params.options.get("poison")

    def on_remove(self, request_id):
        self.added.pop(request_id, None)

    def on_batch(self, batch):
        if "step" in self.added.values():
            raise RuntimeError("the forward pass exploded")
        if "slow" in self.added.values():
            time.sleep(0.1)

def process(params):
    how = params.options.get("poison")

    def processor(row, logits):
        if how == "raise":
            raise ValueError("sour")
        return logits * math.nan

    return processor if how in ("raise", "nan") else None

@hookimpl
def headrace_register(registrar, options):
    registrar.request_option("poison", str)
    registrar.runner_listener("poison", Poison)
    registrar.logits_processor("poison", process)
"""

GOOD = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [41, 42, 43, 44, 45]


def bad(how: str) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=8, poison=how)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Callable[..., Path]) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("failing")
    (folder / "poison.py").write_text(PLUGIN)
    return {
        "model": str(tiny_gguf(folder / "tiny.gguf")),
        "plugin_files": [str(folder / "poison.py")],
        "show_report": False,
    }


@pytest.mark.parametrize("how", ["raise", "nan", "step"])
@pytest.mark.parametrize("engine_process", [False, True])
def test_a_poisoned_request_kills_neither_the_engine_nor_a_later_one(
    options: dict[str, Any], engine_process: bool, how: str
) -> None:
    with LLM(**options, engine_process=engine_process) as llm:
        (right,) = llm.generate([PROMPT], GOOD, use_tqdm=False)
        poisoned = llm.generate([[1, 2, 3], PROMPT], [bad(how), GOOD], use_tqdm=False)
        assert poisoned[0].outputs[0].finish_reason == "error"
        words = {"raise": "sour", "nan": "NaN", "step": "RuntimeError: the forward pass exploded"}[how]
        assert words in (poisoned[0].error or "")
        if how != "step":  # which fails all that were in it
            assert poisoned[1].outputs[0].token_ids == right.outputs[0].token_ids
        (again,) = llm.generate([PROMPT], GOOD, use_tqdm=False)
        assert again.outputs[0].token_ids == right.outputs[0].token_ids
        told = llm.metrics()
        assert told["kv_blocks_free"] == told["kv_blocks_total"]


def test_the_log_of_an_engine_that_stops_names_the_cause_first(
    options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    keyed = options | {"api_key": ["sk-very-private"], "served_model_name": ["mine"]}
    keyed.pop("show_report")

    async def work() -> list[BaseException | Any]:
        async with await AsyncLLM.start(**keyed) as llm:
            # Slow, so that it is not over before the first of the others comes, whenever that is.
            slow = SamplingParams(max_tokens=120, ignore_eos=True, poison="slow")
            waiting = llm.submit(await llm.prepare(PROMPT, slow))
            results: list[Any] = []
            for _ in range(3):
                try:
                    async for output in llm.generate([1, 2, 3], bad("step")):
                        results.append(output.error)
                except EngineError as error:
                    results.append(error)
            updates = []
            while not waiting.is_over:
                updates += await waiting.take()
            results.append(updates[-1].output.error)
            with pytest.raises(EngineError, match="the forward pass exploded"):
                await anext(llm.generate(PROMPT, GOOD))
            return results

    results = asyncio.run(work())
    assert all("RuntimeError: the forward pass exploded" in str(result) for result in results)
    assert len(results) == 4
    assert isinstance(results[2], EngineError)
    log = capfd.readouterr().err
    errors = [line for line in log.splitlines() if re.search(r"ERROR|CRITICAL", line)]
    assert "failed: runner listener 'poison' failed in on_batch: RuntimeError: the forward pass" in errors[0]
    assert len(errors) == 4
    assert "stopped: the engine stopped after 3 failed steps: runner listener 'poison' failed" in errors[3]
    assert log.count('poison.py", line') == 3  # the traceback of each step, once
    for line in ("plan: StepPlan(", "state: {", "configuration: {"):
        assert line in log
    assert "'served_model_name': ['mine']" in log
    assert "sk-very-private" not in log
    assert str(PROMPT).strip("[]") not in log


def test_secrets_are_left_out_of_a_logged_configuration() -> None:
    config = EngineConfig(
        model="tiny",
        max_model_len=64,
        cache=CacheSection(num_kv_blocks=9),
        plugins=PluginsSection(options={"store": {"access_token": "abc", "level": 3, "keys": {"a": "b"}}}),
        sections={"server": ServerSection(api_key=["k1", "k2"], ssl_keyfile="key.pem", port=1)},
    )
    assert config_for_log(config) == {
        "model": "tiny",
        "max_model_len": 64,
        "cache": {"num_kv_blocks": 9},
        "plugins": {"options": {"store": {"access_token": "***", "level": 3, "keys": {"a": "b"}}}},
        "server": {"api_key": "***", "ssl_keyfile": "***", "port": 1},
    }
