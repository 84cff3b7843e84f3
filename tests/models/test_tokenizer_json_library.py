"""Tokenizers from tokenizer.json beside transformers' AutoTokenizer on the same folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from headrace.core.errors import CheckpointError, RequestError
from headrace.models.safetensors.folder import chat_template, tokenizer_files
from headrace.models.tokenizers.tokenizer_json import TokenizerJson, build_json_tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "źdźbło trawy 漢字", "a  b   c\n\nd", "it's 42"] * 4
TEXTS = [
    "the quick fox",
    "unquick brownthe",
    " leading and trailing ",
    "a  b\n\nc",
    "naïve 漢字 🙂🙂",
    "it's <s>here</s> and <tool>",
    "[CLS] the dog [SEP] [MASK]",
    "",
    "\x00\x7f",
]
TOOL = AddedToken("<tool>", special=False, normalized=False)
ENDS = ["<s>", "</s>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=ENDS, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like Llama 2's: BPE on `▁`, unknown characters as bytes."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyz"]
    words = ["<unk>", *ENDS, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "th", "the", "▁the"]
    tokenizer = Tokenizer(
        models.BPE(
            {word: at for at, word in enumerate(words)},
            [("t", "h"), ("th", "e"), ("▁", "the")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", *ENDS])
    return tokenizer


def metaspace() -> Tokenizer:
    """Unigram with bytes to fall back to, spaces by Metaspace."""
    words = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    words += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    words += [(letter, -4.0) for letter in "▁abcdefghijklmnopqrstuvwxyz"]
    words += [("▁the", -1.0), ("▁quick", -1.5)]
    tokenizer = Tokenizer(models.Unigram(words, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["<unk>", *ENDS])
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        [*CORPUS, "best"], trainers.WordPieceTrainer(vocab_size=160, special_tokens=special)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


Maker = Callable[[], Tokenizer]


def write(folder: Path, engine: Tokenizer, **settings: Any) -> TokenizerJson:
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    )
    data = tokenizer_files(folder, {}, {})
    assert data is not None
    return build_json_tokenizer(data)


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace, word_piece])
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_ids_are_those_of_transformers(make: Maker, settings: dict[str, Any], tmp_path: Path) -> None:
    """QNT-06, TOK-01. Sources: vllm-project/vllm#10600, #2012."""
    import transformers

    engine = make()
    engine.add_tokens([TOOL])
    named = {"bos_token": "<s>", "eos_token": "</s>"} if make is not word_piece else {"bos_token": "[CLS]"}
    ours = write(tmp_path, engine, **named, **settings)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.bos_token_id == theirs.bos_token_id
    added = 0
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special, parse_special=True)
            right = theirs(text, add_special_tokens=special).input_ids
            if special and text.startswith("[CLS]") and make is word_piece:
                del right[0]  # we add no start token where there is one
            assert ids == right
            added += special and ids != ours.encode(text, add_special_tokens=False, parse_special=True)
        theirs.split_special_tokens = True
        plain = ours.encode(text, add_special_tokens=False, parse_special=False)
        if make in (byte_level, word_piece):  # elsewhere the library finds special pieces in plain text, too
            assert plain == theirs(text, add_special_tokens=False).input_ids
        theirs.split_special_tokens = False
        assert not ours.special_ids.intersection(plain) - {ours._trusted.token_to_id("[UNK]")}
    assert bool(added) == (make in (byte_level, word_piece))  # the rule of tokenizer.json, not the settings


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_join_to_the_text(make: Maker, text: str, tmp_path: Path) -> None:
    ours = write(tmp_path, make())
    ids = ours.encode(text, add_special_tokens=False, parse_special=False)
    joined = b"".join(map(ours.token_bytes, ids)).decode()
    assert joined in ((text,) if make is byte_level else (f" {text}", text))


def test_word_pieces_join_to_words(tmp_path: Path) -> None:
    ours = write(tmp_path, word_piece())
    ids = ours.encode("The quickest fox", add_special_tokens=True, parse_special=False)
    assert len(ids) > 3 + 2
    assert b"".join(map(ours.token_bytes, ids)) == b"[CLS] the quickest fox[SEP]"
    assert ours.token_bytes(-1) == b""


