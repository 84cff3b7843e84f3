"""The grammar backend against its contract, over a vocabulary of bytes and a few longer tokens."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import pytest
import torch

from headrace.core.errors import RequestError
from headrace.core.interfaces import GrammarMatcher, GrammarSpec, Vocabulary
from headrace.plugins.llguidance_backend import LLGuidance

START, END, OTHER_END = 0, 1, 2
WORDS = [b"", b'{"', b'":', b"yes", b"abc", b"  ", "ź".encode()]
TOKENS = [b"<start>", b"<end>", b"<other end>", *(bytes([one]) for one in range(256)), *WORDS]


def encode(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


VOCABULARY = Vocabulary(TOKENS, frozenset({START, END}), (END, OTHER_END), encode)


@pytest.fixture(scope="module")
def backend() -> LLGuidance:
    return LLGuidance()


def allowed(matcher: GrammarMatcher) -> set[int]:
    mask = torch.zeros((len(TOKENS) + 31) // 32, dtype=torch.int32)
    matcher.fill_mask(mask)
    return {token for token in range(len(TOKENS)) if int(mask[token // 32]) >> (token % 32) & 1}


def texts(matcher: GrammarMatcher) -> set[bytes]:
    return {TOKENS[token] for token in allowed(matcher)}


def accepts(matcher: GrammarMatcher, text: str) -> bool:
    return all(matcher.accept(token) for token in encode(text))


def compiled(backend: LLGuidance, kind: Any, text: Any, whitespace: int = 1) -> GrammarMatcher:
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    return backend.compile(GrammarSpec(kind, text, whitespace), VOCABULARY).matcher()


def test_a_mask_allows_what_may_come_next_and_ends_where_it_is_complete(backend: LLGuidance) -> None:
    matcher = compiled(backend, "regex", "ab?")
    assert texts(matcher) == {b"a"}
    assert matcher.accept(encode("a")[0])
    assert allowed(matcher) == {*encode("b"), END, OTHER_END}
    assert not matcher.is_ended
    assert matcher.accept(encode("b")[0])
    assert matcher.is_ended


def test_an_end_token_ends_and_what_does_not_fit_changes_nothing(backend: LLGuidance) -> None:
    matcher = compiled(backend, "regex", "a+")
    assert not matcher.accept(END)
    assert not matcher.accept(encode("b")[0])
    assert accepts(matcher, "aa")
    for end in (END, OTHER_END):
        assert matcher.accept(end)
        assert matcher.is_ended
        matcher.rollback(1)
        assert not matcher.is_ended
    assert not matcher.accept(START)
    assert accepts(matcher, "a")


def test_rollback_goes_back_over_an_end(backend: LLGuidance) -> None:
    matcher = compiled(backend, "choice", ["yes", "yet"])
    assert accepts(matcher, "yes")
    assert matcher.is_ended
    matcher.rollback(2)
    assert not matcher.is_ended
    assert texts(matcher) == {b"e"}
    assert accepts(matcher, "et")
    assert matcher.is_ended
    matcher.rollback(0)
    assert matcher.is_ended


def test_matchers_of_one_grammar_do_not_meet(backend: LLGuidance) -> None:
    grammar = backend.compile(GrammarSpec("regex", "a{3}"), VOCABULARY)
    first, second = grammar.matcher(), grammar.matcher()
    assert accepts(first, "aaa")
    assert first.is_ended
    assert not second.is_ended
    assert accepts(second, "aa")
    assert not second.is_ended


def test_tokens_without_bytes_and_special_ones_are_never_allowed(backend: LLGuidance) -> None:
    matcher = compiled(backend, "regex", r"(?s:.)+")
    assert not allowed(matcher) & {START, END, TOKENS.index(b"")}
    assert TOKENS.index(b"abc") in allowed(matcher)


@pytest.mark.parametrize(
    "text", ['q"uote', "back\\slash", "l\nine", "źdźbło 🙂 漢字", "/", "a // b", "%json"]
)
def test_a_choice_is_its_text_to_the_letter(backend: LLGuidance, text: str) -> None:
    matcher = compiled(backend, "choice", [text, "other"])
    assert accepts(matcher, text)
    assert matcher.is_ended


@pytest.mark.parametrize(
    "grammar", ['start: "a" digit+\ndigit: /[0-9]/', 'root ::= "a" digit+\ndigit ::= [0-9]']
)
def test_lark_and_gbnf(backend: LLGuidance, grammar: str) -> None:
    matcher = compiled(backend, "grammar", grammar)
    assert not matcher.accept(encode("b")[0])
    assert accepts(matcher, "a17")
    assert END in allowed(matcher)


def spaced(gap: str) -> str:
    return f'{{{gap}"a"{gap}:{gap}[{gap}1{gap},{gap}2{gap}]{gap}}}'


SCHEMA = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}


@pytest.mark.parametrize("most", [0, 1, 3])
def test_white_space_is_bounded(backend: LLGuidance, most: int) -> None:
    """Source: vllm-project/vllm#38696."""
    for run in range(most + 1):
        matcher = compiled(backend, "json", SCHEMA, most)
        assert accepts(matcher, spaced("\n" * run))
        assert matcher.is_ended
    assert not accepts(compiled(backend, "json", SCHEMA, most), spaced(" " * (most + 1)))


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("json", {"type": "whatever"}, "whatever"),
        ("json", {"$ref": "#/nowhere"}, "/nowhere"),
        ("json", {"$ref": "#"}, "no answer fits"),
        ("json", {"type": "object", "properties": 5}, "properties must be an object"),
        ("json", {"type": "string", "pattern": "("}, "unclosed group"),
        ("json", {"not": {}}, r'not supported: \["not"\]'),
        ("json", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json", {"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisfiable"),
        ("regex", "(", "unclosed group"),
        ("regex", "[z-a]", "character class"),
        ("regex", "a{5,2}", "repetition"),
        ("regex", "(?<n>x", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("grammar", "!! what", "Expected"),
        ("grammar", 'root ::= (("a"', "Expected"),
        ("grammar", "start: nowhere", "nowhere"),
    ],
)
def test_what_cannot_be_compiled_is_named_in_one_short_line(
    backend: LLGuidance, kind: Any, text: Any, told: str
) -> None:
    """Source: vllm-project/vllm#17248; vllm-project/vllm#17313."""
    with pytest.raises(RequestError, match=told) as raised:
        compiled(backend, kind, text)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_large_ones_are_served_or_refused_soon(backend: LLGuidance) -> None:
    """Source: vllm-project/vllm#17313."""
    assert accepts(compiled(backend, "regex", "ab" * 10_000), "abab")
    assert accepts(compiled(backend, "regex", "(a*)*b{500}"), "aab")
    for hostile in ("(a|b){1000}{1000}", "(.*a){200}", "((a{0,100}){0,100}){0,100}"):
        with contextlib.suppress(RequestError):  # it may say that this is too much
            matcher = compiled(backend, "regex", hostile)
            assert accepts(matcher, "a" * 50)
            assert allowed(matcher)


def test_threads_may_compile_and_match_at_once(backend: LLGuidance) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                matcher = compiled(backend, "regex", f"{number}{turn % 3}[ab]+")
                assert accepts(matcher, f"{number}{turn % 3}ab")
                assert END in allowed(matcher)
        except BaseException as error:  # noqa: BLE001 - told to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_model_without_an_end_token_is_refused(backend: LLGuidance) -> None:
    endless = Vocabulary(TOKENS, frozenset(), (), encode)
    with pytest.raises(RequestError, match="no end token"):
        backend.compile(GrammarSpec("regex", "a"), endless)
