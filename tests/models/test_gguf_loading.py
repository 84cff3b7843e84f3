"""Tiny GGUF files: encodings bit by bit, names and rows, odd tensors, what an opened checkpoint says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM
from headrace.core.errors import CheckpointError
from headrace.core.interfaces import Checkpoint, WeightLoader
from headrace.models.gguf.architectures import FREQUENCY_FACTORS
from headrace.models.gguf.dequantize import ENCODINGS, UNSUPPORTED, decode_blocks
from headrace.models.gguf.loader import GGUFLoader
from headrace.models.opening import model_definition, open_checkpoint
from headrace.models.weights import CheckpointWeights

gguf = pytest.importorskip("gguf")
TinyGGUF = Callable[..., Path]


def same_bits(one: torch.Tensor, other: np.ndarray[Any, Any]) -> bool:
    """Equal bit by bit; a NaN equals any NaN."""
    ours = one.numpy()
    nan = np.isnan(ours)
    return bool(
        ours.dtype == other.dtype == np.float32
        and np.array_equal(nan, np.isnan(other))
        and np.array_equal(ours[~nan].view(np.uint32), other[~nan].view(np.uint32))
    )


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("count", [1, 7, 4096, 5000])
def test_random_blocks_decode_bit_by_bit_like_the_formats_own_library(encoding: Any, count: int) -> None:
    """Any bytes: also scales that are infinite, not a number or subnormal."""
    raw = np.random.default_rng(count).integers(0, 256, (count, encoding.bytes), np.uint8)
    kind = gguf.GGMLQuantizationType(encoding.code)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.reshape(1, -1), kind).astype(np.float32)
    assert kind.name == encoding.name
    decoded = decode_blocks(encoding, raw, torch.float32)
    assert len(decoded) == count * encoding.elements
    assert same_bits(decoded, expected.reshape(-1))
    assert torch.equal(
        decode_blocks(encoding, raw, torch.bfloat16).nan_to_num(1, 2, 3),
        decoded.bfloat16().nan_to_num(1, 2, 3),
    )


def test_encodings_have_the_formats_names_and_sizes() -> None:
    for encoding in ENCODINGS.values():
        kind = gguf.GGMLQuantizationType(encoding.code)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (
            encoding.name,
            (encoding.elements, encoding.bytes),
        )
    for code, name in UNSUPPORTED.items():
        assert gguf.GGMLQuantizationType(code).name == name
    assert not ENCODINGS.keys() & UNSUPPORTED.keys()


@pytest.fixture
def tiny(tmp_path: Path, tiny_gguf: TinyGGUF) -> Path:
    return tiny_gguf(tmp_path / "tiny.gguf")


def test_contracts(tiny: Path) -> None:
    loader = GGUFLoader()
    assert isinstance(loader, WeightLoader)
    checkpoint = loader.open(tiny)
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.tokenizer is None
    assert checkpoint.chat_template is None
    checkpoint.close()
    checkpoint.close()


def test_query_and_key_rows_come_back_in_hugging_faces_order(tmp_path: Path, tiny_gguf: TinyGGUF) -> None:
    """Written as the format's converter writes them: halves of a head become neighbours."""

    def interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
        return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape).copy()

    random = np.random.default_rng(5)
    q, k = (random.normal(size=(rows, 64)).astype(np.float32) for rows in (64, 32))
    bias = random.normal(size=64).astype(np.float32)
    tensors = {
        "blk.0.attn_q.weight": interleaved(q, 4),
        "blk.0.attn_k.weight": interleaved(k, 2),
        "blk.0.attn_q.bias": interleaved(bias, 4),
        "blk.1.attn_q.weight": (interleaved(q, 4), gguf.GGMLQuantizationType.Q8_0),
    }
    checkpoint = GGUFLoader().open(tiny_gguf(tmp_path / "rows.gguf", None, tensors))
    first = "model.layers.0.self_attn"
    assert np.array_equal(checkpoint.tensors[f"{first}.q_proj.weight"].decode(torch.float32).numpy(), q)
    assert np.array_equal(checkpoint.tensors[f"{first}.k_proj.weight"].decode(torch.float32).numpy(), k)
    assert np.array_equal(checkpoint.tensors[f"{first}.q_proj.bias"].decode(torch.float32).numpy(), bias)
    packed = checkpoint.tensors["model.layers.1.self_attn.q_proj.weight"]
    expected = gguf.quants.quantize(q, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(packed.read().numpy(), expected)
    assert np.array_equal(packed.read(slice(20, 37)).numpy(), expected[20:37])
    assert checkpoint.config["attention_bias"] is True


def test_frequency_factors_are_not_lost(tmp_path: Path, tiny_gguf: TinyGGUF) -> None:
    """What stretches Llama 3.1's context is a tensor here: a model must take it, or the load is refused."""
    factors = np.arange(1, 9, dtype=np.float32)
    checkpoint = GGUFLoader().open(tiny_gguf(tmp_path / "f.gguf", None, {"rope_freqs.weight": factors}))
    weights = CheckpointWeights(checkpoint, torch.float32)
    assert FREQUENCY_FACTORS in weights
    assert weights.take(FREQUENCY_FACTORS, (8,)).tolist() == factors.tolist()


def test_rope_scaling_and_partial_rotation(tmp_path: Path, tiny_gguf: TinyGGUF) -> None:
    keys = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.rope.dimension_count": 8,
    }
    config = GGUFLoader().open(tiny_gguf(tmp_path / "scaled.gguf", keys)).config
    assert config["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    assert config["partial_rotary_factor"] == 0.5
    config = GGUFLoader().open(tiny_gguf(tmp_path / "none.gguf", {"llama.rope.scaling.type": "none"})).config
    assert "rope_scaling" not in config


def test_an_unknown_rope_scaling_is_refused_by_name(
    tmp_path: Path, tiny_gguf: TinyGGUF, models_registry: Any
) -> None:
    """QNT-09. Sources: vllm-project/vllm#9481; huggingface/transformers#32167."""
    checkpoint = GGUFLoader().open(tiny_gguf(tmp_path / "m.gguf", {"llama.rope.scaling.type": "martian"}))
    with pytest.raises(CheckpointError, match=r"rope_type .*'martian'"):
        model_definition(checkpoint.config, models_registry)


def test_what_a_file_says_wrongly_is_named_with_the_file(tmp_path: Path, tiny_gguf: TinyGGUF) -> None:
    file = tiny_gguf(tmp_path / "m.gguf", {"llama.rope.scaling.type": "martian"})
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(file))}: rope_type .*'martian'"):
        LLM(str(file), show_report=False)


