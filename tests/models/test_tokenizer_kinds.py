"""Tokenizers from small vocabularies: how words are cut, start tokens, added tokens, what is refused."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import CheckpointError
from headrace.models.opening import build_tokenizer
from headrace.models.tokenizers.gguf_bpe import WORDS, build_bpe_tokenizer
from headrace.models.tokenizers.gguf_sentencepiece import build_sentencepiece_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def bpe(**changes: Any) -> dict[str, Any]:
    """The printable ASCII letters (and Ġ, Ċ: space, newline), a few merges, a start and an end token."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "Ã", "©", "Ì", "ģ"]
    merges = ["1 2", "12 3", "123 4", "h e", "l l", "he ll", "hell o", "Ġ hello"]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), "<s>", "</s>", "<tool>"]
    count = len(tokens)
    types = [NORMAL] * (count - 3) + [CONTROL, CONTROL, USER_DEFINED]
    data = {
        "kind": "gguf_gpt2",
        "path": "some.gguf",
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "bos_token_id": count - 3,
        "eos_token_id": count - 2,
        **changes,
    }
    return {key: value for key, value in data.items() if value is not None}


def words(tokenizer: Any, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    return [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids]


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("gpt-2", ["1234"]),
        ("default", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
    ],
)
def test_digits_are_cut_as_the_file_says(pre: str, digits: list[str]) -> None:
    assert words(build_bpe_tokenizer(bpe(pre=pre)), "1234") == digits


def test_words_are_cut_like_transformers_own_tokenizers() -> None:
    """The patterns themselves, against the reference library's of the same models."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Regex, pre_tokenizers

    def cut(pre: str, text: str) -> list[str]:
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in WORDS[pre].patterns]
        return [word for word, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]

    texts = [
        "Hello  world's 12345 x²\n\n  y\t\tz ",
        "don't DON'T 've",
        "日本語 text—dash ½ 3.14\r\n!",
        "  \n a",
    ]
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    qwen = transformers.Qwen2Tokenizer()._tokenizer.pre_tokenizer
    for text in texts:
        for pre, reference in (("gpt-2", own), ("qwen2", qwen)):
            expected = [word for word, _ in reference.pre_tokenize_str(text)]
            got = [spelt.pre_tokenize_str(word)[0][0] for word in cut(pre, text)]
            assert got == expected, (pre, text)


def test_the_start_token_is_added_once() -> None:
    """TOK-01. Sources: vllm-project/vllm#2012; abetlen/llama-cpp-python#1501."""
    tokenizer = build_bpe_tokenizer(bpe(add_bos_token=True))
    bos = tokenizer.bos_token_id
    rendered = "<s>hello</s>"
    # A rendered chat template brings its own.
    chat = tokenizer.encode(rendered, add_special_tokens=False, parse_special=True)
    assert chat.count(bos) == 1
    assert chat[0] == bos
    # A completion gets one, and does not get a second where the text spells it out and special tokens count.
    assert tokenizer.encode("hello", add_special_tokens=True, parse_special=False).count(bos) == 1
    assert tokenizer.encode(rendered, add_special_tokens=True, parse_special=True) == chat
    # Plain text that looks like one is text.
    plain = tokenizer.encode(rendered, add_special_tokens=True, parse_special=False)
    assert plain.count(bos) == 1
    assert tokenizer.token_bytes(plain[1]) == b"<"
    assert tokenizer.encode("", add_special_tokens=True, parse_special=False) == [bos]
    assert bos not in tokenizer.encode("hello", add_special_tokens=False, parse_special=False)


@pytest.mark.parametrize(
    ("pre", "said", "added"),
    [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", True, True)],
)
def test_whether_a_start_token_is_added(pre: str, said: bool | None, added: bool) -> None:
    tokenizer = build_bpe_tokenizer(bpe(pre=pre, add_bos_token=said))
    ids = tokenizer.encode("hello", add_special_tokens=True, parse_special=False)
    assert (ids[0] == tokenizer.bos_token_id) is added


def test_tokens_added_by_hand_are_found_in_plain_text_and_control_tokens_are_not() -> None:
    tokenizer = build_bpe_tokenizer(bpe())
    tool = tokenizer.vocab_size - 1
    assert tokenizer.encode("he<tool>he", add_special_tokens=False, parse_special=False).count(tool) == 1
    assert tokenizer.token_bytes(tool) == b"<tool>"
    assert tool not in tokenizer.special_ids
    assert tokenizer.special_ids == {tool - 2, tool - 1}


def test_plain_text_never_becomes_a_control_token_where_whole_words_are_looked_up() -> None:
    data = bpe(pre="llama-bpe", token_type=None)
    count = len(data["tokens"])
    data["token_type"] = [NORMAL] * count
    data["tokens"] = [*data["tokens"], "secret", "public"]
    data["token_type"] += [CONTROL, NORMAL]
    tokenizer = build_bpe_tokenizer(data)
    assert tokenizer.encode("public", add_special_tokens=False, parse_special=False) == [count + 1]
    assert len(tokenizer.encode("secret", add_special_tokens=False, parse_special=False)) == 6
    assert tokenizer.encode("secret", add_special_tokens=False, parse_special=True) == [count]


def test_characters_are_composed_only_where_the_model_was_trained_so() -> None:
    decomposed = "e\u0301"
    assert words(build_bpe_tokenizer(bpe(pre="qwen2")), decomposed) != words(
        build_bpe_tokenizer(bpe()), decomposed
    )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            {"pre": "qwen3000"},
            "tokenizer.ggml.pre is 'qwen3000'.*known: default, gpt-2, smollm, llama-bpe, qwen2",
        ),
        ({"pre": 7}, "tokenizer.ggml.pre is 7"),
        ({"tokens": None}, "tokenizer.ggml.tokens must be a list of strings"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of strings"),
        ({"merges": None}, "tokenizer.ggml.merges must be a list of strings"),
        ({"merges": ["h e", "q qq"]}, "merges needs the token 'qq'"),
        ({"merges": ["no-space"]}, "merges needs the token"),
        ({"token_type": [1, 2]}, "token_type must hold one whole number for each of"),
        ({"bos_token_id": 100_000}, "bos_token_id must be an id below .* got 100000"),
        ({"eos_token_id": -1}, "eos_token_id must be an id below"),
        ({"eot_token_id": "2"}, "eot_token_id must be an id below"),
        ({"add_bos_token": 3}, "add_bos_token must be true or false, got 3"),
    ],
)
def test_what_a_bpe_tokenizer_refuses(change: dict[str, Any], what: str) -> None:
    with pytest.raises(CheckpointError, match=f"some.gguf: .*{what}"):
        build_bpe_tokenizer(bpe(**change))


