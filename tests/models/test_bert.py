"""BERT against transformers: same random weights, same hidden states, several texts at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace import LLM, hookimpl
from headrace.core.errors import CheckpointError, EngineError
from headrace.core.interfaces import RunnerBatch, RunnerListener
from headrace.models.bert import BertConfig, BertDefinition, BertModel

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
}


class Hidden(RunnerListener):
    """Keeps each request's hidden states, and how many requests a step had."""

    name = "hidden"

    def __init__(self) -> None:
        self.seen: dict[tuple[int, ...], torch.Tensor] = {}
        self.most = 0

    def on_hidden(self, batch: RunnerBatch, hidden: torch.Tensor) -> None:
        self.most = max(self.most, len(batch.rows))
        for row, states in zip(batch.rows, hidden.split([row.count for row in batch.rows]), strict=True):
            assert row.start == 0
            self.seen[tuple(int(token) for token in row.tokens)] = states.clone()


class HiddenPlugin:
    name = "hidden"
    headrace_api = ">=1,<2"

    def __init__(self) -> None:
        self.listener = Hidden()

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        registrar.runner_listener("hidden", lambda context: self.listener)


@pytest.fixture(params=["BertModel", "BertForMaskedLM"])
def folder(request: pytest.FixtureRequest, tiny_bert: Callable[..., Path], tmp_path: Path) -> Path:
    return tiny_bert(tmp_path / "bert", request.param)


def texts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(64) for _ in range(n)] for n in (5, 48, 1, 16, 17, 2, 33, 20)]


def test_hidden_states_of_ragged_batches_equal_transformers(folder: Path) -> None:
    plugin = HiddenPlugin()
    with LLM(
        str(folder), dtype="float32", plugins=[plugin], max_num_batched_tokens=64, show_report=False
    ) as llm:
        llm.embed(texts(), use_tqdm=False)
    assert plugin.listener.most >= 3
    transformers.logging.disable_progress_bar()
    reference = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    assert len(plugin.listener.seen) == len(texts())
    for ids, hidden in plugin.listener.seen.items():
        with torch.inference_mode():
            right = reference(torch.tensor([ids])).last_hidden_state[0]
        assert float(right.abs().max()) > 0.5
        assert float((hidden - right).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "relu"}, "hidden_act.*relu.*gelu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type.*relative_key.*absolute"),
        ({"is_decoder": True}, "is_decoder.*true.*encoders"),
        ({"num_attention_heads": 5}, r"hidden_size \(64\).*num_attention_heads \(5\)"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"layer_norm_eps": 0}, "layer_norm_eps.*above 0.*got 0"),
    ],
)
def test_what_it_cannot_build_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        BertDefinition().check({**CONFIG, **change})


def test_sizes_of_a_usual_configuration() -> None:
    config = BertConfig.read(CONFIG)
    assert (config.num_segments, config.eps) == (2, 1e-12)
    assert BertDefinition().max_model_len(CONFIG) == 48


def test_it_has_no_logits() -> None:
    with pytest.raises(EngineError, match=r"encoder.*no logits.*embed"):
        BertModel.logits(BertModel.__new__(BertModel), torch.zeros(1, 64))
