"""A closed checkpoint lets go of its file, and what was decoded from it stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core.errors import CheckpointError
from headrace.models.opening import build_tokenizer, open_checkpoint
from headrace.models.weights import CheckpointWeights


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_a_closed_file_is_let_go_of(
    tmp_path: Path, tiny_gguf: Callable[..., Path], models_registry: Any
) -> None:
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    path = tiny_gguf(tmp_path / "closing.gguf", keys)
    checkpoint = open_checkpoint(path, models_registry)
    unread = open_checkpoint(path, models_registry)
    tokenizer = build_tokenizer(checkpoint.tokenizer, models_registry)
    weights = CheckpointWeights(checkpoint, torch.bfloat16)
    norm = weights.take("model.norm.weight", (64,))
    expected = norm.clone()
    encoded = checkpoint.tensors["model.norm.weight"].read()
    assert is_mapped(path)
    checkpoint.close()
    unread.close()
    unread.close()
    assert not is_mapped(path)
    path.unlink()
    assert torch.equal(norm, expected)
    assert encoded.view(torch.float32).reshape(-1).bfloat16().equal(expected)
    assert tokenizer is not None
    assert tokenizer.encode("abb", add_special_tokens=False, parse_special=False) == [2, 1]
    assert weights.bytes == 64 * 2
    with pytest.raises(
        CheckpointError, match=r"closing\.gguf was closed before tensor 'token_embd\.weight' was read"
    ):
        weights.take("model.embed_tokens.weight", (64, 64))
    assert unread.tokenizer is not None
    with pytest.raises(
        CheckpointError, match=r"was closed before the key 'tokenizer\.ggml\.tokens' was read"
    ):
        _ = unread.tokenizer["tokens"]
