"""GGUF files that are damaged, cut short, or say what cannot be: named errors, in bounded time and memory."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import CheckpointError
from headrace.models.gguf.loader import GGUFCheckpoint, GGUFLoader
from headrace.models.opening import open_checkpoint

pytest.importorskip("gguf")
TinyGGUF = Callable[..., Path]


@pytest.fixture
def tiny(tmp_path: Path, tiny_gguf: TinyGGUF) -> Path:
    return tiny_gguf(
        tmp_path / "tiny.gguf", {"tokenizer.ggml.tokens": ["a", "b"] * 50, "tokenizer.ggml.n": [1, 2, 3]}
    )


def open_and_read(path: Path) -> GGUFCheckpoint:
    """Open a file and touch all it has."""
    import torch

    checkpoint = GGUFLoader().open(path)
    assert checkpoint.tokenizer is None
    for tensor in checkpoint.tensors.values():
        tensor.decode(torch.float32)
    return checkpoint


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(
    keys: bytes = b"", num_keys: int = 0, tensors: bytes = b"", num_tensors: int = 0, version: int = 3
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + keys + tensors


def tensor_entry(name: str, dims: tuple[int, ...], code: int = 0, offset: int = 0) -> bytes:
    return (
        string(name)
        + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", code, offset)
    )


def test_intact(tiny: Path) -> None:
    checkpoint = open_and_read(tiny)
    assert len(checkpoint.tensors) == 20
    assert checkpoint.config["_name"] == "tiny"


def test_cut_short_anywhere(tiny: Path) -> None:
    whole = tiny.read_bytes()
    damaged = tiny.with_name("cut.gguf")
    places = sorted({0, 1, 4, 8, 23, 24, len(whole) - 1, *random.Random(1).sample(range(len(whole)), 25)})
    places += sorted(random.Random(2).sample(range(2500), 25))
    assert len(places) >= 50
    for place in places:
        damaged.write_bytes(whole[:place])
        start = time.process_time()
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_and_read(damaged)
        assert time.process_time() - start < 1, place


def test_flipped_bytes_anywhere_in_the_header(tiny: Path) -> None:
    """Either it still reads or it is a named error; never another exception, never long."""
    whole = tiny.read_bytes()
    damaged = tiny.with_name("flipped.gguf")
    generator = random.Random(3)
    refused = 0
    for place in generator.sample(range(2800), 700):
        data = bytearray(whole)
        data[place] ^= generator.choice((0x01, 0x80, 0xFF))
        damaged.write_bytes(data)
        start = time.process_time()
        error = None
        try:
            open_and_read(damaged)
        except CheckpointError as caught:
            error = str(caught)
            refused += 1
        assert error is None or "flipped.gguf" in error, place
        assert time.process_time() - start < 1, place
    assert refused > 200


def test_first_bytes_of_a_file_overwritten(tiny: Path, models_registry: Any) -> None:
    """QNT-11, for the one file a GGUF model is. Source: QwenLM/Qwen3-VL#264."""
    data = bytearray(tiny.read_bytes())
    data[:16] = bytes(16)
    tiny.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: it is not a GGUF file: it starts with b'\\x00"):
        open_checkpoint(tiny, models_registry)


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "is empty"),
        (b"GG", "not a GGUF file"),
        (b"FUGG" + header()[4:], "it starts with b'FUGG'"),
        (header(version=1), "version 1; versions read here: 2, 3"),
        (header(version=0x03000000), "version 50331648"),
        (header(num_keys=HUGE), "claims 4611686018427387904 keys"),
        (header(num_tensors=HUGE), "claims 4611686018427387904 tensors"),
        (header(struct.pack("<Q", HUGE) + bytes(40), 1), "a key at byte 32 claims a length of"),
        (
            header(struct.pack("<Q", 9000) + bytes(40), 1),
            "a key at byte 32 claims 9000 bytes, of which 40 are there",
        ),
        (header(struct.pack("<Q", 2) + b"\xff\xfe" + bytes(40), 1), "is not UTF-8"),
        (header(string("k") + struct.pack("<I", 99) + bytes(40), 1), "'k' has the unknown value type 99"),
        (
            header(string("k") + struct.pack("<IQ", 8, HUGE), 1),
            "claims 4611686018427387904 bytes, of which 0",
        ),
        (
            header(string("k") + struct.pack("<IIQ", 9, 4, HUGE), 1),
            "claims 4611686018427387904 values of 'k'",
        ),
        (
            header(string("k") + struct.pack("<IIQ", 9, 8, HUGE), 1),
            "claims 4611686018427387904 strings of 'k'",
        ),
        (header(string("k") + struct.pack("<IIQQ", 9, 8, 1, HUGE), 1), "inside the strings of 'k'"),
        (header(string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(40), 1), "array of value type 9"),
        (header((string("k") + struct.pack("<IB", 7, 1)) * 2 + bytes(9), 2), "the key 'k' comes twice"),
        (
            header(tensors=string("t") + struct.pack("<I", HUGE >> 32), num_tensors=1) + bytes(40),
            "dimensions; at most 4",
        ),
        (header(tensors=tensor_entry("t", (HUGE, HUGE)), num_tensors=1), "'t' of shape"),
        (header(tensors=tensor_entry("t", (8,), offset=HUGE), num_tensors=1) + bytes(64), "the file ends at"),
        (header(tensors=tensor_entry("t", (8,), offset=4), num_tensors=1) + bytes(99), "not aligned to 32"),
        (header(tensors=tensor_entry("t", (8,)) * 2, num_tensors=2) + bytes(99), "tensor 't' comes twice"),
        (
            header(tensors=tensor_entry("t", (8,)) + tensor_entry("u", (9,)), num_tensors=2) + bytes(199),
            "tensors 't' and 'u' overlap",
        ),
        (
            header(tensors=tensor_entry("t", (32, 2), code=23), num_tensors=1) + bytes(99),
            "encoding IQ4_XS, which is not supported; supported: F32, F16, BF16, Q4_0, Q4_1",
        ),
        (
            header(tensors=tensor_entry("t", (32, 2), code=77), num_tensors=1) + bytes(99),
            "the encoding number 77",
        ),
        (
            header(tensors=tensor_entry("t", (33, 2), code=8), num_tensors=1) + bytes(99),
            "no whole number of blocks",
        ),
        (header(string("general.alignment") + struct.pack("<II", 4, 3), 1), "must be a power of two"),
        (header(string("general.alignment") + struct.pack("<II", 4, 0), 1), "must be a power of two"),
        (header(), "general.architecture is None; GGUF architectures known: llama"),
        (
            header(string("general.architecture") + struct.pack("<I", 8) + string("martian"), 1),
            "'martian'; GGUF arch",
        ),
    ],
)
def test_what_cannot_be(tmp_path: Path, data: bytes, what: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        GGUFLoader().open(path)
    assert time.process_time() - start < 1
    assert str(path) in str(caught.value)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        (
            "llama.attention.head_count",
            "8",
            "llama.attention.head_count must be a whole number of at least 1, got '8'",
        ),
        ("llama.attention.head_count", [4, 4], "llama.attention.head_count must be a whole number"),
        ("llama.attention.head_count", None, "the key llama.attention.head_count is missing"),
        (
            "llama.attention.head_count_kv",
            0,
            "llama.attention.head_count_kv must be a whole number of at least 1, got 0",
        ),
        ("llama.attention.head_count_kv", 5, "must have a multiple of 10 rows"),
        ("llama.rope.freq_base", float("nan"), "llama.rope.freq_base must be a number above 0, got nan"),
        ("llama.block_count", 4_000_000_000, "claims 4000000000 layers, but the file has 20 tensors"),
        ("llama.rope.scaling.type", 5, "llama.rope.scaling.type must be text, got 5"),
        ("llama.rope.scaling.factor", "2", "llama.rope.scaling.factor must be a number above 0, got '2'"),
        ("general.architecture", "mamba", "general.architecture is 'mamba'"),
        ("split.count", 3, "split into 3 files"),
    ],
)
def test_fields_that_cannot_be(tmp_path: Path, tiny_gguf: TinyGGUF, key: str, value: Any, what: str) -> None:
    """QNT-09, for the fields a GGUF file has. Sources: vllm-project/vllm#9481; huggingface/transformers#32167."""
    path = tiny_gguf(tmp_path / "fields.gguf", {key: value})
    with pytest.raises(CheckpointError) as caught:
        GGUFLoader().open(path)
    assert str(path) in str(caught.value)
    assert what in str(caught.value)


