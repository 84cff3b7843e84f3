"""`bad_words`: the last token of a sequence is banned where the others stand before it, and nowhere else."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headrace.configuration import request_options
from headrace.core.errors import RequestError
from headrace.core.interfaces import LogitsRow, ProcessedInput
from headrace.core.plugin.registry import Registrar, Registry
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.plugins import bad_words as plugin

V = 300


class PieceTokenizer:
    """Some pieces, the longest first, and bytes for the rest; ids of pieces begin at 256."""

    pieces = (" blue", "blue", " sky", "sky", " st")
    vocab_size = 256 + len(pieces)

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        assert not add_special_tokens
        assert not parse_special
        ids: list[int] = []
        while text:
            found = [i for i, piece in enumerate(self.pieces) if text.startswith(piece)]
            ids += [256 + found[0]] if found else list(text[0].encode())
            text = text[len(self.pieces[found[0]]) if found else 1 :]
        return ids


def registry() -> Registry:
    made = Registry()
    plugin.headrace_register(Registrar(made, plugin.name), None)
    return made


def make_stash(words: list[str], tokenizer: Any = PieceTokenizer(), vocab_size: int = V) -> Stash:
    """What the front end sends along."""
    params = SamplingParams(bad_words=words)
    request_options(registry(), params)
    item = ProcessedInput("hi", params, Stash())
    context: Any = types.SimpleNamespace(tokenizer=tokenizer, vocab_size=vocab_size)
    plugin.WordTokens(context).process(item)
    return item.stash


def sequences(words: list[str], **fields: Any) -> list[list[int]]:
    return make_stash(words, **fields)[plugin.SEQUENCES]


def banned(
    words: list[str], output: Sequence[int], prompt: Sequence[int] = (1, 2), confirmed: int | None = None
):
    params = SamplingParams(bad_words=words)
    processor = plugin.bad_words(params)
    assert processor is not None
    tokens = np.array([*prompt, *output], np.int32)
    row = LogitsRow(
        "r", params, make_stash(words), len(prompt), len(tokens), tokens,  # type: ignore[arg-type]
        len(tokens) if confirmed is None else confirmed,
    )  # fmt: skip
    got = processor(row, torch.zeros(V))
    return {i for i in range(V) if got[i] == -torch.inf}


BLUE_SPACED, BLUE, SKY_SPACED, SKY, ST = range(256, 261)


def test_a_word_is_tokenized_at_the_beginning_and_behind_a_space() -> None:
    assert sequences(["blue"]) == [[BLUE], [BLUE_SPACED]]
    assert sequences([" blue"]) == [[BLUE], [BLUE_SPACED]]
    assert sequences(["blue sky"]) == [[BLUE, SKY_SPACED], [BLUE_SPACED, SKY_SPACED]]
    assert sequences(["blue", " blue"]) == [[BLUE], [BLUE_SPACED]], "each once"
    assert sequences([" "]) == [[32]]
    assert sequences(["stone"]) == [[*b"stone"], [ST, *b"one"]]


def test_words_of_one_token_are_always_banned() -> None:
    assert banned(["blue"], []) == {BLUE, BLUE_SPACED}
    assert banned(["blue"], [9, 9]) == {BLUE, BLUE_SPACED}


def test_the_last_token_is_banned_behind_the_others_alone() -> None:
    words = ["blue sky"]
    assert banned(words, []) == set()
    assert banned(words, [BLUE]) == {SKY_SPACED}
    assert banned(words, [9, BLUE_SPACED]) == {SKY_SPACED}
    assert banned(words, [BLUE, 9]) == set()
    assert banned(["stone"], [*b"ston"]) == {ord("e")}
    assert banned(["stone"], [ST, *b"on"]) == {ord("e")}
    assert banned(["stone"], [*b"to"]) == set()


def test_a_first_token_that_words_share_is_not_banned() -> None:
    assert banned(["blue sky", "blue stone"], [BLUE]) == {SKY_SPACED}
    assert banned(["blue sky", "blue stone"], [BLUE, ST, *b"on"]) == {ord("e")}


def test_case_matters() -> None:
    assert banned(["Blue"], [ord("B")]) == set()
    assert banned(["Blue"], [*b"Blu"]) == {ord("e")}
    assert BLUE not in banned(["Blue"], [])


def test_prompts_may_hold_what_they_like() -> None:
    assert banned(["blue sky"], [], prompt=[5, BLUE]) == set()
    assert banned(["blue sky"], [BLUE], prompt=[5, BLUE]) == {SKY_SPACED}


def test_drafts_before_a_row_count() -> None:
    assert banned(["blue sky"], [BLUE], confirmed=2) == {SKY_SPACED}


def test_a_function_of_the_row() -> None:
    """One processor, rows in any order (rejected drafts, preemption): the same masks as fresh ones."""
    params, stash = SamplingParams(bad_words=["blue sky", "stone"]), make_stash(["blue sky", "stone"])
    processor = plugin.bad_words(params)
    assert processor is not None
    outputs = [[], [BLUE], [BLUE, 7], [ST, *b"on"], [BLUE], []]
    for output in outputs:
        tokens = [1, 2, *output]
        row = LogitsRow("r", params, stash, 2, len(tokens), tokens, 2)
        got = processor(row, torch.zeros(V))
        assert {i for i in range(V) if got[i] == -torch.inf} == banned(["blue sky", "stone"], output)


def test_sequences_the_model_cannot_say_are_left_out() -> None:
    assert sequences(["blue"], vocab_size=257) == [[BLUE_SPACED]]


def test_too_many_sequences_are_refused_with_the_count() -> None:
    """Each word is two sequences; what is the same counts once."""
    assert len(sequences([f"w{i}" for i in range(64)])) == 128
    with pytest.raises(RequestError, match=r"the 65 words are 130 token sequences .* at most 128") as caught:
        make_stash([f"w{i}" for i in range(65)])
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize(
    "given", [["a"] * 129, "blue", [""], ["a", 5], ["x" * 1001], ["a\ud800"], {"a": 1}, [None]]
)
def test_what_is_no_list_of_words_is_refused(given: Any) -> None:
    with pytest.raises(RequestError, match="bad_words"):
        request_options(registry(), SamplingParams(bad_words=given))


def test_words_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        make_stash(["blue"], tokenizer=None)


def test_no_words_ask_for_nothing() -> None:
    for params in (SamplingParams(), SamplingParams(bad_words=[])):
        assert plugin.bad_words(params) is None
    assert len(make_stash([])) == 0


def test_registers_its_parts_and_what_travels_between_them() -> None:
    made = registry()
    assert made.names("request_option") == ["bad_words"]
    assert [entry.factory for entry in made.entries("logits_processor")] == [plugin.bad_words]
    assert [entry.factory for entry in made.entries("input_processor")] == [plugin.WordTokens]
    stash = make_stash(["blue sky"])
    assert made.stash_keys.from_wire(stash.to_wire()) == stash
