"""A SentencePiece vocabulary of 262,144 tokens, from a real file, against llama.cpp's ids."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.core.interfaces import Tokenizer
from headrace.models.opening import build_tokenizer, open_checkpoint

CASES = json.loads((Path(__file__).parent / "data" / "tokenizer_gemma3.json").read_text())["cases"]
pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def data(gemma3_path: Path, models_registry: Any) -> Any:
    return open_checkpoint(gemma3_path, models_registry)


@pytest.fixture(scope="module")
def tokenizer(data: Any, models_registry: Any) -> Tokenizer:
    tokenizer = build_tokenizer(data.tokenizer, models_registry)
    assert tokenizer is not None
    return tokenizer


def test_control_tokens_are_text_unless_they_are_parsed(tokenizer: Tokenizer) -> None:
    text = "a <start_of_turn>user<eos> b"
    plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    parsed = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.special_ids & set(parsed) == {1, 105}
    for ids in (plain, parsed):
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


@pytest.mark.parametrize("case", CASES, ids=[str(at) for at in range(len(CASES))])
def test_ids_equal_the_reference(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    text = case["text"]
    for special in (False, True):
        right = case["ids_special" if special else "ids"]
        assert tokenizer.encode(text, add_special_tokens=False, parse_special=special) == right
        started = right if right[:1] == [2] else [2, *right]
        assert tokenizer.encode(text, add_special_tokens=True, parse_special=special) == started
        assert b"".join(map(tokenizer.token_bytes, right)).decode() == text


def test_contract(tokenizer: Tokenizer) -> None:
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.vocab_size == 262_144
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (2, (1,))
    assert {0, 1, 2, 3} <= tokenizer.special_ids


def test_there_is_no_chat_template(data: Any) -> None:
    assert data.chat_template is None


def test_it_is_built_quickly(data: Any, models_registry: Any) -> None:
    times = []
    for _ in range(2):
        start = time.process_time()
        build_tokenizer(data.tokenizer, models_registry)
        times.append(time.process_time() - start)
    assert min(times) < 1, times


def test_long_text_is_quick(tokenizer: Tokenizer) -> None:
    for text in ("word " * 20_000, "x" * 50_000, " " * 50_000, "日本語" * 10_000):
        start = time.process_time()
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        assert time.process_time() - start < 3
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
