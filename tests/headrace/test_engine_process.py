"""The engine in a process of its own: the same answers, and nothing left when either side goes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import glob
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import LLM, AsyncLLM, SamplingParams, hookimpl
from headrace.core.errors import ConfigError, EngineError, PluginCallError, RequestError
from headrace.process.client import ProcessClient
from headrace.process.connection import CoreConnection
from headrace.process.hosts import ThreadHost

PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5], list(range(40)), [4]]
DRAWN = SamplingParams(max_tokens=24, temperature=0.9, seed=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
LONG = SamplingParams(max_tokens=1900, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Callable[..., Path]) -> str:
    """A random Llama of two layers, without a tokenizer."""
    file = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return str(tiny_gguf(file, {"llama.context_length": 2048}))


def make(tiny: str, **options: Any) -> LLM:
    return LLM(tiny, max_model_len=2048, show_report=False, **options)


def core_pids() -> set[int]:
    """Processes of engines that this process started.

    Other tests in this process may have left other children, such as Python's tracker of resources.
    """
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            # Before it has its title it is `python -P -m headrace.process.core_main`.
            if child.status() != psutil.STATUS_ZOMBIE and "headrace" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be its parent there to see it or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(autouse=True)
def folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sockets of a test's engines lie where nobody else's do; the path must be short."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


def sockets() -> set[str]:
    """Folders with sockets of engines."""
    return set(glob.glob(f"{tempfile.gettempdir()}/headrace-*"))


def told(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, DRAWN, use_tqdm=False)
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs)
        for output in outputs
    ]


@pytest.fixture(scope="module")
def apart(tiny: str) -> Iterator[LLM]:
    """An engine in a process of its own."""
    with make(tiny, engine_process=True) as llm:
        yield llm


def test_answers_and_logprobs_are_those_of_an_engine_in_this_process(tiny: str, apart: LLM) -> None:
    assert isinstance(apart.client, ProcessClient)
    with make(tiny) as here:
        assert told(apart) == told(here)
        assert apart.report.executor["fingerprint"] == here.report.executor["fingerprint"]
        assert apart.metrics().keys() == here.metrics().keys()


def test_the_process_has_a_title_and_another_pid(apart: LLM) -> None:
    titles = [psutil.Process(pid).cmdline()[0] for pid in core_pids()]
    assert titles == ["headrace-core-0"]


def test_embeddings_cross_processes(tiny: str, apart: LLM) -> None:
    with make(tiny) as here:
        assert apart.embed([[1, 2, 3]], use_tqdm=False)[0].embedding == pytest.approx(
            here.embed([[1, 2, 3]], use_tqdm=False)[0].embedding, abs=0
        )


def test_an_interrupted_stream_ends_in_the_engine(apart: LLM) -> None:
    stream = apart.stream([1, 2, 3], LONG)
    next(stream)
    stream.close()
    deadline = time.monotonic() + 60
    while apart.metrics()["num_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.01)
    metrics = apart.metrics()
    assert metrics["num_requests_running"] == 0
    assert metrics["kv_blocks_free"] == metrics["kv_blocks_total"]
    assert apart.reset_prefix_cache()


def test_calls_reach_plugins_and_what_they_raise_comes_back(apart: LLM) -> None:
    before = apart.metrics()["num_steps"]
    counted = apart.client.call("engine_metrics", "metrics")
    # After the last request a step may follow that tells who is gone.
    assert 0 < before <= counted["num_steps"] <= apart.metrics()["num_steps"]
    with pytest.raises(PluginCallError, match=r"engine_metrics.on_finish raised TypeError"):
        apart.client.call("engine_metrics", "on_finish")
    with pytest.raises(EngineError, match="'_steps' of plugin 'engine_metrics' is not for calling"):
        apart.client.call("engine_metrics", "_steps")
    with pytest.raises(EngineError, match="the engine has no call 'dance'; there are: metrics, snapshot"):
        apart.client.call("", "dance")


class Inline:
    """A plugin that lives in this process alone."""

    name = "inline"
    headrace_api = ">=1,<2"

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        registrar.request_option("inline", bool)


def test_objects_of_this_process_are_refused_with_the_ways_out(tiny: str) -> None:
    """Source: vllm-project/vllm#18740."""
    before = sockets()
    with pytest.raises(ConfigError, match=r"'inline'.*object of this process.*plugin_files.*entry point"):
        make(tiny, engine_process=True, plugins=[Inline()])
    assert sockets() == before


