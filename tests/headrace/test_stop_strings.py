"""Stop strings against the plain definition, and the public reports behind them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.output.stop_strings import StopMatch, StopMatcher


def run(stops: list[str], texts: list[str], *, include: bool = False, min_tokens: int = 0):
    """Return the pieces shown, the end's included, and the match."""
    matcher = StopMatcher(stops, include=include, min_tokens=min_tokens)
    shown = []
    for text in texts:
        shown.append(matcher.push(text))
        if matcher.match is not None:
            return shown, matcher.match
    shown.append(matcher.flush())
    return shown, None


def reference(stops: list[str], texts: list[str], include: bool, min_tokens: int):
    """The definition, on the whole text: the first place where a stop ends, by a token that may stop."""
    text = ""
    for count, piece in enumerate(texts, start=1):
        for character in piece:
            text += character
            for stop in stops:
                if count >= min_tokens and text.endswith(stop):
                    return text if include else text[: -len(stop)], StopMatch(stop, count)
    return text, None


texts_of_ab = st.lists(st.text("ab", max_size=4), max_size=12)
stops_of_ab = st.lists(st.text("abc", min_size=1, max_size=5), max_size=5)


@given(stops_of_ab, texts_of_ab, st.booleans(), st.integers(0, 8))
def test_equals_the_definition(stops: list[str], texts: list[str], include: bool, min_tokens: int) -> None:
    shown, match = run(stops, texts, include=include, min_tokens=min_tokens)
    assert ("".join(shown), match) == reference(stops, texts, include, min_tokens)


@given(stops_of_ab, texts_of_ab)
def test_holds_no_more_and_no_less_than_a_beginning_of_a_stop(stops: list[str], texts: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = text = ""
    for piece in texts:
        shown += matcher.push(piece)
        text += piece
        if matcher.match is not None:
            break
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max((b for b in beginnings if text.endswith(b)), key=len, default="")
        assert shown == text[: len(text) - len(held)]


@pytest.mark.parametrize("texts", [["one S", "TOP two"], ["one S", "TO", "P two"], list("one STOP two")])
def test_stop_over_several_tokens(texts: list[str]) -> None:
    """Source: sgl-project/sglang#11462, huggingface/text-generation-inference#1724 (DTK-03), vllm#3574: its
    first part was sent already."""
    shown, match = run(["STOP"], texts)
    assert "".join(shown) == "one "
    assert not any("S" in piece for piece in shown)
    assert match is not None
    assert match.stop == "STOP"


def test_good_text_before_a_stop_inside_a_token() -> None:
    """Source: ggml-org/llama.cpp#9867 (DTK-04): the good part of the token was lost."""
    assert run([", "], [" red", " blue,", " green"]) == ([" red", " blue", ""], StopMatch(", ", 3))


def test_stop_inside_one_token() -> None:
    """Source: vllm-project/vllm#3572: a stop string within a token was not seen."""
    assert run(["DE"], ["ABC", "DEF"]) == (["ABC", ""], StopMatch("DE", 2))


def test_held_text_is_released_when_the_match_fails() -> None:
    """Source: vllm-project/vllm#3574."""
    assert run(["STOP"], ["a ST", "O", "RE", "S"]) == (["a ", "", "STORE", "", "S"], None)


def test_the_one_completed_first_wins() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a"], StopMatch("bc", 1))


@pytest.mark.parametrize(("stops", "text"), [(["bc", "abc"], "a"), (["abc", "bc"], "")])
def test_ties_go_by_the_order_of_the_list(stops: list[str], text: str) -> None:
    assert run(stops, ["ab", "c"])[0] == ([text, ""] if text == "" else ["", text])
    assert run(stops, ["ab", "c"])[1] == StopMatch(stops[0], 2)


def test_include_ends_exactly_at_the_stop_and_holds_nothing() -> None:
    assert run(["STOP"], ["a ST", "OP b"], include=True) == (["a ST", "OP"], StopMatch("STOP", 2))


def test_stops_before_min_tokens_are_text_for_good() -> None:
    """Source: vllm-project/vllm#21987 (SMP-10): a stop string ended the request before min_tokens."""
    texts = ["a", "X", "b", "c", "X", "d"]
    assert run(["X"], texts, min_tokens=4) == (["a", "X", "b", "c", ""], StopMatch("X", 5))
    assert run(["X"], texts, min_tokens=5) == (["a", "X", "b", "c", ""], StopMatch("X", 5))
    assert run(["X"], texts, min_tokens=6) == ([*texts, ""], None)


def test_a_stop_begun_early_and_completed_in_time() -> None:
    assert run(["XY"], ["X", "Y", "X", "Y"], min_tokens=4) == (["", "XY", "", ""], StopMatch("XY", 4))


def test_a_stop_that_overlaps_one_that_came_too_early() -> None:
    assert run(["aba"], ["a", "b", "a", "b", "a"], min_tokens=4) == (
        ["", "", "ab", "", ""],
        StopMatch("aba", 5),
    )


def test_hidden_tokens_count() -> None:
    assert run(["X"], ["", "", "X"], min_tokens=3)[1] == StopMatch("X", 3)


def test_text_flushed_by_the_last_token_may_complete_a_stop() -> None:
    matcher = StopMatcher(["a\ufffd"])
    assert matcher.push("xa") == "x"
    assert matcher.flush("\ufffd") == ""
    assert matcher.match == StopMatch("a\ufffd", 1)


def test_nothing_after_a_match() -> None:
    matcher = StopMatcher(["X"])
    assert [matcher.push("aX"), matcher.push("bX"), matcher.flush("c")] == ["a", "", ""]
    assert matcher.match == StopMatch("X", 1)


def test_a_thousand_long_stops_are_cheap() -> None:
    """Time grows with the text, not with text × stops: a rescan would look at 3·10⁹ characters here."""
    stops = [f"{number:04d}" + "x" * 3000 for number in range(1000)]
    begun = time.process_time()
    shown, match = run(stops, ["lorem ipsum "] * 1000)
    assert "".join(shown) == "lorem ipsum " * 1000
    assert match is None
    assert time.process_time() - begun < 2


def test_a_stop_that_nearly_matches_all_the_time() -> None:
    begun = time.process_time()
    shown, match = run(["a" * 5000 + "b"], ["aaaa"] * 5000)
    assert match is None
    assert "".join(shown) == "a" * 20000
    assert time.process_time() - begun < 2
