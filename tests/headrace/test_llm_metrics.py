"""`LLM.metrics` on a real engine: every documented name, and the same sums as the answers' own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.inprocess import InProcessClient


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Callable[..., Path]) -> str:
    return str(tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", {"llama.context_length": 1024}))


@pytest.fixture
def llm(tiny: str) -> Iterator[LLM]:
    with LLM(tiny, max_num_batched_tokens=64, show_report=False) as made:
        yield made


def test_every_documented_name_is_there_from_the_start_and_no_other(llm: LLM) -> None:
    assert isinstance(llm.client, InProcessClient)
    described = {entry.name: entry.factory() for entry in llm.client.front.registry.entries("metric")}
    told = llm.metrics()
    bases = {series.partition("{")[0] for series in told}
    for name, metric in described.items():
        if name == "http_requests" or name.startswith("lora_"):
            continue  # without HTTP there are none, nor without adapters
        assert (f"{name}_count" if metric.kind == "histogram" else name) in bases
    ends = {name + end for name in described for end in ("", "_bucket", "_sum", "_count")}
    assert bases <= ends
    blocks = int(told["kv_blocks_total"])
    assert (
        f'cache_config_info{{block_size="16",num_gpu_blocks="{blocks}",enable_prefix_caching="True"}}' in told
    )
    llm.generate([[1, 2, 3]], use_tqdm=False)
    assert llm.metrics().keys() == told.keys()


def test_sums_are_those_of_the_answers(llm: LLM) -> None:
    """Source: vllm-project/vllm#5250."""
    one = SamplingParams(max_tokens=7, temperature=1.0, seed=3)
    three = SamplingParams(max_tokens=9, n=3, seed=4)
    outputs = llm.generate([[i, 2, 3, 4] for i in range(5)], one, use_tqdm=False)
    outputs += llm.generate([[9, i, 5] for i in range(5)], three, use_tqdm=False)
    outputs += llm.generate([[7] * n for n in (3, 90, 1, 20)], SamplingParams(max_tokens=5), use_tqdm=False)
    told = llm.metrics()
    answers = [answer for output in outputs for answer in output.outputs]
    assert len(answers) == 5 + 15 + 4
    assert told["generation_tokens"] == sum(len(answer.token_ids) for answer in answers)
    assert told["prompt_tokens"] == sum(len(o.prompt_token_ids) * len(o.outputs) for o in outputs)
    ended = {name: value for name, value in told.items() if name.startswith("request_success")}
    assert sum(ended.values()) == len(answers)
    assert told["request_params_n_sum"] == 5 * 1 + 15 * 3 + 4 * 1
    assert told["request_params_max_tokens_sum"] == 5 * 7 + 15 * 9 + 4 * 5
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert told[f"{name}_count"] == len(answers)
    parts = ("queue", "prefill", "decode")
    assert sum(told[f"request_{part}_time_seconds_sum"] for part in parts) == pytest.approx(
        told["e2e_request_latency_seconds_sum"], rel=1e-3
    )


def test_gauges_are_zero_again_when_everything_was_aborted(tiny: str) -> None:
    """Source: vllm-project/vllm#22545. Nothing is sent between the readings."""

    async def readings() -> list[dict[str, float]]:
        params = SamplingParams(max_tokens=900, ignore_eos=True)
        async with await AsyncLLM.start(tiny, engine_process=False, max_num_seqs=16) as llm:
            requests = [await llm.prepare([i, 1, 2], params) for i in range(40)]
            for request in requests:
                llm.submit(request)
            told = []
            while not told or told[-1]["generation_tokens"] < 100:
                told = [dict(await llm.metrics())]
            llm.abort([request.front.request_id for request in requests])
            for _ in range(3):
                await asyncio.sleep(0.3)
                told.append(dict(await llm.metrics()))
            return told

    busy, *idle = asyncio.run(readings())
    assert busy["num_requests_running"] == 16
    assert busy["num_requests_waiting"] == busy['num_requests_waiting_by_reason{reason="capacity"}'] == 24
    assert busy["kv_cache_usage_perc"] > 0
    for told in idle:
        assert told["num_requests_running"] == told["num_requests_waiting"] == 0
        assert told["kv_cache_usage_perc"] == 0
        assert told['request_success{finished_reason="abort"}'] == 40


def test_the_page_on_metrics_names_them_all(llm: LLM) -> None:
    assert isinstance(llm.client, InProcessClient)
    page = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
    words = set(re.findall(r"`(\w+)(?:\{[\w,]+\})?`", page.read_text()))
    assert {entry.name for entry in llm.client.front.registry.entries("metric")} <= words
