"""Rotary tables: every spelling of a configuration, against transformers' frequencies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.core.errors import CheckpointError
from headrace.models.rope import Rope, cos_sin_table, read_rope

LLAMA3: dict[str, Any] = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_READ = Rope(5e5, "llama3", 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({}, Rope(10000.0)),
        ({"rope_theta": 5}, Rope(5.0)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, Rope(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1.0}, Rope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, LLAMA3_READ),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}, LLAMA3_READ),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, LLAMA3_READ),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", **LLAMA3}}, LLAMA3_READ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, Rope(10000.0, "linear", 2.0)),
    ],
)
def test_every_spelling_is_read(config: dict[str, Any], rope: Rope) -> None:
    assert read_rope(config) == rope


@pytest.mark.parametrize("missing", list(LLAMA3))
def test_a_missing_field_of_a_kind_is_named(missing: str) -> None:
    fields = {key: value for key, value in LLAMA3.items() if key != missing}
    with pytest.raises(CheckpointError, match=missing):
        read_rope({"rope_scaling": {"rope_type": "llama3", **fields}})


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"high_freq_factor .* must be above low_freq_factor"):
        read_rope({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}})
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor.*0\.5"):
        read_rope({"partial_rotary_factor": 0.5})


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    ],
)
def test_the_table_equals_transformers(parameters: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=16384, rope_parameters=parameters
    )
    positions = torch.arange(16384)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    table = cos_sin_table(read_rope(config.to_dict()), 64, 16384)
    assert table.shape == (16384, 64)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], atol=1e-6, rtol=0)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], atol=1e-6, rtol=0)