def test_other_spellings(tmp_path: Path) -> None:
    suffixed = Tokenizer(models.BPE({"a": 0, "b</w>": 1}, []))
    suffixed.decoder = decoders.BPEDecoder()
    assert [write(tmp_path, suffixed).token_bytes(at) for at in (0, 1)] == [b"a", b"b "]
    words = Tokenizer(models.WordLevel({"one": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert write(tmp_path, words).token_bytes(0) == b" one"


def whole_words(kind: str) -> Tokenizer:
    """Models that look up a whole word: here a special token is a word like any other."""
    words = {"[UNK]": 0, "secret": 1, "public": 2}
    letters = {letter: 3 + at for at, letter in enumerate("secrtpubli")}
    if kind == "bpe":
        model: Any = models.BPE({**words, **letters}, [], ignore_merges=True, unk_token="[UNK]")
    elif kind == "wordpiece":
        model = models.WordPiece({**words, **letters}, unk_token="[UNK]")
    elif kind == "wordlevel":
        model = models.WordLevel({**words, **letters}, unk_token="[UNK]")
    else:
        model = models.Unigram([(word, -1.0) for word in {**words, **letters}], unk_id=0)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["secret", "hidden"])
    tokenizer.add_tokens([TOOL])
    return tokenizer


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "wordlevel", "unigram"])
def test_plain_text_never_becomes_a_special_token(kind: str, tmp_path: Path) -> None:
    engine = whole_words(kind)
    tokenizer = write(tmp_path, engine)

    def ids(text: str, parse: bool) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, parse_special=parse)

    tool, hidden = engine.token_to_id("<tool>"), engine.token_to_id("hidden")
    assert tool == hidden + 1
    assert ids("secret hidden", True) == [1, hidden]
    assert not {1, hidden} & set(ids("secret hidden", False))
    # What is not special keeps its id.
    assert ids("public <tool>", False)[0] == 2
    assert ids("public <tool>", False)[-1] == tool


def test_a_start_token_is_added_once(tmp_path: Path) -> None:
    """TOK-01. Sources: vllm-project/vllm#2012; abetlen/llama-cpp-python#1501."""
    tokenizer = write(tmp_path, byte_level(), bos_token="<s>")

    def starts(text: str, parse: bool) -> int:
        return tokenizer.encode(text, add_special_tokens=True, parse_special=parse).count(0)

    assert starts("the", True) == 1
    assert starts("<s>the", True) == 1
    assert starts("<s><s>the", True) == 2
    assert starts("<s>the", False) == 1
    engine = byte_level()
    engine.post_processor = processors.ByteLevel()
    none = write(tmp_path, engine, bos_token="<s>")
    assert none.encode("<s><s>the", add_special_tokens=True, parse_special=True).count(0) == 2


def test_half_a_surrogate_pair_is_the_requests_fault(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        write(tmp_path, byte_level()).encode("a\ud800", add_special_tokens=True, parse_special=False)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("generation_config.json", {"eos_token_id": "two"}, r"generation_config\.json: eos_token_id must be"),
        ("config.json", {"eos_token_id": [2, None]}, r"config\.json: eos_token_id must be"),
    ],
)
def test_ends_of_a_wrong_type_are_named(tmp_path: Path, file: str, content: Any, words: str) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config, generation = ({}, content) if file.startswith("generation") else (content, {})
    with pytest.raises(CheckpointError, match=words):
        tokenizer_files(tmp_path, config, generation)


def test_more_places_of_chat_templates(tmp_path: Path) -> None:
    """TOK-02. Source: vllm-project/vllm#17977."""
    old = tmp_path / "chat_template.json"
    old.write_text(json.dumps({"chat_template": "old"}))
    assert chat_template(tmp_path) == "old"
    (tmp_path / "tokenizer_config.json").write_text("{")
    old.unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is damaged"):
        chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is damaged"):
        chat_template(tmp_path)
