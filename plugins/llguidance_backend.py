"""Grammar backend `llguidance`: JSON schemas, regular expressions, choices, Lark and GBNF grammars."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from headrace.core.errors import RequestError
from headrace.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from headrace.core.interfaces import Grammar, GrammarBackend, GrammarMatcher, GrammarSpec, Vocabulary
    from headrace.core.plugin.registry import Registrar

__all__ = ["LLGuidance", "headrace_api", "headrace_register", "name"]

name = "llguidance"
headrace_api = ">=1,<2"

MAX_LEXER_STATES = 50_000
"""A lexer's state takes 1 to 2 kB, so a hostile grammar takes at most 100 MB."""

MAX_ERROR = 400
"""Characters of what the library says of a grammar."""


class _Matcher:
    """One answer's place in a grammar; implements `GrammarMatcher`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fill_mask(self, mask: torch.Tensor) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.element_size())
        self._check()

    def accept(self, token_id: int) -> bool:
        if self._matcher.try_consume_tokens([token_id]) == 1:
            return True
        self._check()
        return False

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    @property
    def is_ended(self) -> bool:
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                f"structured: the grammar cannot go on: {_told(self._matcher.get_error())}",
                param="structured",
            )


class _Grammar:
    """A matcher at the beginning, copied for each answer; implements `Grammar`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._first = matcher
        self._lock = threading.Lock()

    def matcher(self) -> GrammarMatcher:
        with self._lock:
            return _Matcher(self._first.deep_copy())


class LLGuidance:
    """Compiles with the library llguidance; its tokenizer of a vocabulary takes half a second, and is kept."""

    name = name
    kinds: tuple[str, ...] = ("json", "regex", "choice", "grammar")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokenizers: dict[int, tuple[Vocabulary, LLTokenizer]] = {}

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> Grammar:
        """Compile. Raises `RequestError` with what the library says."""
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = _grammar_text(spec)
        except ValueError as error:
            raise _refused(spec, str(error)) from None
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer(vocabulary), text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(spec, matcher.get_error())
        first = matcher.deep_copy()
        first.compute_bitmask()  # finds what nothing fits, and warms the lexer that all copies share
        if first.is_error() or (first.is_stopped() and not first.is_accepting()):
            raise _refused(spec, f"no answer fits it: {first.get_error()}")
        if first.is_stopped():
            raise _refused(spec, "only the empty answer fits it")
        return _Grammar(matcher)

    def _tokenizer(self, vocabulary: Vocabulary) -> LLTokenizer:
        with self._lock:
            found = self._tokenizers.get(id(vocabulary))
            if found is None:
                found = self._tokenizers[id(vocabulary)] = (vocabulary, _make_tokenizer(vocabulary))
            return found[1]


def _make_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = list(vocabulary.end_ids)
    if not ends:
        raise RequestError(
            "structured: this model has no end token, so an answer could not end", param="structured"
        )

    class Words:
        """The vocabulary, as the library asks for it."""

        eos_token_id = ends[0]
        bos_token_id = None
        tokens = vocabulary.tokens
        special_token_ids = sorted({*vocabulary.special_ids, *ends})

        def __call__(self, text: str) -> list[int]:
            return vocabulary.encode(text)

    return LLTokenizer(TokenizerWrapper(Words()), eos_token=ends)


def _grammar_text(spec: GrammarSpec) -> str:
    """Return the library's own notation. Raises `ValueError`."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    if spec.kind == "json":
        # One pattern between all tokens; without it the library allows runs of any length.
        overrides: JsonCompileOptions = {"whitespace_flexible": spec.whitespace > 0}
        if spec.whitespace:
            overrides["whitespace_pattern"] = rf"[ \n\r\t]{{0,{spec.whitespace}}}"
        return str(LLMatcher.grammar_from_json_schema(spec.text, overrides=overrides))
    if spec.kind == "regex":
        return str(LLMatcher.grammar_from_regex(spec.text))
    if spec.kind == "choice":
        words = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(spec.text))
        return str(LLMatcher.grammar_from_lark(f"start: {words}"))
    try:
        return str(LLMatcher.grammar_from_lark(any_to_lark(spec.text)))
    except GbnfToLarkError as error:
        raise ValueError(str(error)) from None


def _refused(spec: GrammarSpec, text: str) -> RequestError:
    return RequestError(f"structured.{spec.kind} cannot be served: {_told(text)}", param="structured")


def _told(text: str) -> str:
    """Return the library's words, without what it prints of its state, in one line of bounded length."""
    words = " ".join(text.split("<state>")[0].replace("<non-verbose/>", "").split())
    words = words.replace("Unimplemented keys:", "these keywords are not supported:")
    return words if len(words) <= MAX_ERROR else f"{words[: MAX_ERROR - 1]}…"


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the backend."""
    registrar.grammar(name, _backend)


def _backend() -> GrammarBackend:
    return LLGuidance()
