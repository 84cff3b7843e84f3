"""Prompts to ids: every form of prompt, and what each wrong one is told."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from headrace.core.config import EngineConfig
from headrace.core.errors import RequestError
from headrace.core.interfaces import InputProcessor, ProcessedInput, Tokenizer
from headrace.core.interfaces.build import FrontContext
from headrace.core.plugin.registry import Registrar, Registry
from headrace.core.request import BlockKey
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.plugins import text_input

START, VOCAB = 256, 300


class ByteTokenizer:
    """Bytes, and a start token spelt `<s>`."""

    vocab_size = 257
    bos_token_id = START
    eos_token_ids = (START,)
    special_ids = frozenset({START})

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        ids = [START] if add_special_tokens else []
        if parse_special and text.startswith("<s>"):
            ids, text = [*ids, START], text.removeprefix("<s>")
        return ids + [byte for byte in text.encode() if byte != 0]

    def token_bytes(self, token_id: int) -> bytes:
        return b"<s>" if token_id == START else bytes([token_id])


def processor(tokenizer: Tokenizer | None) -> InputProcessor:
    registry = Registry()
    text_input.headrace_register(Registrar(registry, text_input.name), None)
    context = FrontContext(
        config=EngineConfig(model="none"),
        registry=registry,
        tokenizer=tokenizer,
        vocab_size=VOCAB,
        max_model_len=100,
        chat_template=None,
    )
    return typing.cast(InputProcessor, registry.get("input_processor", "text").factory(context))


def run(
    prompt: Any, *, tokenizer: Tokenizer | None = ByteTokenizer(), chat: bool = False, **params: Any
) -> ProcessedInput:
    item = ProcessedInput(prompt=prompt, params=SamplingParams(**params), stash=Stash(), is_chat=chat)
    processor(tokenizer).process(item)
    return item


@pytest.mark.parametrize("prompt", ["ab", {"prompt": "ab"}])
def test_text(prompt: Any) -> None:
    item = run(prompt)
    assert (item.text, item.token_ids) == ("ab", [START, 97, 98])


@pytest.mark.parametrize("prompt", [[97, 98], (97, 98), {"prompt_token_ids": [97, 98]}])
def test_ids_are_taken_as_they_are(prompt: Any) -> None:
    item = run(prompt)
    assert (item.text, item.token_ids) == (None, [97, 98])
    assert item.token_ids is not prompt
    assert run(prompt, tokenizer=None).token_ids == [97, 98]


def test_integers_of_numpy_become_plain() -> None:
    numpy = pytest.importorskip("numpy")
    ids = run(list(numpy.array([97, 98]))).token_ids
    assert ids == [97, 98]
    assert {type(token_id) for token_id in ids or []} == {int}


def test_one_start_token_in_a_chat() -> None:
    """Source: vllm-project/vllm#2012, abetlen/llama-cpp-python#1501 (TOK-01): the template wrote it, and the
    tokenizer another."""
    assert run("<s>a", chat=True).token_ids == [START, 97]
    assert run("<s>a").token_ids == [START, *b"<s>a"]


def test_the_switches() -> None:
    assert run("<s>a", parse_special_tokens=True, add_special_tokens=False).token_ids == [START, 97]
    assert run("a", add_special_tokens=False).token_ids == [97]
    assert run("a", chat=True, add_special_tokens=True).token_ids == [START, 97]


def test_options_are_registered() -> None:
    registry = Registry()
    text_input.headrace_register(Registrar(registry, text_input.name), None)
    assert registry.names("request_option") == ["add_special_tokens", "parse_special_tokens"]


def test_other_links_of_the_chain_are_respected() -> None:
    key = BlockKey(0, None, b"adapter")
    item = ProcessedInput(prompt={"image": 1}, params=SamplingParams(), stash=Stash(), block_keys=[key])
    item.text = "ab"
    processor(ByteTokenizer()).process(item)
    assert (item.token_ids, item.block_keys) == ([START, 97, 98], [key])
    item.text, item.token_ids = None, [5]
    processor(ByteTokenizer()).process(item)
    assert item.token_ids == [5]
    item.token_ids = [VOCAB]
    with pytest.raises(RequestError, match="vocabulary"):
        processor(ByteTokenizer()).process(item)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "prompt is empty"),
        ([], "prompt_token_ids is empty"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({}, "exactly one of 'prompt' and 'prompt_token_ids', got neither"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one .* got prompt and prompt_token_ids"),
        ({"promt": "a"}, r"no key 'promt' \(did you mean 'prompt'\?\); known: prompt, prompt_token_ids"),
        ({"prompt": "a", 5: 1}, "no key 5"),
        ({"prompt": [1, 2]}, "prompt must be a text, got list"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids must be a list of token ids, got str"),
        ({"prompt_token_ids": None}, "got NoneType"),
        (None, "got NoneType"),
        (5, "got int"),
        (b"ab", "got bytes"),
        ("a\ud800", "half a surrogate pair at character 1"),
    ],
)
def test_prompts_that_are_none(prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        run(prompt)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([VOCAB], "token id 300 at position 0 .* from 0 to 299"),
        ([1, VOCAB + 1000], "token id 1300 at position 1"),
        ([-1], "token id -1 "),
        ([1099511627776], "token id 1099511627776 "),
        ([10**5000], "token id of 16610 bits"),
        ([3, "x"], "must be an integer, got 'x' at position 1"),
        ([[1, 2], [VOCAB]], r"must be an integer, got \[1, 2\] at position 0"),
        ([True], "must be an integer, got True"),
        ([1.0], "must be an integer, got 1.0"),
        ([None], "got None"),
    ],
)
def test_ids_outside_the_vocabulary(ids: list[Any], words: str) -> None:
    """Source: vllm-project/vllm#9634, #51795 (SMP-13): they reached the embedding's lookup."""
    for prompt in (ids, {"prompt_token_ids": ids}):
        with pytest.raises(RequestError, match=words):
            run(prompt)


def test_the_last_id_of_the_model_is_good_though_the_tokenizer_lacks_it() -> None:
    assert run([VOCAB - 1]).token_ids == [VOCAB - 1]


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(RequestError, match=r"no tokenizer.*prompt_token_ids"):
        run("a", tokenizer=None)


def test_text_that_gives_no_token() -> None:
    with pytest.raises(RequestError, match="no token at all"):
        run("\0", add_special_tokens=False)
