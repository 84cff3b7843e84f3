"""Pooling, part by part: what a request may ask, what a folder says, and sums over chunks."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.configuration import request_options
from headrace.core.config import EngineConfig
from headrace.core.errors import CheckpointError, EngineError, RequestError
from headrace.core.interfaces import BatchRow, ProcessedInput
from headrace.core.interfaces.build import CoreContext, FrontContext
from headrace.core.plan import NewRequest, RequestResult, StepResult
from headrace.core.plugin.registry import Registrar, Registry
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.plugins import pooling
from headrace.plugins.pooling.checkpoint import checkpoint_pooling
from headrace.plugins.pooling.front import PoolingInput
from headrace.plugins.pooling.options import EMBEDDING, POOLING, Embedding, Pooling
from headrace.plugins.pooling.runner import PoolingListener
from headrace.plugins.pooling.whole_prompts import WholePrompts
from headrace.testing.simulation import Simulation


def registry() -> Registry:
    made = Registry()
    pooling.headrace_register(Registrar(made, pooling.name), None)
    return made


# The front half


def process(
    *, causal: bool = True, model_path: Path | None = None, max_tokens: int = 0, **params: Any
) -> ProcessedInput:
    context = FrontContext(
        config=EngineConfig(model="none"),
        registry=registry(),
        tokenizer=None,
        vocab_size=10,
        max_model_len=100,
        chat_template=None,
        causal=causal,
        model_path=model_path,
    )
    item = ProcessedInput(
        prompt=[1, 2], params=SamplingParams(max_tokens=max_tokens, **params), stash=Stash(), token_ids=[1, 2]
    )
    PoolingInput(context).process(item)
    return item


@pytest.mark.parametrize(
    ("given", "causal", "right"),
    [
        ({"type": "cls"}, True, Pooling("cls", True)),
        ({"type": "mean", "normalize": False}, True, Pooling("mean", False)),
        ({}, True, Pooling("last", True)),
        ({"type": None}, False, Pooling("mean", True)),
    ],
)
def test_pooling_is_settled_in_front(given: dict[str, Any], causal: bool, right: Pooling) -> None:
    item = process(causal=causal, pooling=given)
    assert item.stash[POOLING] == right
    assert item.reads_prefix_cache is (right.type == "last")


def test_requests_that_do_not_ask_are_left_alone() -> None:
    item = process(max_tokens=5)
    assert POOLING not in item.stash
    assert item.reads_prefix_cache


@pytest.mark.parametrize(
    ("causal", "params", "words"),
    [
        (True, {"pooling": {}, "max_tokens": 3}, "max_tokens=0, got 3"),
        (True, {"pooling": {}, "n": 2}, "n must be 1, got 2"),
        (False, {"max_tokens": 3}, "encoder.*embed"),
        (False, {"prompt_logprobs": 2}, "prompt_logprobs.*got 2"),
        (False, {"pooling": {}, "prompt_logprobs": 2}, "prompt_logprobs.*got 2"),
    ],
)
def test_what_cannot_be_pooled_is_refused(causal: bool, params: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        process(causal=causal, **params)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "max"}, "pooling.type.*'mean', 'cls' or 'last'.*'max'"),
        ({"normalise": True}, "pooling.normalise"),
        ({"normalize": 1}, "pooling.normalize"),
        ("mean", "pooling"),
    ],
)
def test_a_wrong_option_is_named(given: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        request_options(registry(), SamplingParams(max_tokens=0, pooling=given))


def write_modules(folder: Path, config: Any, type: str = "sentence_transformers.models.Pooling") -> Path:
    (folder / "1_Pooling").mkdir()
    modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules.append({"idx": 1, "path": "1_Pooling", "type": type})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("config", "right"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode": "max"}, None),
        ([], None),
    ],
)
def test_what_a_folder_says(tmp_path: Path, config: Any, right: str | None) -> None:
    folder = write_modules(tmp_path, config)
    assert checkpoint_pooling(folder) == right
    assert checkpoint_pooling(folder / "model.safetensors") == right
    if right is not None:
        assert process(model_path=folder, pooling={}).stash[POOLING].type == right


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    assert checkpoint_pooling(tmp_path) is None
    write_modules(tmp_path, {"pooling_mode_cls_token": True}, type="sentence_transformers.models.Dense")
    assert checkpoint_pooling(tmp_path) is None


def test_a_damaged_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        checkpoint_pooling(tmp_path)


# The worker's half


@dataclass
class Step:
    rows: Sequence[BatchRow]
    step: int = 0
    stash: Stash = field(default_factory=Stash)


def new(name: str, length: int, how: Pooling | None, start: int = 0) -> NewRequest:
    stash = Stash()
    if how is not None:
        stash[POOLING] = how
    return NewRequest(
        request_id=name,
        token_ids=[1] * length,
        num_prompt_tokens=length,
        params=SamplingParams(),
        start=start,
        count=1,
        block_ids=[[]],
        stash=stash,
    )


def step(
    listener: PoolingListener, states: dict[str, torch.Tensor], parts: dict[str, tuple[int, int]]
) -> dict[str, RequestResult]:
    """Run [start, end) of some requests, whose hidden states are given whole; return their results."""
    rows = [
        BatchRow(name, SamplingParams(), Stash(), len(states[name]), start, end - start, [], 0)
        for name, (start, end) in parts.items()
    ]
    hidden = torch.cat([states[name][start:end] for name, (start, end) in parts.items()])
    result = StepResult(
        step=0, requests={n: RequestResult(num_computed=end) for n, (_, end) in parts.items()}
    )
    listener.on_hidden(Step(rows), hidden)
    listener.on_tokens(Step(rows), result)
    return result.requests


def pooled(how: Pooling, states: torch.Tensor, cuts: Sequence[int]) -> Embedding:
    """Pool one request in the chunks that `cuts` make."""
    listener = PoolingListener()
    listener.on_add(new("a", len(states), how))
    ends = [*cuts, len(states)]
    for start, end in zip([0, *cuts], ends, strict=True):
        outcome = step(listener, {"a": states}, {"a": (start, end)})["a"]
        assert (EMBEDDING in outcome.stash) is (end == len(states))
    return outcome.stash[EMBEDDING]


STATES = torch.randn(37, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("type", ["mean", "cls", "last"])
def test_chunks_do_not_change_a_bit(type: Any, normalize: bool) -> None:
    right = {"mean": STATES.mean(0), "cls": STATES[0], "last": STATES[-1]}[type]
    if normalize:
        right = torch.nn.functional.normalize(right, dim=0)
    whole = pooled(Pooling(type, normalize), STATES, [])
    assert whole.pooling == type
    assert torch.allclose(torch.tensor(whole.vector), right, atol=1e-6)
    for cuts in ([1], [36], [16, 32], list(range(1, 37))):
        assert pooled(Pooling(type, normalize), STATES, cuts) == whole


def test_requests_share_a_step() -> None:
    states = {"a": STATES, "b": STATES.flip(0)[:20], "c": STATES * 2, "d": STATES[:1]}
    listener = PoolingListener()
    for name, how in (("a", "mean"), ("b", "last"), ("d", "cls")):
        listener.on_add(new(name, len(states[name]), Pooling(how, False)))  # type: ignore[arg-type]
    listener.on_add(new("c", 37, None))
    first = step(listener, states, {"c": (0, 5), "a": (0, 30), "d": (0, 1), "b": (0, 20)})
    second = step(listener, states, {"c": (5, 37), "a": (30, 37)})
    assert torch.equal(torch.tensor(first["b"].stash[EMBEDDING].vector), states["b"][-1])
    assert torch.equal(torch.tensor(first["d"].stash[EMBEDDING].vector), STATES[0])
    assert second["a"].stash[EMBEDDING] == pooled(Pooling("mean", False), STATES, [])
    assert not any(len(outcome.stash) for outcome in (first["c"], second["c"], first["a"]))


def test_a_preempted_request_begins_again() -> None:
    listener = PoolingListener()
    listener.on_add(new("a", 37, Pooling("mean", True)))
    step(listener, {"a": STATES}, {"a": (0, 30)})
    listener.on_remove("a")
    listener.on_add(new("a", 37, Pooling("mean", True)))
    outcome = step(listener, {"a": STATES}, {"a": (0, 37)})["a"]
    assert outcome.stash[EMBEDDING] == pooled(Pooling("mean", True), STATES, [])


def test_the_last_token_may_follow_a_prefix_hit() -> None:
    listener = PoolingListener()
    listener.on_add(new("a", 37, Pooling("last", False), start=32))
    outcome = step(listener, {"a": STATES}, {"a": (32, 37)})["a"]
    assert torch.equal(torch.tensor(outcome.stash[EMBEDDING].vector), STATES[-1])


def test_a_gap_is_an_error() -> None:
    listener = PoolingListener()
    listener.on_add(new("a", 37, Pooling("mean", True)))
    with pytest.raises(EngineError, match="'a' goes on at token 5, and 0 were pooled"):
        step(listener, {"a": STATES}, {"a": (5, 37)})


def test_states_that_are_no_numbers_fail_their_request_alone() -> None:
    broken = STATES.clone()
    broken[3, 2] = float("nan")
    listener = PoolingListener()
    for name in ("a", "b"):
        listener.on_add(new(name, 37, Pooling("mean", True)))
    results = step(listener, {"a": broken, "b": STATES}, {"a": (0, 37), "b": (0, 37)})
    assert "not finite" in (results["a"].error or "")
    assert EMBEDDING not in results["a"].stash
    assert results["b"].error is None
    assert EMBEDDING in results["b"].stash


def test_a_vector_of_zeros_stays_one() -> None:
    assert pooled(Pooling("mean", True), torch.zeros(3, 4), []).vector == [0.0] * 4


# The core's half


def whole_prompts(causal: bool) -> WholePrompts:
    config = EngineConfig(model="none")
    return WholePrompts(
        CoreContext(config=config, registry=Registry(), wake=threading.Event().set, causal=causal)
    )


@pytest.mark.parametrize("causal", [True, False])
def test_prompts_of_encoders_run_whole(causal: bool) -> None:
    lengths = (10, 10, 3, 16, 1, 9, 9)
    simulation = Simulation(
        max_num_batched_tokens=16,
        max_model_len=32,
        constraints=[whole_prompts(causal)],
        num_blocks=64,
        prefix_caching=False,
    )
    for index, length in enumerate(lengths):
        simulation.add(f"r{index}", range(1, length + 1), max_tokens=0, note=True)
    simulation.run()
    assert set(simulation.reasons.values()) == {"length"}
    assert max(plan.num_requests for plan in simulation.plans) > 1
    counts = [entry.count for plan in simulation.plans for entry in plan.new]
    is_whole = sorted(counts) == sorted(lengths) and not any(plan.continued for plan in simulation.plans)
    assert is_whole is not causal


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    simulation = Simulation(
        max_num_batched_tokens=16, max_model_len=32, constraints=[whole_prompts(False)], prefix_caching=False
    )
    simulation.add("first", range(1, 11), max_tokens=0, note=True)
    simulation.add("long", range(1, 17), max_tokens=0, note=True)
    for index in range(20):
        simulation.add(f"short{index}", range(1, 9), max_tokens=0, note=True)
    simulation.step()
    assert "long" not in simulation.reasons
    simulation.step()
    assert simulation.reasons["long"] == "length"
    simulation.run()
