"""Rotary tables: every spelling of a configuration, against transformers' frequencies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.core.errors import CheckpointError
from headrace.models.llama import LlamaDefinition
from headrace.models.rope import Rope, cos_sin_table, read_rope
from headrace.models.rope_kinds import Dynamic, Linear, Llama3, LongRope, Yarn

LLAMA3: dict[str, Any] = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_READ = Rope(5e5, Llama3(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192))
TRAINED = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
NESTED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 8.0},
}
LONG: dict[str, Any] = {
    "short_factor": [1.0 + i / 64 for i in range(32)],
    "long_factor": [2.0 + i for i in range(32)],
}
SCALED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": LLAMA3,
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 2048},
    "yarn, all said": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 0.9,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn, two scales": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
    "longrope": {**LONG, "original_max_position_embeddings": 4096},
    "longrope, factor said": {
        **LONG,
        "rope_type": "longrope",
        "factor": 3.0,
        "original_max_position_embeddings": 4096,
    },
}


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
        ({"rope_scaling": {"type": "linear", "factor": 2}}, Rope(10000.0, Linear(factor=2.0))),
        ({"rope_parameters": NESTED}, Rope(7.0, Linear(factor=2.0))),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 8.0}}, "rope_theta": 3.0}, Rope(3.0)),
        ({"partial_rotary_factor": 0.5}, Rope(10000.0, partial=0.5)),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, Rope(10000.0, partial=0.25)),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}, "max_position_embeddings": 9},
            Rope(10000.0, Dynamic(factor=2.0, trained_length=9)),
        ),
        (
            {"rope_scaling": {"type": "yarn", "attention_factor": 1}, **TRAINED},
            Rope(10000.0, Yarn(factor=4.0, original_length=16)),
        ),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [2]}, **TRAINED},
            Rope(10000.0, LongRope(math.sqrt(1.5), (1.0,), (2.0,), 16)),
        ),
    ],
)
def test_every_spelling_is_read(config: dict[str, Any], rope: Rope) -> None:
    assert read_rope(config) == rope


@pytest.mark.parametrize("missing", list(LLAMA3))
def test_a_missing_field_of_a_kind_is_named(missing: str) -> None:
    fields = {key: value for key, value in LLAMA3.items() if key != missing}
    with pytest.raises(CheckpointError, match=missing):
        read_rope({"rope_scaling": {"rope_type": "llama3", **fields}})


def test_layers_of_another_type_read_their_own() -> None:
    assert read_rope({"rope_parameters": NESTED}, "sliding_attention") == Rope(8.0)
    assert read_rope({"rope_parameters": LLAMA3, "rope_theta": 5e5}, "sliding_attention").theta == 5e5
    assert read_rope({}, default_theta=2e6) == Rope(2e6)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "must be above low_freq_factor",
        ),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor.*above 0.*0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor.*1.5.*96 of 64"),
        ({"partial_rotary_factor": 0.02}, "partial_rotary_factor.*0.02.*1 of 64"),
        (
            {"rope_parameters": {"full_attention": 3, "sliding_attention": {}}},
            "rope_parameters.full_attention.*3",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}, **TRAINED}, "factor.*at least 1.*0.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "no field 'max_position_embeddings'"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}, "partial_rotary_factor": 0.04, **TRAINED},
            "make 2",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e300}, **TRAINED}, "factor.*1e\\+300"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", "truncate": "no"}, **TRAINED}, "truncate.*'no'"),
        ({"rope_scaling": {"type": "yarn"}, "rope_theta": 1, **TRAINED}, "rope_theta.*above 1.*yarn"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1]}, **TRAINED}, "short_factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": ["x"]}, **TRAINED}, r"short_factor.*\['x'\]"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}, **TRAINED},
            "short_factor.*must have 32 numbers.*64 rotated dimensions; it has 1",
        ),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, Any], words: str) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    sizes |= {"vocab_size": 9, "intermediate_size": 8}
    with pytest.raises(CheckpointError, match=words):
        read_rope(config)
        LlamaDefinition().check({**sizes, "max_position_embeddings": 64, **config})


@pytest.mark.parametrize("length", [16384, 40000])
@pytest.mark.parametrize("kind", SCALED)
def test_the_table_equals_transformers(kind: str, length: int) -> None:
    """Both where requests stay within what the model was made for and, for kinds that depend on it, beyond it."""
    parameters = {"rope_type": kind, "rope_theta": 5e5, **SCALED[kind]}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=16384, rope_parameters=parameters
    )
    positions = torch.arange(length)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    table = cos_sin_table(read_rope(config.to_dict()), 64, length)
    assert table.shape == (length, 64)
    assert table.dtype == torch.float32
    # Where the base itself is computed, its last bit turns far positions by their number.
    near = 1000 if kind == "dynamic" and length > 16384 else length
    torch.testing.assert_close(
        table[:near, :32], cos[0, :near, :32], atol=1e-4 if near < length else 1e-6, rtol=0
    )
    torch.testing.assert_close(
        table[:near, 32:], sin[0, :near, :32], atol=1e-4 if near < length else 1e-6, rtol=0
    )


@pytest.mark.parametrize(("kind", "depends"), [("dynamic", 16384), ("longrope", 4096), ("yarn", None)])
def test_frequencies_follow_from_the_length_the_model_is_built_for(kind: str, depends: int | None) -> None:
    rope = read_rope(
        {"rope_scaling": {"type": kind, **SCALED[kind]}, "max_position_embeddings": 16384, "rope_theta": 5e5}
    )
    short, edge, long = (
        rope.frequencies(64, length) for length in (16, depends or 16384, (depends or 16384) + 1)
    )
    assert torch.equal(short, edge)
    assert torch.equal(edge, long) == (depends is None)


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        (None, 64),
        ({"type": "linear", "factor": 4}, 64),
        ({"type": "dynamic", "factor": 4}, 256),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 16}, 64),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_how_many_tokens_a_model_is_made_for(scaling: Any, tokens: int) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    sizes |= {"vocab_size": 9, "intermediate_size": 8, "max_position_embeddings": 64}
    assert LlamaDefinition().max_model_len({**sizes, "rope_scaling": scaling}) == tokens