PLUGIN = """
import gc
import os

from headrace import hookimpl

name = "favour"
headrace_api = ">=1,<2"


def factory(params):
    def process(row, logits):
        logits[7] = 1000.0
        return logits

    return process if params.options.get("favour") else None


class Tellers:
    name = "favour"

    def __init__(self, context):
        self.share = context.share

    def tell(self, value):
        self.share("favour/value", value)
        return os.getpid()

    def objects(self):
        return gc.get_freeze_count(), len(gc.get_objects())

    def __getattr__(self, name):
        if name.startswith("on_"):
            return lambda *args: None
        raise AttributeError(name)

    def metrics(self):
        return {}


@hookimpl
def headrace_register(registrar, options):
    registrar.request_option("favour", bool)
    registrar.logits_processor("favour", factory)
    registrar.engine_listener("favour", Tellers)
"""


def test_plugins_of_files_work_in_the_engines_process(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "favour.py"
    file.write_text(PLUGIN)
    with make(tiny, engine_process=True, plugin_files=[str(file)]) as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True, favour=True)
        assert llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs[0].token_ids == [7] * 4
        assert llm.client.call("favour", "tell", {"a": [1]}) in core_pids()
        llm.generate(
            [[1, 2]], params, use_tqdm=False
        )  # what is shared comes with the next word of the engine
        assert llm.front.shared["favour/value"] == {"a": [1]}
        frozen, looked_at = llm.client.call("favour", "objects")
        assert frozen > 50_000, "what starting made is left alone"
        assert looked_at < frozen / 4


def test_a_wrong_option_of_the_engine_is_raised_here(tiny: str) -> None:
    before = sockets(), core_pids()
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        make(tiny, engine_process=True, kv_cache_memory=16)
    assert (sockets(), core_pids()) == before


def test_a_killed_engine_fails_the_call_with_its_cause(tiny: str) -> None:
    before, others = sockets(), core_pids()
    with make(tiny, engine_process=True) as llm:
        [pid] = core_pids() - others
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(EngineError, match=rf"pid {pid}\) was killed by signal 9"):
            while True:
                llm.generate(PROMPTS, LONG, use_tqdm=False)
        with pytest.raises(EngineError, match=r"was killed by signal 9"):
            llm.generate([[1]], DRAWN, use_tqdm=False)
    assert sockets() == before


@pytest.mark.slow
def test_deleting_an_engine_leaves_no_process_and_no_memory(tiny: str) -> None:
    """Source: vllm-project/vllm#21073."""
    process, before, sizes = psutil.Process(), (sockets(), core_pids()), []
    for _ in range(4):
        first, second = make(tiny, engine_process=True), make(tiny, engine_process=True)
        assert told(first) == told(second)
        del first, second
        gc.collect()
        assert (sockets(), core_pids()) == before
        sizes.append(process.memory_info().rss)
    assert sizes[-1] < sizes[0] * 1.1


ENDINGS = {
    "return": ("pass", 0),
    "exit": ("sys.exit(3)", 3),
    "raise": ("raise RuntimeError('unhandled')", 1),
    "_exit": ("os._exit(4)", 4),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    "term": ("os.kill(os.getpid(), signal.SIGTERM)", -15),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDINGS)
def test_however_a_program_ends_its_engine_ends_too(tiny: str, how: str) -> None:
    """Source: vllm-project/vllm#25850."""
    code, status = ENDINGS[how]
    program = (
        "import os, signal, sys, threading, psutil\n"
        "from headrace import LLM, SamplingParams\n"
        "before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]\n"
        f"llm = LLM({tiny!r}, engine_process=True, show_report=False)\n"
        "assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "run = lambda: llm.generate([[1]], SamplingParams(max_tokens=1900, ignore_eos=True), use_tqdm=False)\n"
        "threading.Thread(target=run, daemon=True).start()\n"
        f"{code}\n"
    )
    before = sockets()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    pid = int(done.stdout)
    deadline = time.monotonic() + 60
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_gone(pid)
    assert sockets() == before


@pytest.mark.slow
def test_engines_that_start_at_the_same_moment_do_not_meet(tiny: str) -> None:
    """Source: vllm-project/vllm#28498."""
    program = (
        "from headrace import LLM, SamplingParams\n"
        f"llm = LLM({tiny!r}, engine_process=True, show_report=False)\n"
        "params = SamplingParams(max_tokens=16, seed=1, ignore_eos=True)\n"
        "print(llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids)\n"
    )
    before = sockets()
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(6)
    ]
    answers = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 6
    assert len(set(answers)) == 1
    assert sockets() == before