def test_tokens_that_are_no_text(tmp_path: Path, tiny_gguf: TinyGGUF) -> None:
    path = tiny_gguf(
        tmp_path / "words.gguf",
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["ab", "WXYZ", "cd"]},
    )
    path.write_bytes(path.read_bytes().replace(b"WXYZ", b"W\xff\xfeZ"))
    checkpoint = GGUFLoader().open(path)
    with pytest.raises(
        CheckpointError, match=r"words\.gguf: a string of 'tokenizer\.ggml\.tokens' is not UTF-8"
    ):
        _ = dict(checkpoint.tokenizer or {})


def test_a_token_with_a_zero_byte_is_one_token(tmp_path: Path, tiny_gguf: TinyGGUF) -> None:
    path = tiny_gguf(
        tmp_path / "z.gguf", {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a\0b", "", "c"]}
    )
    assert GGUFLoader().open(path).tokenizer["tokens"] == ["a\0b", "", "c"]  # type: ignore[index]


def test_memory_of_a_damaged_header_is_bounded(tmp_path: Path) -> None:
    """A count that the file could just hold is stepped over, not built."""
    import tracemalloc

    path = tmp_path / "wide.gguf"
    count = 200_000
    path.write_bytes(
        header(string("k") + struct.pack("<IIQ", 9, 8, count), 1) + np.zeros(count, "<u8").tobytes()
    )
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"general\.architecture"):
        GGUFLoader().open(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000
