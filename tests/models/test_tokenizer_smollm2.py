"""The tokenizer of a real file against llama.cpp's ids."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import RequestError
from headrace.core.interfaces import Tokenizer
from headrace.models.opening import build_tokenizer, open_checkpoint

CASES = json.loads((Path(__file__).parent / "data" / "tokenizer_smollm2.json").read_text())["cases"]
pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def data(smollm2_path: Path, models_registry: Any) -> Any:
    return open_checkpoint(smollm2_path, models_registry)


@pytest.fixture(scope="module")
def tokenizer(data: Any, models_registry: Any) -> Tokenizer:
    tokenizer = build_tokenizer(data.tokenizer, models_registry)
    assert tokenizer is not None
    return tokenizer


def test_there_are_cases_with_special_tokens() -> None:
    assert len(CASES) == 45
    assert any(case["ids"] != case["ids_special"] for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=[str(at) for at in range(len(CASES))])
def test_ids_equal_the_reference(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    text = case["text"]
    for special in (False, True):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=special)
        assert ids == case["ids_special" if special else "ids"]
        # The file asks for no start token.
        assert tokenizer.encode(text, add_special_tokens=True, parse_special=special) == ids
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_every_special_token_is_text_unless_it_is_parsed(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.special_ids) == 17
    for token_id in tokenizer.special_ids:
        spelling = tokenizer.token_bytes(token_id).decode()
        text = f"a {spelling}{spelling} b"
        plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        parsed = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        assert not tokenizer.special_ids & set(plain)
        assert parsed.count(token_id) == 2
        assert b"".join(map(tokenizer.token_bytes, plain)).decode() == text


def test_contract(tokenizer: Tokenizer) -> None:
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("", add_special_tokens=True, parse_special=True) == []
    assert tokenizer.token_bytes(0) == b"<|endoftext|>"
    assert tokenizer.token_bytes(49_152) == tokenizer.token_bytes(-1) == b""


def test_single_bytes_of_a_character(tokenizer: Tokenizer) -> None:
    """An emoji split over tokens is bytes that are no UTF-8 by themselves."""
    ids = tokenizer.encode("🦩", add_special_tokens=False, parse_special=False)
    pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
    assert len(pieces) > 1
    with pytest.raises(UnicodeDecodeError):
        pieces[0].decode()
    assert b"".join(pieces).decode() == "🦩"


def test_every_byte_is_some_token(tokenizer: Tokenizer) -> None:
    single = {tokenizer.token_bytes(at) for at in range(tokenizer.vocab_size)}
    valid = {bytes([byte]) for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5}
    assert len(valid & single) > 200


def test_half_a_surrogate_pair_is_a_bad_request(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="at character 3"):
        tokenizer.encode("abc\ud83d", add_special_tokens=False, parse_special=False)


def test_long_text_is_quick(tokenizer: Tokenizer) -> None:
    for text in ("word " * 40_000, "x" * 100_000, " " * 100_000, "9" * 100_000):
        start = time.process_time()
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        assert time.process_time() - start < 3
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_threads_get_the_same_ids(tokenizer: Tokenizer) -> None:
    wrong: list[str] = []

    def work() -> None:
        for case in CASES:
            ids = tokenizer.encode(case["text"], add_special_tokens=False, parse_special=True)
            if ids != case["ids_special"]:
                wrong.append(case["text"])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_it_is_built_quickly(data: Any, models_registry: Any) -> None:
    times = []
    for _ in range(3):
        start = time.process_time()
        build_tokenizer(data.tokenizer, models_registry)
        times.append(time.process_time() - start)
    assert min(times) < 0.4, times