# For programs with an event loop ---------------------------------------------------------------------


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> Any:
    return [output async for output in llm.generate(prompt, params)][-1]


@pytest.mark.parametrize("process", [True, False])
def test_async_answers_are_the_same(tiny: str, process: bool) -> None:
    async def work() -> list[Any]:
        async with await AsyncLLM.start(
            tiny, max_model_len=2048, show_report=False, engine_process=process
        ) as llm:
            assert (llm.engine_pid == os.getpid()) is not process
            outputs = await asyncio.gather(*(last(llm, prompt, DRAWN) for prompt in PROMPTS))
            with pytest.raises(RequestError, match="at most 2047 fit"):
                await llm.prepare([1] * 2100, DRAWN)
            stopped = llm.generate([1, 2], LONG)
            await anext(stopped)
            await stopped.aclose()
            for _ in range(500):
                metrics = await llm.metrics()
                if not metrics["num_requests_running"]:
                    break
                await asyncio.sleep(0.01)
            assert metrics["kv_blocks_free"] == metrics["kv_blocks_total"]
            assert not llm.num_unfinished
        return [(out.outputs[0].token_ids, out.outputs[0].logprobs, out.prompt_logprobs) for out in outputs]

    answers = asyncio.run(work())
    with make(tiny) as here:
        assert answers == told(here)


SLOW = """
import time

from headrace import hookimpl
from headrace.core.interfaces import RunnerListener

name = "slow"
headrace_api = ">=1,<2"


class Slow(RunnerListener):
    name = "slow"

    def __init__(self, context):
        pass

    def on_batch(self, batch):
        time.sleep(0.03)


@hookimpl
def headrace_register(registrar, options):
    registrar.runner_listener("slow", Slow)
"""
"""A long answer takes a minute, so that none is over before its engine is killed."""


def test_a_killed_engine_fails_every_open_request_at_once(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    options = {"max_model_len": 2048, "show_report": False, "plugin_files": [str(tmp_path / "slow.py")]}

    async def work() -> None:
        async with await AsyncLLM.start(tiny, **options) as llm:
            assert llm.engine_pid is not None
            open_requests = [asyncio.create_task(last(llm, [i], LONG)) for i in range(1, 9)]
            while (await llm.metrics())["generation_tokens"] < 16:
                await asyncio.sleep(0.01)
            os.kill(llm.engine_pid, signal.SIGKILL)
            # Nobody answers: who did not notice at once would wait for good.
            waiting = asyncio.gather(*open_requests, return_exceptions=True)
            results = await asyncio.wait_for(waiting, 30)
            assert all(isinstance(result, EngineError) for result in results), results
            assert "was killed by signal 9" in str(llm.lost)
            with pytest.raises(EngineError, match="was killed by signal 9"):
                await last(llm, [1], LONG)

    before = sockets()
    asyncio.run(work())
    assert sockets() == before


def test_a_request_that_comes_while_an_engine_takes_anothers_place_is_told_so(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was noted with what belonged to the engine before, and its answer came to nobody."""

    async def main() -> None:
        async with await AsyncLLM.start(tiny, engine_process=False, show_report=False) as llm:
            hello, asked, answered = CoreConnection.hello, asyncio.Event(), asyncio.Event()

            async def late(connection: CoreConnection) -> Any:
                ready = await hello(connection)
                asked.set()
                await answered.wait()
                return ready

            monkeypatch.setattr(CoreConnection, "hello", late)
            request = await llm.prepare([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
            connecting = asyncio.create_task(llm.connect("inproc://headrace-core"))
            await asked.wait()
            assert "still starting" in str(llm.lost)
            with pytest.raises(EngineError, match="still starting"):
                llm.submit(request)
            answered.set()
            await connecting
            assert llm.lost is None
            output = await last(llm, [5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
            assert len(output.outputs[0].token_ids) == 3

    asyncio.run(main())


def test_a_thread_that_has_ended_already_can_be_stopped(tiny: str) -> None:
    """Its loop may end at any moment: of itself, or between being told and being woken."""

    async def main() -> None:
        llm = await AsyncLLM.start(tiny, engine_process=False, show_report=False)
        host = llm._host
        assert isinstance(host, ThreadHost)
        host._server.stop()
        await asyncio.to_thread(host._thread.join, 30)
        assert not host._thread.is_alive()
        await llm.shutdown()

    asyncio.run(main())
