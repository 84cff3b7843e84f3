"""Tokenizers from tokenizer.json: the library's ids, bytes that join to the text, specials where asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from headrace.core.errors import CheckpointError
from headrace.models.safetensors.folder import chat_template, tokenizer_files
from headrace.models.tokenizers.tokenizer_json import TokenizerJson, build_json_tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "źdźbło trawy 漢字 🙂", "a  b   c\n\nd"] * 4
TEXTS = [*CORPUS[:3], "", " leading", "trailing ", "naïve café 🙂🙂", "<s>not special</s>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def pieces() -> Tokenizer:
    """SentencePiece's way: spaces are a character, unknown characters fall back to bytes."""
    words = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    words += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    words += [(letter, -4.0) for letter in "▁abcdefghijklmnopqrstuvwxyz"]
    words += [("▁the", -1.0), ("▁quick", -1.5)]
    tokenizer = Tokenizer(models.Unigram(words, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def load(folder: Path, engine: Tokenizer, **config: Any) -> TokenizerJson:
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    )
    data = tokenizer_files(folder, config, {})
    assert data is not None
    return build_json_tokenizer(data)


@pytest.mark.parametrize("make", [byte_level, pieces])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_librarys_and_bytes_join_to_the_text(make: Any, text: str, tmp_path: Path) -> None:
    engine = make()
    tokenizer = load(tmp_path, engine)
    plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert b"".join(map(tokenizer.token_bytes, plain)).decode() == text
    trusted = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    assert trusted == engine.encode(text, add_special_tokens=False).ids
    if "<s>" in text:
        assert trusted[0] == engine.token_to_id("<s>") != plain[0]
    else:
        assert plain == trusted


def test_special_ids_and_ends(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level(), eos_token_id=[5, 1])
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == (5, 1)
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.token_bytes(0) == b"<s>"
    assert tokenizer.token_bytes(10**6) == b""


def test_the_files_own_rule_adds_special_tokens(tmp_path: Path) -> None:
    engine = byte_level()
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = load(tmp_path, engine)
    assert tokenizer.encode("fox", add_special_tokens=True, parse_special=False)[0] == 0
    assert tokenizer.encode("fox", add_special_tokens=False, parse_special=False)[0] != 0


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model":')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        build_json_tokenizer(tokenizer_files(tmp_path, {}, {}) or {})


def test_where_chat_templates_lie(tmp_path: Path) -> None:
    """Source: vllm-project/vllm#17977."""
    assert chat_template(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "one"}))
    assert chat_template(tmp_path) == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert chat_template(tmp_path) == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert chat_template(tmp_path) == "four"
