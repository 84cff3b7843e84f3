"""Ids to text a token at a time: no half characters, nothing lost, nothing of the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.output.detokenizer import IncrementalDetokenizer

END, START = 300, 301
WORDS = {
    256: b" Hello",
    257: "字".encode(),
    258: "é🙂".encode(),
    259: b"\x9f\x99",
    260: b"",
    261: b"a\xf0",
}


class ByteTokenizer:
    """Ids 0–255 are bytes; some tokens of several bytes, and two special ones."""

    vocab_size = 302
    bos_token_id = START
    eos_token_ids = (END,)
    special_ids = frozenset({END, START})

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return {**WORDS, END: b"<end>", START: b"<start>"}.get(token_id, b"")


def pieces(ids: list[int], **options: object) -> list[str]:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), **options)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def whole(ids: list[int]) -> str:
    return b"".join(ByteTokenizer().token_bytes(i) for i in ids).decode("utf-8", "replace")


characters = st.characters(exclude_categories=["Cs"]).map(lambda c: list(c.encode()))
"""Whole characters as bytes, so that valid sequences are frequent."""
tokens = st.lists(st.one_of(characters, st.integers(0, 261).map(lambda i: [i])), max_size=12).map(
    lambda parts: [i for part in parts for i in part]
)


@given(tokens)
def test_pieces_join_to_the_decoded_whole(ids: list[int]) -> None:
    assert "".join(pieces(ids)) == whole(ids)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    shown = pieces(list(text.encode()))
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)
    assert shown[-1] == ""


def test_characters_over_several_tokens() -> None:
    """Source: waybarrios/vllm-mlx#109 and #195 (DTK-02): they arrived as replacement characters."""
    text = "źdźbło 🙂 漢字 ďábel"
    shown = pieces(list(text.encode()))
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)
    assert all(piece.encode().decode() == piece for piece in shown)  # no half surrogates
    assert shown.count("") > 10  # characters really were spread over tokens


def test_a_character_comes_with_its_last_token() -> None:
    assert pieces(list("🙂".encode())) == ["", "", "", "🙂", ""]


def test_bad_bytes_show_once_when_known_bad() -> None:
    assert pieces([0xF0, 0x9F, ord("a")]) == ["", "", "\ufffda", ""]
    assert pieces([0xFF, ord("a")]) == ["\ufffd", "a", ""]


def test_an_unfinished_tail_is_flushed_at_the_end() -> None:
    assert pieces([ord("a"), 0xF0, 0x9F, 0x99]) == ["a", "", "", "", "\ufffd"]


def test_leading_space_is_neither_lost_nor_doubled() -> None:
    assert pieces([256, 256]) == [" Hello", " Hello", ""]


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip: bool) -> None:
    ids = [START, ord("a"), END, ord("b")]
    assert "".join(pieces(ids, skip_special_tokens=skip)) == ("ab" if skip else "<start>a<end>b")


def test_a_hidden_token_inside_a_character_does_not_break_it() -> None:
    assert "".join(pieces([0xC3, END, 0xA9])) == "é"


def test_end_tokens_of_the_request_are_hidden_too() -> None:
    assert "".join(pieces([ord("a"), 256], eos_token_ids=[256])) == "a"
    assert "".join(pieces([ord("a"), 256], eos_token_ids=[256], skip_special_tokens=False)) == "a Hello"


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert pieces([ord("a"), 302, 10**6, ord("b")]) == ["a", "", "", "b", ""]


def test_prompt_that_ends_inside_a_character() -> None:
    """Source: vllm-project/vllm#48853: the first delta held the whole prompt's text."""
    data = "Hello world 🙂".encode()
    for cut in range(1, 4):
        shown = pieces([*data[-cut:], ord("!")], prompt_token_ids=list(data[:-cut]))
        assert shown == [""] * (cut - 1) + ["🙂", "!", ""]


@pytest.mark.parametrize("answer", [b"abc", b"\x98abc", b"\x98\xff", "é".encode(), b"\x98", b""])
def test_prompt_character_that_is_not_completed(answer: bytes) -> None:
    prompt = [ord("x"), 0xF0, 0x9F]
    assert "".join(pieces(list(answer), prompt_token_ids=prompt)) == answer.decode("utf-8", "replace")


def test_prompt_character_that_goes_wrong_late() -> None:
    """Bytes of the answer that seemed to go on with it count as the answer's own: one U+FFFD for each."""
    assert pieces([0x9F, 0x98, ord("a")], prompt_token_ids=[0xF0]) == ["", "", "\ufffd\ufffda", ""]
    assert pieces([0x9F, 0x98], prompt_token_ids=[0xF0]) == ["", "", "\ufffd\ufffd"]


def test_special_token_ends_the_prompts_character() -> None:
    assert "".join(pieces([0xA9], prompt_token_ids=[0xC3, START])) == "\ufffd"


def unfinished(data: bytes) -> bytes:
    """The reference: by the words of Python's strict decoder."""
    for length in (3, 2, 1):
        try:
            data[-length:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return data[-length:]
    return b""


@given(prompt=tokens, cut=st.integers(0, 4), answer=tokens)
def test_any_border_between_prompt_and_answer(prompt: list[int], cut: int, answer: list[int]) -> None:
    border = len(prompt) - cut if cut < len(prompt) else len(prompt)
    prompt, answer = prompt[:border], prompt[border:] + answer
    before = b"".join(ByteTokenizer().token_bytes(i) for i in prompt)
    after = b"".join(ByteTokenizer().token_bytes(i) for i in answer)
    tail = unfinished(before)
    joined = (tail + after).decode("utf-8", "replace")
    completed = tail and joined and (first := joined[0]) != "\ufffd" and first.encode().startswith(tail)
    expected = joined if completed else after.decode("utf-8", "replace")
    assert "".join(pieces(answer, prompt_token_ids=prompt)) == expected


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([END, START, END], "<end> <start> <end>"),
        ([ord("a"), END, ord("b"), END], "a<end>b<end>"),
        ([*"é".encode(), END, END, *"é".encode()], "é<end> <end>é"),
        ([256, END, 256], " Hello<end> Hello"),
    ],
)
def test_spaces_between_special_tokens_are_an_option(ids: list[int], text: str) -> None:
    assert "".join(pieces(ids, skip_special_tokens=False, spaces_between_special_tokens=True)) == text
    assert "".join(pieces(ids, skip_special_tokens=False)) == text.replace("> <", "><")
    hidden = "".join(pieces(ids, spaces_between_special_tokens=True))
    assert hidden == "".join(pieces(ids))
