"""What the tokenizers in GGUF files have in common: the vocabulary, its special tokens, the start token."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import CheckpointError, RequestError

__all__ = ["BYTE", "CONTROL", "NORMAL", "UNKNOWN", "USER_DEFINED", "GGUFTokenizer", "Vocabulary", "strings"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Types of tokens (5 is "unused")."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file, checked."""

    path: str
    tokens: Sequence[str]
    types: Sequence[int]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool

    @classmethod
    def read(cls, data: Mapping[str, Any], *, add_bos: bool) -> Vocabulary:
        """Read the keys below `tokenizer.ggml.`. Raises `CheckpointError` naming file and key.

        add_bos: whether a start token is added where the file does not say.
        """
        path = str(data.get("path", "the checkpoint"))
        tokens = strings(data, "tokens")
        types = data.get("token_type") or [NORMAL] * len(tokens)
        if len(types) != len(tokens) or not all(type(kind) is int for kind in types):
            raise CheckpointError(
                f"{path}: tokenizer.ggml.token_type must hold one whole number for each of {len(tokens)} tokens, "
                f"it holds {len(types)} values"
            )

        def id_of(name: str) -> int | None:
            value = data.get(f"{name}_token_id")
            if value is not None and (type(value) is not int or not 0 <= value < len(tokens)):
                raise CheckpointError(
                    f"{path}: tokenizer.ggml.{name}_token_id must be an id below {len(tokens)}, got {value!r}"
                )
            return value

        ends = dict.fromkeys(id_of(name) for name in ("eos", "eot", "eom"))
        said = data.get("add_bos_token", add_bos)
        if type(said) is not bool:
            raise CheckpointError(f"{path}: tokenizer.ggml.add_bos_token must be true or false, got {said!r}")
        return cls(path, tokens, types, id_of("bos"), tuple(end for end in ends if end is not None), said)


def strings(data: Mapping[str, Any], key: str) -> Sequence[str]:
    """Return a list of strings. Raises `CheckpointError` naming file and key."""
    values = data.get(key)
    if not isinstance(values, list) or not values or not all(type(value) is str for value in values):
        raise CheckpointError(
            f"{data.get('path', 'the checkpoint')}: tokenizer.ggml.{key} must be a list of strings, "
            f"got {type(values).__name__}"
        )
    return values


class GGUFTokenizer:
    """A tokenizer from a file's vocabulary; see `headrace.core.interfaces.Tokenizer`.

    encode_text: turns a stretch of text without special tokens into ids; thread-safe.
    spell: turns a token of the vocabulary that is not special into its bytes.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode_text: Callable[[str], list[int]],
        spell: Callable[[str], bytes],
    ) -> None:
        self._tokens = vocabulary.tokens
        self._types = vocabulary.types
        self._encode_text = encode_text
        self._spell = spell
        self._add_bos = vocabulary.add_bos
        self.vocab_size = len(vocabulary.tokens)
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_ids = vocabulary.eos_token_ids
        starts = () if vocabulary.bos_token_id is None else (vocabulary.bos_token_id,)
        hidden = {at for at, kind in enumerate(vocabulary.types) if kind in (UNKNOWN, CONTROL)}
        self.special_ids: frozenset[int] = frozenset(hidden | {*starts, *vocabulary.eos_token_ids})
        defined = {at for at, kind in enumerate(vocabulary.types) if kind == USER_DEFINED}
        # Tokens added by hand are found in any text, control tokens where the caller trusts it.
        self._in_text = {self._tokens[at]: at for at in sorted(defined) if self._tokens[at]}
        self._in_template = {self._tokens[at]: at for at in sorted(defined | hidden) if self._tokens[at]}
        self._text_pattern = _any_of(self._in_text)
        self._template_pattern = _any_of(self._in_template)

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """Return ids; a start token is added once: not where the text's own ids begin with it.

        Raises `RequestError` for text that is no Unicode (half of a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: half of a surrogate pair ({text[error.start]!r}) at character "
                f"{error.start}",
                param="prompt",
            ) from error
        ids: list[int] = []
        pattern = self._template_pattern if parse_special else self._text_pattern
        special = self._in_template if parse_special else self._in_text
        at = 0
        for match in pattern.finditer(text) if pattern else ():
            if match.start() > at:
                ids += self._encode_text(text[at : match.start()])
            ids.append(special[match[0]])
            at = match.end()
        if at < len(text):
            ids += self._encode_text(text[at:])
        bos = self.bos_token_id
        if add_special_tokens and self._add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; none for an id beyond the vocabulary (rows a model has as padding)."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        token = self._tokens[token_id]
        if token_id in self.special_ids or self._types[token_id] == USER_DEFINED:
            return token.encode()
        return self._spell(token)


def _any_of(words: Mapping[str, int]) -> re.Pattern[str] | None:
    """A pattern for any of the words, the longest that fits."""
    if not words:
        return None
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))