@pytest.mark.parametrize(
    ("architectures", "what"),
    [
        (None, "architectures in the model's configuration must be a list"),
        ([], "must be a list of class names"),
        ("LlamaForCausalLM", "got 'LlamaForCausalLM'"),
        ([8], r"got \[8\]"),
        (["LamaForCausalLM"], "LamaForCausalLM .did you mean 'LlamaForCausalLM'.*known: .*LlamaForCausalLM"),
        (["NoSuchForCausalLM"], "NoSuchForCausalLM"),
    ],
)
def test_architectures_missing_or_unknown(
    tiny: Path, models_registry: Any, architectures: Any, what: str
) -> None:
    """QNT-09. Sources: vllm-project/vllm#9481; huggingface/transformers#32167."""
    config = {**GGUFLoader().open(tiny).config, "architectures": architectures}
    with pytest.raises(CheckpointError, match=what):
        model_definition(config, models_registry)
    config["architectures"] = ["NoSuchForCausalLM", "LlamaForCausalLM"]
    assert "LlamaForCausalLM" in model_definition(config, models_registry).architectures


def take_all_but(checkpoint: Any, *left: str) -> CheckpointWeights:
    weights = CheckpointWeights(checkpoint, torch.float32)
    for name, tensor in checkpoint.tensors.items():
        if name not in left:
            weights.take(name, tensor.shape)
    return weights