def test_an_unknown_kind_is_named_with_the_known(models_registry: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'gguf_rwkv'.*kinds known: .*gguf_gpt2, gguf_llama"):
        build_tokenizer({"kind": "gguf_rwkv", "path": "some.gguf"}, models_registry)
    assert build_tokenizer(None, models_registry) is None


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Like Llama 2's: unknown, start, end, bytes, then pieces; longer ones score lower, as training orders them."""
    pieces = ["▁t", "he", "▁the", "in", "▁▁", "▁a", "ing", "th", "▁thing"]
    letters = [*"▁theinga"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(letters))]
    scores = [0.0] * 259 + [-float(at) for at in range(len(pieces) + len(letters))]
    return {
        "kind": "gguf_llama",
        "path": "some.gguf",
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


def by_the_definition(data: dict[str, Any], text: str) -> list[int]:
    """Join the best-scoring neighbours, leftmost first, until none can be joined; then bytes for what is no token."""
    ids = {token: at for at, token in enumerate(data["tokens"]) if data["token_type"][at] == NORMAL}
    parts = [*("▁" + text.replace(" ", "▁"))]
    while True:
        joins = [
            (-data["scores"][ids[one + other]], at)
            for at, (one, other) in enumerate(itertools.pairwise(parts))
            if one + other in ids
        ]
        if not joins:
            break
        _, at = min(joins)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return found


@pytest.mark.parametrize(
    "text", ["the thing", "a", "in the  inning", "thé 日 the", "", "nothing<s>", "x\ny", "tttthhheee"]
)
def test_sentencepiece_follows_its_definition(text: str) -> None:
    data = sentencepiece()
    tokenizer = build_sentencepiece_tokenizer(data)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert ids == (by_the_definition(data, text) if text else [])
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert joined == (" " + text if text else "")


def test_sentencepiece_starts_with_the_start_token_once() -> None:
    """TOK-01. Sources: vllm-project/vllm#2012; abetlen/llama-cpp-python#1501."""
    tokenizer = build_sentencepiece_tokenizer(sentencepiece())
    assert tokenizer.encode("the", add_special_tokens=True, parse_special=True)[0] == 1
    assert tokenizer.encode("<s>the", add_special_tokens=True, parse_special=True).count(1) == 1
    assert tokenizer.special_ids == {0, 1, 2}
    plain = build_sentencepiece_tokenizer(sentencepiece(add_bos_token=False, add_space_prefix=False))
    assert (
        b"".join(map(plain.token_bytes, plain.encode("the", add_special_tokens=True, parse_special=True)))
        == b"the"
    )
    with pytest.raises(CheckpointError, match=r"some\.gguf: tokenizer.ggml.scores"):
        build_sentencepiece_tokenizer(sentencepiece(scores=None))


def test_from_a_file(tmp_path: Path, tiny_gguf: Callable[..., Path], models_registry: Any) -> None:
    from headrace.models.opening import open_checkpoint

    keys = {f"tokenizer.ggml.{key}": value for key, value in bpe().items() if key not in ("kind", "path")}
    checkpoint = open_checkpoint(tiny_gguf(tmp_path / "t.gguf", keys), models_registry)
    tokenizer = build_tokenizer(checkpoint.tokenizer, models_registry)
    assert tokenizer is not None
    checkpoint.close()
    assert words(tokenizer, "hello hello") == ["hello", " hello"]


def test_building_one_imports_no_transformers() -> None:
    code = (
        "import sys; from headrace.models.tokenizers import gguf_bpe, gguf_sentencepiece; "
        "import headrace.models.gguf.loader; sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_registering_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from headrace.core.plugin.registry import Registrar, Registry; "
        "from headrace.models import opening, plugin; "
        "plugin.headrace_register(Registrar(Registry(), 'models'), None); "
        "sys.exit(' '.join({'torch', 'numpy', 'tokenizers', 'filelock'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
