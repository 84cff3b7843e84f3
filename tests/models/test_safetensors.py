"""safetensors files: sound ones read as the format's own library reads them, damaged ones refused by name."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.core.errors import CheckpointError
from headrace.models.safetensors.loader import SafetensorsLoader

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8}


def folder(path: Path, tensors: dict[str, torch.Tensor] | None = None, config: Any = CONFIG) -> Path:
    path.mkdir(exist_ok=True)
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def some_tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    values = torch.randn(6, 5, generator=random)
    return {
        "f32": values,
        "f64": values.double(),
        "f16": values.half(),
        "bf16": values.bfloat16(),
        "i32": (values * 100).int(),
        "u8": (values * 100).byte(),
        "bool": values > 0,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_every_type_is_read_as_it_was_written(tmp_path: Path) -> None:
    tensors = some_tensors()
    checkpoint = SafetensorsLoader().open(folder(tmp_path, tensors))
    assert set(checkpoint.tensors) == set(tensors)
    for name, right in tensors.items():
        got = checkpoint.tensors[name]
        assert got.shape == tuple(right.shape)
        assert torch.equal(got.decode(torch.float32), right.float())
    rows = checkpoint.tensors["bf16"].decode(torch.float32, slice(2, 4))
    assert torch.equal(rows, tensors["bf16"][2:4].float())
    assert torch.equal(checkpoint.tensors["f32"].read(slice(1, 2)).view(torch.float32), tensors["f32"][1:2])
    kept = checkpoint.tensors["f32"].decode(torch.float32)
    checkpoint.close()
    assert torch.equal(kept, tensors["f32"])
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.tensors["f32"].decode(torch.float32)


def test_a_file_cut_off_anywhere_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path, some_tensors())
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 50)):
        file.write_bytes(whole[:at])
        started = time.process_time()
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            SafetensorsLoader().open(path)
        assert time.process_time() - started < 1


def test_flipped_bytes_of_the_header_never_do_more_than_raise(tmp_path: Path) -> None:
    path = folder(tmp_path, some_tensors())
    file = path / "model.safetensors"
    whole = file.read_bytes()
    refused = 0
    for at in range(0, 8 + int.from_bytes(whole[:8], "little"), 3):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :])
        try:
            SafetensorsLoader().open(path)
        except CheckpointError as error:
            refused += "model.safetensors" in str(error)
    assert refused > 100


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff" * 8 + b"{}", "said to have"),
        (raw([]), "not an object"),
        (raw(b'{"a": 1, "a": 2}'), "stands twice"),
        (raw({"a": 7}), "not by an object"),
        (raw({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, b"0000"), "did you mean 'F32'"),
        (raw({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"0000"), "natural numbers"),
        (raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"0000"), "takes 8 bytes"),
        (raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"0000"), "4 bytes of data"),
        (raw({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 4]}}, b"0000"), "takes"),
        (
            raw(
                {
                    "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
                    "b": {"dtype": "U8", "shape": [3], "data_offsets": [2, 5]},
                },
                b"00000",
            ),
            "'a' and 'b' overlap",
        ),
        (raw(b"[" * 100_000), "no JSON object"),
        (
            raw({"a": {"dtype": "U8", "shape": [2**62] * 100_000, "data_offsets": [0, 0]}}),
            "the former of at most 64",
        ),
        (raw({"a" * 10**6: 7}), r"tensor 'a{190,200} is described"),
        (
            raw({"a": {"dtype": "F8_E8M0", "shape": [1], "data_offsets": [0, 1]}}, b"0"),
            "'F8_E8M0'.*types known: F64",
        ),
    ],
)
def test_headers_made_by_hand(tmp_path: Path, content: bytes, words: str) -> None:
    path = folder(tmp_path)
    (path / "model.safetensors").write_bytes(content)
    started = time.process_time()
    with pytest.raises(CheckpointError, match=words) as caught:
        SafetensorsLoader().open(path)
    assert time.process_time() - started < 1
    assert "model.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 1000 + len(str(path))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, r"no config\.json"),
        ('{"architectures": ["Llama', r"config\.json is damaged"),
        ("[]", "a JSON object"),
        ({"vocab_size": 8}, r"config\.json: architectures must be a list .* got None"),
        ({"architectures": "LlamaForCausalLM"}, r"config\.json: architectures must be a list"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path: Path, config: Any, words: str) -> None:
    """Source: vllm-project/vllm#9481."""
    path = folder(tmp_path, some_tensors(), config)
    with pytest.raises(CheckpointError, match=words):
        SafetensorsLoader().open(path)


def test_pickled_weights_are_refused_with_advice(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "pytorch_model.bin").write_bytes(b"")
    assert SafetensorsLoader().claims(path)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin would run code.*save_pretrained"):
        SafetensorsLoader().open(path)


def test_other_files_that_can_be_read_are_proposed(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "tiny.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"give the path of a file instead: tiny\.gguf"):
        SafetensorsLoader().open(path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": 3}, "weight_map must map"),
        ({"weight_map": {"a": "../model.safetensors"}}, "not in the folder"),
        ({"weight_map": {"nobody": "model.safetensors"}}, "no shard holds: nobody"),
    ],
)
def test_an_index_that_does_not_agree(tmp_path: Path, index: Any, words: str) -> None:
    path = folder(tmp_path, some_tensors())
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        SafetensorsLoader().open(path)


def test_what_it_claims(tmp_path: Path) -> None:
    loader = SafetensorsLoader()
    assert loader.claims(folder(tmp_path / "a"))
    assert loader.claims(tmp_path / "x.safetensors")
    assert not loader.claims(tmp_path / "x.gguf")
    assert not loader.claims(tmp_path)