def test_empty_and_useless_tensors_are_passed_over_and_unknown_ones_named(
    tmp_path: Path, tiny_gguf: TinyGGUF
) -> None:
    """QNT-10. Source: vllm-project/vllm PR#1687."""
    empty = np.zeros((0,), np.float32)
    useless = {"blk.0.empty": empty, "blk.0.attn_rot_embd": np.ones(8, np.float32)}
    names = ("blk.0.empty", "model.layers.0.self_attn.rotary_emb.inv_freq")
    checkpoint = GGUFLoader().open(tiny_gguf(tmp_path / "odd.gguf", None, useless))
    assert checkpoint.tensors["blk.0.empty"].decode(torch.float32).shape == (0,)
    assert checkpoint.tensors["blk.0.empty"].read().shape[0] == 0
    take_all_but(checkpoint, *names).check_all_taken()

    scalar = np.float32(3).reshape(())
    unknown = {**useless, "blk.0.extra": np.ones((2, 2), np.float32), "scale": scalar}
    checkpoint = GGUFLoader().open(tiny_gguf(tmp_path / "more.gguf", None, unknown))
    assert float(checkpoint.tensors["scale"].decode(torch.float32)) == 3
    with pytest.raises(
        CheckpointError, match=r"more\.gguf has tensors that the model does not use.*blk\.0\.extra, scale$"
    ):
        take_all_but(checkpoint, *names, "blk.0.extra", "scale").check_all_taken()


def test_taking_what_is_missing_or_of_another_shape(tmp_path: Path, tiny_gguf: TinyGGUF) -> None:
    checkpoint = GGUFLoader().open(tiny_gguf(tmp_path / "t.gguf", None, {"output_norm.weight": None}))
    weights = CheckpointWeights(checkpoint, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"t\.gguf has no tensor 'model\.norm\.weight'"):
        weights.take("model.norm.weight", (64,))
    with pytest.raises(CheckpointError, match=r"did you mean 'model\.embed_tokens\.weight'"):
        weights.take("model.embed_token.weight", (64, 64))
    with pytest.raises(CheckpointError, match=r"has the shape \[64, 64\].*asks for \[65, 64\]"):
        weights.take("model.embed_tokens.weight", (65, 64))
    assert weights.bytes == 0
    assert weights.take("model.embed_tokens.weight", (64, 64)).dtype == torch.bfloat16
    assert weights.bytes == 64 * 64 * 2
    assert "model.norm.weight" not in weights
    with pytest.raises(CheckpointError, match="and 8 more"):
        weights.check_all_taken()


def test_end_tokens_and_sampling_of_the_file(tmp_path: Path, tiny_gguf: TinyGGUF) -> None:
    keys = {
        "general.name": "Tiny",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "tokenizer.chat_template": "{{ messages }}",
    }
    checkpoint = GGUFLoader().open(tiny_gguf(tmp_path / "g.gguf", keys))
    assert checkpoint.generation_config == {
        "eos_token_id": [2, 5],
        "bos_token_id": 1,
        "temperature": 0.5,
        "top_k": 20,
    }
    assert checkpoint.config["_name"] == "Tiny"
    assert checkpoint.chat_template == "{{ messages }}"


def test_a_folder_holds_one_gguf_file(tmp_path: Path, tiny_gguf: TinyGGUF, models_registry: Any) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(
        CheckpointError,
        match=r"holds no checkpoint of a format known here \(gguf, safetensors\); it holds: nothing",
    ):
        open_checkpoint(folder, models_registry)
    (folder / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"it holds: notes\.txt"):
        open_checkpoint(folder, models_registry)
    with pytest.raises(
        CheckpointError, match=r"notes\.txt is no checkpoint .*\(gguf, safetensors\): it starts with b'hello'"
    ):
        open_checkpoint(folder / "notes.txt", models_registry)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(folder / "nowhere", models_registry)
    one = tiny_gguf(folder / "one.gguf")
    assert open_checkpoint(folder, models_registry).path == one
    tiny_gguf(folder / "two.gguf")
    with pytest.raises(CheckpointError, match=r"found: one\.gguf, two\.gguf"):
        open_checkpoint(folder, models_registry)
    assert open_checkpoint(folder / "two.gguf", models_registry).path == folder / "two.gguf"
