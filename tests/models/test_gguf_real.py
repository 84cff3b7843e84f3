"""The GGUF reader on a real file, against the format's own library and against transformers."""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.models.gguf.loader import GGUFCheckpoint, GGUFLoader
from headrace.models.gguf.reader import read_header
from headrace.models.opening import model_definition

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def checkpoint(smollm2_path: Path) -> Iterator[GGUFCheckpoint]:
    checkpoint = GGUFLoader().open(smollm2_path)
    yield checkpoint
    checkpoint.close()


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> Any:
    return gguf.GGUFReader(smollm2_path)


def test_header_is_read_in_a_tenth_of_a_second(smollm2_path: Path) -> None:
    with smollm2_path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    times = []
    for _ in range(5):
        start = time.process_time()
        header = read_header(smollm2_path, data)
        times.append(time.process_time() - start)
    assert header.metadata["tokenizer.ggml.tokens"].count == 49_152
    assert min(times) < 0.1, times


def test_header_says_what_the_formats_own_reader_says(smollm2_path: Path, reference: Any) -> None:
    with smollm2_path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header = read_header(smollm2_path, data)
    keys = {key: field for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert keys.keys() == header.metadata.keys()
    for key, field in keys.items():
        value = header.metadata[key]
        assert (value.load(data) if hasattr(value, "load") else value) == field.contents(), key
    assert len(header.tensors) == len(reference.tensors) == 272
    for ours, theirs in zip(header.tensors, reference.tensors, strict=True):
        assert (ours.name, ours.start, ours.nbytes) == (theirs.name, theirs.data_offset, theirs.n_bytes)
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))


def test_configuration(checkpoint: GGUFCheckpoint, models_registry: Any) -> None:
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "_num_parameters": 134_515_008,
    }
    assert {key: checkpoint.config[key] for key in expected} == expected
    assert checkpoint.config["rms_norm_eps"] == pytest.approx(1e-5)
    assert checkpoint.generation_config["eos_token_id"] == [2]
    assert "rope_scaling" not in checkpoint.config
    assert checkpoint.chat_template is not None
    assert "<|im_start|>" in checkpoint.chat_template
    assert Counter(tensor.encoding for tensor in checkpoint.tensors.values()) == {
        "Q4_1": 210,
        "Q8_0": 1,
        "F32": 61,
    }
    assert model_definition(checkpoint.config, models_registry).max_model_len(checkpoint.config) == 8192


def test_decoding_is_bit_equal_to_the_formats_own_library(checkpoint: GGUFCheckpoint, reference: Any) -> None:
    own = {tensor.name: tensor for tensor in reference.tensors}
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
        ("model.layers.29.self_attn.v_proj.weight", "blk.29.attn_v.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        tensor = own[theirs]
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        decoded = checkpoint.tensors[ours].decode(torch.float32)
        assert decoded.shape == checkpoint.tensors[ours].shape
        assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32)), ours
        assert torch.equal(checkpoint.tensors[ours].decode(torch.bfloat16), expected.bfloat16()), ours


def test_every_tensor_equals_transformers_own_load(checkpoint: GGUFCheckpoint, oracle: Any) -> None:
    """Names, shapes, values, and the order of the rows of queries and keys."""
    expected = dict(oracle._model.named_parameters())
    assert expected.keys() == checkpoint.tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor.decode(torch.float32), expected[name]), name


def test_some_rows_are_those_rows_of_the_whole(checkpoint: GGUFCheckpoint) -> None:
    for name in ("q_proj", "k_proj", "o_proj"):
        tensor = checkpoint.tensors[f"model.layers.3.self_attn.{name}.weight"]
        whole, encoded = tensor.decode(torch.float32), tensor.read()
        assert encoded.dtype == torch.uint8
        assert encoded.shape == (tensor.shape[0], tensor.shape[1] // 32 * 20)
        for rows in (
            slice(0, 64),
            slice(64, 192),
            slice(5, 6),
            slice(10, 10),
            slice(100, 20, -7),
            slice(-3, None),
        ):
            if rows.step is None:
                assert torch.equal(tensor.decode(torch.float32, rows), whole[rows]), (name, rows)
                assert torch.equal(tensor.read(rows), encoded[rows]), (name, rows)
            else:
                picked = torch.from_numpy(whole.numpy()[rows].copy())
                assert torch.equal(tensor.decode(torch.float32, rows), picked), (name, rows)
    # Decoding what `read` gave is decoding: packed methods see the same rows.
    tensor = checkpoint.tensors["model.layers.3.self_attn.k_proj.weight"]
    again = gguf.quants.dequantize(tensor.read().numpy(), gguf.GGMLQuantizationType.Q4_1)
    assert np.array_equal(again, tensor.decode(torch.float32).numpy())


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_written_back_in_another_encoding_it_is_the_same_model(
    kind: str, checkpoint: GGUFCheckpoint, reference: Any, smollm2_path: Path, tmp_path: Path
) -> None:
    """QNT-06. Source: vllm-project/vllm#10600, #12985."""
    path, expected = tmp_path / f"{kind}.gguf", {}
    code = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in reference.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub)
    for tensor in reference.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            expected[tensor.name] = values
        else:
            encoded = gguf.quants.quantize(values, code)
            writer.add_tensor(tensor.name, encoded, raw_dtype=code)
            expected[tensor.name] = gguf.quants.dequantize(encoded, code).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    written = GGUFLoader().open(path)
    names = {"_format", "_name"}
    assert {k: v for k, v in written.config.items() if k not in names} == {
        k: v for k, v in checkpoint.config.items() if k not in names
    }
    assert written.tokenizer is not None
    assert checkpoint.tokenizer is not None
    assert written.tokenizer["merges"] == checkpoint.tokenizer["merges"]
    assert written.tensors.keys() == checkpoint.tensors.keys()
    originals = zip(reference.tensors, checkpoint.tensors.items(), strict=True)
    for theirs, (name, original) in originals:
        decoded = written.tensors[name].decode(torch.float32)
        right = torch.from_numpy(expected[theirs.name])
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # other rows: by their own order in the file
            assert torch.equal(decoded.sort(0).values, right.sort(0).values), name
        else:
            assert torch.equal(decoded, right), name
        limit = 1e-3 if kind == "F16" else 1e-2
        source = original.decode(torch.float32)
        assert float((decoded - source).abs().max()) <= limit * float(source.abs().max()), name
