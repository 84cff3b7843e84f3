"""Adapters come and go while an engine runs: versions, memory, slots, and what else goes on meanwhile."""

from __future__ import annotations

import gc
import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import LLM, SamplingParams
from headrace.core.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = [(7 * i) % 131 for i in range(80)]
"""Five blocks."""


def start(base: Any, **options: Any) -> LLM:
    return LLM(str(base.folder), dtype="float32", show_report=False, **options)


def answer(llm: LLM, prompt: Sequence[int], name: str | None, params: SamplingParams = GREEDY) -> list[int]:
    return list(llm.generate(list(prompt), params, lora=name, use_tqdm=False)[0].outputs[0].token_ids)


def load(llm: LLM, name: str, path: Path, in_place: bool = False) -> dict[str, Any]:
    """Load as a server's route does, for an engine whose loop nobody runs."""
    outcome = llm.client.call("lora", "load", name, str(path), in_place)
    deadline = time.monotonic() + 300  # loading stands back behind everything else
    while "ticket" in outcome:
        assert time.monotonic() < deadline
        found = llm.client.call("lora", "loaded", outcome["ticket"])
        time.sleep(0.002)
        outcome = found or outcome
    return dict(outcome)


@pytest.mark.parametrize("how", ["in place", "unload and load", "same path"])
def test_another_version_never_meets_the_cache_of_the_old_one(
    tmp_path: Path, base: Any, adapter: Callable[..., Path], how: str
) -> None:
    first, second = adapter(tmp_path / "first", 8, seed=1), adapter(tmp_path / "second", 8, seed=2)
    with start(base, enable_lora_loading=True) as llm:
        assert load(llm, "x", first) == {
            "status": 200,
            "text": "Success: LoRA adapter 'x' added successfully.",
        }
        old = answer(llm, LONG, "x")
        again = llm.generate(LONG, GREEDY, lora="x", use_tqdm=False)[0]
        assert again.num_cached_tokens == 64
        assert list(again.outputs[0].token_ids) == old
        if how == "unload and load":
            assert llm.client.call("lora", "unload", "x")["status"] == 200
            assert load(llm, "x", second)["status"] == 200
        elif how == "in place":
            assert load(llm, "x", second, in_place=True)["status"] == 200
        else:
            shutil.rmtree(first)
            shutil.copytree(second, first)
            assert load(llm, "x", first, in_place=True)["status"] == 200
        after = llm.generate(LONG, GREEDY, lora="x", use_tqdm=False)[0]
        assert after.num_cached_tokens == 0
    with start(base, lora_modules={"x": second}) as cold:
        assert list(after.outputs[0].token_ids) == answer(cold, LONG, "x") != old


def test_base_and_adapters_share_no_cache(tmp_path: Path, base: Any, adapter: Callable[..., Path]) -> None:
    modules = {"a": adapter(tmp_path / "a", 8, seed=1), "b": adapter(tmp_path / "b", 8, seed=2)}
    modules["same"] = modules["a"]
    with start(base, lora_modules=modules) as llm:
        cached = [
            llm.generate(LONG, GREEDY, lora=name, use_tqdm=False)[0].num_cached_tokens
            for name in (None, "a", "b", None, "a", "b", "same")
        ]
    assert cached == [0, 0, 0, 64, 64, 64, 64]


def test_a_running_request_keeps_the_version_it_began_with(
    tmp_path: Path, base: Any, adapter: Callable[..., Path]
) -> None:
    first, second = adapter(tmp_path / "first", 8, seed=1), adapter(tmp_path / "second", 8, seed=2)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with start(base, lora_modules={"x": first}, enable_lora_loading=True, enable_prefix_caching=False) as llm:
        old = answer(llm, LONG, "x", params)
        stream = llm.stream(LONG, params.model_copy(update={"lora": "x"}))
        given = list(itertools.chain(*(delta.token_ids for delta in itertools.islice(stream, 10))))
        assert load(llm, "x", second, in_place=True)["status"] == 200
        given += list(itertools.chain(*(delta.token_ids for delta in itertools.islice(stream, 10))))
        assert llm.client.call("lora", "unload", "x")["status"] == 200
        with pytest.raises(RequestError, match="there is no adapter 'x'; there are: none"):
            answer(llm, LONG, "x")
        given += list(itertools.chain(*(delta.token_ids for delta in stream)))
        assert given == old
        assert llm.client.call("lora", "unload", "x")["status"] == 404


def test_what_cannot_be_loaded_says_why_and_is_not_there(
    tmp_path: Path, base: Any, adapter: Callable[..., Path]
) -> None:
    good = adapter(tmp_path / "in" / "good", 4)
    wrong = adapter(tmp_path / "in" / "wrong", 65)
    outside = adapter(tmp_path / "outside", 4)
    name = str(base.folder)
    with start(
        base, lora_modules={"x": good}, enable_lora_loading=True, lora_roots=[str(tmp_path / "in")]
    ) as llm:
        for args, status, message in (
            (("y", wrong), 400, "65 is above the largest rank allowed, 64"),
            (("y", tmp_path / "in" / "nowhere"), 404, "there is no such folder"),
            (("y", tmp_path / "in"), 400, "it has no adapter_config.json"),
            (("y", outside), 400, "is outside of the folders that are allowed"),
            (("x", good), 400, "an adapter 'x' is loaded already"),
            ((name, good), 400, "is the name of the base model"),
            (("", good), 400, "an adapter's name has 1 to 256 characters"),
        ):
            outcome = load(llm, *args)
            assert outcome["status"] == status
            assert message in outcome["text"]
        assert load(llm, "x", good, in_place=True)["status"] == 200
        assert llm.client.call("lora", "loaded", 99)["status"] == 404
        with pytest.raises(RequestError, match="there is no adapter 'y'; there are: x"):
            answer(llm, LONG, "y")
        assert len(answer(llm, LONG, "x")) == 10


