"""Engines come, live beside each other, and go."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import LLM, SamplingParams, hookimpl
from headrace.core.interfaces import LogitsRow
from headrace.inprocess import InProcessClient

pytestmark = pytest.mark.weights

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make(**options: Any) -> LLM:
    return LLM("smollm2", dtype="float32", max_model_len=128, show_report=False, **options)


class Favour:
    """A plugin whose processor makes one token win; a request turns it on by an option."""

    headrace_api = ">=1,<2"

    def __init__(self, token: int) -> None:
        self.name = f"favour_{token}"
        self.token = token

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        token = self.token

        def factory(params: SamplingParams) -> Any:
            def process(row: LogitsRow, logits: Any) -> Any:
                logits[token] = 1000.0
                return logits

            return process if params.options.get("favour") else None

        registrar.request_option("favour", bool)
        registrar.logits_processor(self.name, factory)


def test_two_engines_with_different_plugins_live_in_one_process() -> None:
    first, second = make(plugins=[Favour(100)]), make(plugins=[Favour(200)])
    asked = SamplingParams(temperature=0, max_tokens=4, favour=True)
    assert first.generate("hi", asked, use_tqdm=False)[0].outputs[0].token_ids == [100] * 4
    assert second.generate("hi", asked, use_tqdm=False)[0].outputs[0].token_ids == [200] * 4
    plain = [llm.generate("hi", PARAMS, use_tqdm=False)[0].outputs[0].token_ids for llm in (first, second)]
    assert plain[0] == plain[1]


class Sour:
    """A plugin that fails for one request."""

    name = "sour"
    headrace_api = ">=1,<2"

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        def factory(params: SamplingParams) -> Any:
            def process(row: LogitsRow, logits: Any) -> Any:
                if params.options["sour"] == "nan":
                    return logits * float("nan")
                raise ArithmeticError("too sour")

            return process if "sour" in params.options else None

        registrar.request_option("sour", str)
        registrar.logits_processor("sour", factory)


@pytest.mark.parametrize(("how", "words"), [("raise", "too sour"), ("nan", "NaN")])
def test_a_plugin_that_fails_for_one_request_harms_no_other(how: str, words: str) -> None:
    llm = make(plugins=[Sour()])
    params = [PARAMS, SamplingParams(temperature=0, max_tokens=8, sour=how), PARAMS]
    good, bad, other = llm.generate(["a b c", "d e f", "g h i"], params, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert words in (bad.error or "")
    alone = make()
    for output in (good, other):
        assert output.outputs[0].finish_reason == "length"
        again = alone.generate(output.prompt, PARAMS, use_tqdm=False)[0]
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
    metrics = llm.metrics()
    assert metrics["kv_blocks_free"] == metrics["kv_blocks_total"]


def test_deleting_an_engine_frees_its_memory() -> None:
    """Source: vllm-project/vllm#21073."""
    process = psutil.Process()
    children = set(
        process.children()
    )  # other tests may have left some, such as Python's tracker of resources
    answers, sizes = [], []
    for _ in range(5):
        llm = make()
        answers.append(llm.generate("The weather", PARAMS, use_tqdm=False)[0].outputs[0].token_ids)
        del llm
        gc.collect()
        sizes.append(process.memory_info().rss)
    assert len({tuple(answer) for answer in answers}) == 1
    assert sizes[-1] < sizes[0] * 1.1
    assert set(process.children()) <= children


HELD = """
import re, torch

def resident():
    fields = open("/proc/self/status").read()
    return sum(int(kilobytes) for kilobytes in re.findall(r"Rss(?:Anon|Shmem):\\s+(\\d+)", fields)) * 1024

before = resident()
from headrace import LLM, SamplingParams
llm = LLM("smollm2", dtype="bfloat16", kv_cache_memory="64MiB", max_model_len=2048, show_report=False)
llm.generate([list(range(100, 1100))] * 2, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
print(resident() - before - llm.report.executor["weights_bytes"] - (64 << 20))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="tells memory of its own from pages of files by /proc")
def test_an_engine_holds_its_weights_once_and_little_else() -> None:
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    assert -50e6 < int(done.stdout) < 200e6


def test_works_inside_a_running_loop() -> None:
    async def notebook_cell() -> list[int]:
        llm = make()
        return llm.generate("hi", PARAMS, use_tqdm=False)[0].outputs[0].token_ids

    assert len(asyncio.run(notebook_cell())) == 8


def test_works_in_a_plain_script_without_a_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from headrace import LLM, SamplingParams\n"
        "llm = LLM('smollm2', max_model_len=64)\n"
        "out = llm.generate(['hi', 'you'], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))\n"
        "print(sum(len(o.outputs[0].token_ids) for o in out))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "6\n"
    assert "ready in" in done.stderr


INTERRUPTED_LOAD = """
import os, signal, sys
from headrace import LLM

def press(event, args):
    if event == "mmap.__new__":
        print("pressed", flush=True)
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(press)
LLM("smollm2", max_model_len=64)
"""
"""Ctrl-C comes when the weights are opened, however long anything took before."""


def test_ctrl_c_during_load_ends_cleanly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED_LOAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    said, errors = process.communicate(timeout=120)
    assert said == "pressed\n"
    assert process.returncode in (-signal.SIGINT, 130, 1)
    assert "KeyboardInterrupt" in errors
    assert not psutil.pid_exists(process.pid)


def test_ctrl_c_during_generate_leaves_the_engine_usable() -> None:
    llm = make()
    client = llm.client
    assert isinstance(client, InProcessClient)

    class Interrupt:
        def __init__(self) -> None:
            self.step = client.engine.core.step
            self.calls = 0

        def __call__(self) -> Any:
            self.calls += 1
            if self.calls == 5:
                os.kill(os.getpid(), signal.SIGINT)
            return self.step()

    interrupt = Interrupt()
    client.engine.core.step = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    client.engine.core.step = interrupt.step  # type: ignore[method-assign]
    metrics = llm.metrics()
    assert metrics["num_requests_running"] == 0
    assert metrics["kv_blocks_free"] == metrics["kv_blocks_total"]
    assert len(llm.generate("c", PARAMS, use_tqdm=False)[0].outputs[0].token_ids) == 8
