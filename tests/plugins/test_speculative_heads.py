"""Heads on hidden states draft: random ones in vain, trained ones less so; ids stay the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, RequestOutput, SamplingParams, hookimpl
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.interfaces import Proposer, RunnerBatch

PROMPTS = [[5, 9, 2, 7], [1] * 21, [3, 4, 5] * 13, [100], [9] * 16, [2, 7, 1, 8, 2, 8]]
SIZE, COUNT = 64, 3


def make(folder: Path, heads: Path | None = None, **options: Any) -> LLM:
    if heads is not None:
        options["speculative"] = {
            "method": "heads",
            "model": str(heads),
            "adaptive": False,
            **options.pop("speculative", {}),
        }
    return LLM(str(folder), dtype="bfloat16", show_report=False, **options)


def params(**changes: Any) -> list[SamplingParams]:
    mixes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0, "presence_penalty": 1.5, "logit_bias": {7: 2.0}},
        {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": list(range(0, 128, 5))},
    ]
    common = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1, **changes}
    return [SamplingParams(seed=i, **{**mix, **common}) for i, mix in enumerate(mixes)]


def run(llm: LLM, asked: Sequence[SamplingParams] | None = None) -> list[RequestOutput]:
    return llm.generate(PROMPTS, list(asked or params()), use_tqdm=False)


def told(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].finish_reason) for o in outputs]


def acceptance(llm: LLM) -> float:
    metrics = llm.metrics()
    assert metrics["spec_decode_num_draft_tokens"] > 20
    return metrics["spec_decode_num_accepted_tokens"] / metrics["spec_decode_num_draft_tokens"]


def save(folder: Path, weight: torch.Tensor, bias: torch.Tensor, taps: Sequence[int] = ()) -> Path:
    """Write heads [heads, C, F] and [heads, C]."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    config = {"architectures": ["DraftHeads"], "num_heads": weight.shape[0]}
    config |= {"taps": list(taps)} if taps else {}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"heads.{i}.weight": one.contiguous() for i, one in enumerate(weight)}
    tensors |= {f"heads.{i}.bias": one.contiguous() for i, one in enumerate(bias)}
    save_file(tensors, folder / "model.safetensors")
    return folder


class Watcher(Proposer):
    """Drafts nothing; keeps the states that tokens were drawn from, and the tokens."""

    name = "watcher"

    def __init__(self, taps: Sequence[int] = ()) -> None:
        self.taps = tuple(taps)
        self.model: Any = None
        self.seen: dict[str, list[tuple[torch.Tensor, torch.Tensor, int]]] = {}

    def propose(self, batch: RunnerBatch, hidden: Any, taps: Any, result: Any) -> dict[str, list[int]]:
        first = 0
        for row in batch.rows:
            tokens = result.requests[row.request_id].tokens
            if tokens:
                state = first + row.count - 1
                features = torch.cat([taps[tap][state] for tap in self.taps]) if self.taps else hidden[state]
                own = self.seen.setdefault(row.request_id, [])
                own.append((hidden[state].float().clone(), features.float().clone(), tokens[0]))
            first += row.count
        return {}


class _Watching:
    name = "watching"
    headrace_api = ">=1,<2"

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        def make(context: Any) -> Watcher:
            self.watcher.model = context.model
            return self.watcher

        registrar.proposer("watcher", make)


def train(folder: Path, heads: Path, taps: Sequence[int] = (), steps: int = 150) -> Path:
    """Fit heads to what the model answers: head i to the token i + 1 places behind the one drawn from a state."""
    watcher = Watcher(taps)
    llm = make(folder, plugins=[_Watching(watcher)])
    assert (llm.report.executor["graph"] == "yes") == (not taps)
    run(llm, params(logprobs=None, temperature=0))
    projection = watcher.model.logits(torch.eye(SIZE, dtype=torch.bfloat16)).T.clone()  # [V, C]
    width = SIZE * max(1, len(taps))
    weight = torch.zeros(COUNT, SIZE, width, requires_grad=True)
    bias = torch.zeros(COUNT, SIZE, requires_grad=True)
    rows = [
        (hidden, features, i, own[at + 1 + i][2])
        for own in watcher.seen.values()
        for at, (hidden, features, _) in enumerate(own)
        for i in range(COUNT)
        if at + 1 + i < len(own)
    ]
    hidden, features = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
    which, target = torch.tensor([r[2] for r in rows]), torch.tensor([r[3] for r in rows])
    optimizer = torch.optim.Adam([weight, bias], lr=0.05)
    for _ in range(steps):
        moved = torch.einsum("nf,ncf->nc", features, weight[which]) + bias[which]
        logits = (hidden + torch.nn.functional.silu(moved)) @ projection.T
        loss = torch.nn.functional.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return save(heads, weight.detach(), bias.detach(), taps)