def test_a_folder_is_looked_into_when_somebody_asks(
    tmp_path: Path, base: Any, adapter: Callable[..., Path]
) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    adapter(tmp_path / "secret", 4)
    with start(base, lora_folder=str(folder)) as llm:
        with pytest.raises(RequestError, match="there is no adapter 'new'"):
            answer(llm, LONG, "new")
        adapter(folder / "new", 8, seed=1)
        first = answer(llm, LONG, "new")
        assert [variant.name for each in llm.front.variants for variant in each.all()] == ["new"]
        adapter(folder / "new", 8, seed=2)
        second = answer(llm, LONG, "new")
        assert first != second
        for name in ("../secret", ".", "..", "", "new/..", "a\0b"):
            with pytest.raises(RequestError, match="there is no adapter"):
                answer(llm, LONG, name)
        (folder / "link").symlink_to(tmp_path / "secret")
        with pytest.raises(RequestError, match="outside of the folders"):
            answer(llm, LONG, "link")
        (folder / "broken").mkdir()
        with pytest.raises(RequestError, match=r"it has no adapter_config\.json"):
            answer(llm, LONG, "broken")
    with start(base, lora_modules={"x": folder / "new"}) as llm:
        assert answer(llm, LONG, "x") == second


def test_a_hundred_adapters_through_a_memory_of_eight(
    tmp_path: Path, base: Any, adapter: Callable[..., Path]
) -> None:
    folder = tmp_path / "adapters"
    for i in range(100):
        adapter(folder / f"a{i}", 1 + i % 16, seed=i)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompts = [[(i + 7 * k) % 131 for k in range(6)] for i in range(100)]
    names = [f"a{i}" for i in range(100)]
    resident: list[int] = []
    with start(base, lora_folder=str(folder), max_loras=4, max_cpu_loras=8, max_num_seqs=16) as llm:
        rounds = []
        for _ in range(3):
            outputs = llm.generate(prompts, params, lora=names, use_tqdm=False)
            rounds.append([tuple(output.outputs[0].token_ids) for output in outputs])
            assert llm.metrics()["lora_adapters_in_memory"] <= 8
            gc.collect()
            resident.append(psutil.Process().memory_info().rss)
        assert rounds[0] == rounds[1] == rounds[2]
        assert resident[2] - resident[1] < 8 << 20
        for i in (0, 41, 99):
            llm.reset_prefix_cache()
            assert tuple(answer(llm, prompts[i], names[i], params)) == rounds[0][i]
        llm.reset_prefix_cache()  # raises nothing and is whole: no request is left
        assert llm.metrics()["num_requests_running"] == 0


def test_files_that_change_behind_an_adapter_are_told(
    tmp_path: Path, base: Any, adapter: Callable[..., Path]
) -> None:
    modules = {f"a{i}": adapter(tmp_path / f"a{i}", 4, seed=i) for i in range(3)}
    with start(base, lora_modules=modules, max_loras=1, max_cpu_loras=1) as llm:
        adapter(tmp_path / "a0", 4, seed=9)
        with pytest.raises(
            RequestError, match=r"of adapter 'a0' in .* changed after it was loaded; load it again"
        ):
            raise_failures(llm, "a0")
        assert len(answer(llm, LONG, "a1")) == 10


def raise_failures(llm: LLM, name: str) -> None:
    output = llm.generate(LONG, GREEDY, lora=name, use_tqdm=False)[0]
    raise RequestError(output.outputs[0].error or "no error")


def test_adapters_and_base_beyond_the_limit_of_a_step(
    tmp_path: Path, base: Any, adapter: Callable[..., Path]
) -> None:
    """LORA-03: three adapters and the base model where a step holds two, chunks of prompts, a third cancelled."""
    modules = {f"a{i}": adapter(tmp_path / f"a{i}", 8, seed=i) for i in range(3)}
    prompts = [[(3 * i + 5 * k) % 131 for k in range(300)] for i in range(20)]
    names = [(None, "a0", "a1", "a2")[i % 4] for i in range(20)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with start(base, lora_modules=modules, max_loras=2, max_num_batched_tokens=64) as llm:
        client, front = llm.client, llm._front
        prepared = [
            front.prepare(prompt, params if name is None else params.model_copy(update={"lora": name}))
            for prompt, name in zip(prompts, names, strict=True)
        ]
        for request in prepared:
            client.submit(request)
        outputs: dict[str, Any] = {}
        cancelled = [request.front.request_id for request in prepared[::3]]
        for step in itertools.count():
            if not client.num_unfinished:
                break
            if step == 40:
                client.abort(cancelled)
            for update in client.step():
                if update.output.finished:
                    outputs[update.output.request_id] = update.output
        for request, prompt, name in zip(prepared, prompts, names, strict=True):
            output = outputs.get(request.front.request_id)
            if output is None or output.outputs[0].finish_reason == "abort":
                assert request.front.request_id in cancelled
                continue
            llm.reset_prefix_cache()
            assert list(output.outputs[0].token_ids) == answer(llm, prompt, name, params)