@pytest.fixture
def plain(tiny_llama_folder: Path) -> list[Any]:
    return told(run(make(tiny_llama_folder)))


def test_random_heads_change_nothing(tiny_llama_folder: Path, tmp_path: Path, plain: list[Any]) -> None:
    draw = torch.Generator().manual_seed(0)
    heads = save(
        tmp_path / "heads",
        torch.randn(COUNT, SIZE, SIZE, generator=draw),
        torch.randn(COUNT, SIZE, generator=draw),
    )
    llm = make(tiny_llama_folder, heads)
    assert told(run(llm)) == plain
    assert acceptance(llm) < 0.3
    assert llm.report.executor["graph"] == "yes"
    assert 'spec_decode_num_accepted_tokens_per_pos{position="2"}' in llm.metrics()


@pytest.mark.parametrize("taps", [(), (0, 1)], ids=["last state", "two layers"])
def test_trained_heads_are_right_more_often(
    tiny_llama_folder: Path, tmp_path: Path, plain: list[Any], taps: Sequence[int]
) -> None:
    heads = train(tiny_llama_folder, tmp_path / "heads", taps)
    asked = params(logprobs=None, temperature=0)
    draw = torch.Generator().manual_seed(0)
    random = save(
        tmp_path / "random",
        torch.randn(COUNT, SIZE, SIZE, generator=draw),
        torch.randn(COUNT, SIZE, generator=draw),
    )
    found = {}
    for name, folder in (("trained", heads), ("random", random)):
        llm = make(tiny_llama_folder, folder)
        assert told(run(llm, asked)) == told(run(make(tiny_llama_folder), asked))
        found[name] = acceptance(llm)
    assert found["trained"] > 0.4 > 2 * found["random"]
    # Every temperature, chunks and preemptions: the drafts may be bad, the ids are right.
    options: dict[str, Any]
    for options in (
        {"max_num_batched_tokens": 9, "max_num_seqs": 4},
        {"num_kv_blocks": 8, "max_model_len": 90},
    ):
        llm = make(tiny_llama_folder, heads, **options)
        assert told(run(llm)) == plain
    assert llm.metrics()["num_preemptions"] > 0


def test_what_are_no_heads_of_the_model_is_refused(tiny_llama_folder: Path, tmp_path: Path) -> None:
    good = torch.zeros(COUNT, SIZE, SIZE), torch.zeros(COUNT, SIZE)
    with pytest.raises(ConfigError, match="draft_model and heads need a model"):
        make(tiny_llama_folder, speculative_method="heads")
    with pytest.raises(CheckpointError, match="does not exist"):
        make(tiny_llama_folder, tmp_path / "nowhere")
    wide = save(tmp_path / "wide", torch.zeros(COUNT, SIZE, 2 * SIZE), good[1])
    with pytest.raises(CheckpointError, match=r"'heads.0.weight' must be \[64, 64\], it is \[64, 128\]"):
        make(tiny_llama_folder, wide)
    far = save(tmp_path / "far", *good, taps=[2])
    with pytest.raises(CheckpointError, match=r"layers from 0 to 1, got \[2\]"):
        make(tiny_llama_folder, far)
    with pytest.raises(CheckpointError, match=r"architectures in config.json must be \['DraftHeads'\], got"):
        make(tiny_llama_folder, tiny_llama_folder)
    few = save(tmp_path / "few", *good)
    (few / "config.json").write_text('{"architectures": ["DraftHeads"], "num_heads": 4}')
    with pytest.raises(CheckpointError, match=r"'heads.3.weight' must be \[64, 64\], it is missing"):
        make(tiny_llama_folder, few)
    (few / "config.json").write_text('{"architectures": ["DraftHeads"]}')
    with pytest.raises(CheckpointError, match=r"num_heads in config.json must be from 1 to 64, got None"):
        make(tiny_llama_folder, few)


def test_a_model_without_states_of_its_layers_is_told(tiny_llama_folder: Path, tmp_path: Path) -> None:
    from headrace.executors.proposing import Proposing

    class Without:
        pass

    proposing = Proposing(Watcher((0,)), 128)
    with pytest.raises(
        ConfigError, match=r"'watcher' needs the hidden states of layers \[0\], and Without gives"
    ):
        proposing.tap(Without())  # type: ignore[arg-type]
