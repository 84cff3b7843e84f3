"""The input processor for text: prompts become token ids, and ids given as such are checked.

Text of `generate` goes through as it is: special tokens spelt out in it are ordinary text, and the start token
is added where the model wants one. A rendered chat is the opposite: its special tokens count and none is added.
The request options `add_special_tokens` and `parse_special_tokens` change either for one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from pydantic import StrictBool

from headrace.core.errors import RequestError, nearest
from headrace.core.interfaces import ProcessedInput, Tokenizer
from headrace.core.interfaces.build import FrontContext
from headrace.core.plugin.hookspecs import hookimpl
from headrace.core.plugin.registry import Registrar

__all__ = ["TextInput", "headrace_api", "headrace_register", "name"]

name = "text_input"
headrace_api = ">=1,<2"

_KEYS = ("prompt", "prompt_token_ids")


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the processor and its two request options."""
    registrar.input_processor("text", TextInput)
    registrar.request_option("add_special_tokens", StrictBool)
    registrar.request_option("parse_special_tokens", StrictBool)


class TextInput:
    """Fills `text` and `token_ids`; what an earlier link of the chain has filled is left as it is."""

    name = "text"

    def __init__(self, context: FrontContext) -> None:
        self._tokenizer = context.tokenizer
        self._vocab_size = context.vocab_size

    def process(self, item: ProcessedInput) -> None:
        """Turn the prompt into ids. Raises `RequestError` for a prompt that is none."""
        if item.token_ids is None:
            prompt = item.text if item.text is not None else _unwrap(item.prompt)
            if isinstance(prompt, str):
                item.text = prompt
                item.token_ids = self._encode(prompt, item)
            else:
                item.token_ids = _integers(prompt)
        self._check_range(item.token_ids)

    def _encode(self, text: str, item: ProcessedInput) -> list[int]:
        if not text:
            raise RequestError("the prompt is empty; it must hold at least one character", param="prompt")
        tokenizer = self._need_tokenizer()
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt holds half a surrogate pair at character {error.start}, which is no text: "
                f"{text[error.start]!r}",
                param="prompt",
            ) from None
        options = item.params.options
        ids = tokenizer.encode(
            text,
            add_special_tokens=options.get("add_special_tokens", not item.is_chat),
            parse_special=options.get("parse_special_tokens", item.is_chat),
        )
        if not ids:
            raise RequestError(f"the prompt {text!r:.100} gives no token at all", param="prompt")
        return ids

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                "this model has no tokenizer, so a prompt cannot be text; give prompt_token_ids",
                param="prompt",
            )
        return self._tokenizer

    def _check_range(self, ids: Sequence[int]) -> None:
        if not ids:
            raise RequestError(
                "prompt_token_ids is empty; it must hold at least one id", param="prompt_token_ids"
            )
        if min(ids) >= 0 and max(ids) < self._vocab_size:
            return
        position = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < self._vocab_size)
        raise RequestError(
            f"token id {_short(ids[position])} at position {position} of the prompt is not in the model's "
            f"vocabulary; ids are from 0 to {self._vocab_size - 1}",
            param="prompt_token_ids",
        )


def _unwrap(prompt: Any) -> Any:
    """Return the text or the ids of a prompt."""
    if not isinstance(prompt, Mapping):
        if isinstance(prompt, (str, Sequence)) and not isinstance(prompt, (bytes, bytearray)):
            return prompt
        raise RequestError(
            "a prompt must be a text, a list of token ids, or a mapping with 'prompt' or 'prompt_token_ids', got "
            f"{type(prompt).__name__}",
            param="prompt",
        )
    for key in prompt:
        if key not in _KEYS:
            raise RequestError(
                f"a prompt has no key {key!r:.100}{nearest(str(key), _KEYS)}; known: {', '.join(_KEYS)}",
                param=str(key)[:100],
            )
    given = [key for key in _KEYS if key in prompt]
    if len(given) != 1:
        raise RequestError(
            f"a prompt needs exactly one of 'prompt' and 'prompt_token_ids', got {' and '.join(given) or 'neither'}",
            param="prompt",
        )
    value = prompt[given[0]]
    wanted = str if given[0] == "prompt" else Sequence
    if not isinstance(value, wanted) or (wanted is Sequence and isinstance(value, (str, bytes, bytearray))):
        words = "a text" if wanted is str else "a list of token ids"
        raise RequestError(f"{given[0]} must be {words}, got {type(value).__name__}", param=given[0])
    return value


def _integers(ids: Sequence[Any]) -> list[int]:
    """Return the ids as plain integers; `bool` is none."""
    if set(map(type, ids)) <= {int}:
        return list(ids)
    for position, token_id in enumerate(ids):
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise RequestError(
                f"a token id must be an integer, got {token_id!r:.100} at position {position} of the prompt",
                param="prompt_token_ids",
            )
    return [int(token_id) for token_id in ids]


def _short(number: int) -> str:
    """Return a number for a message, without writing out one of a thousand digits."""
    return str(number) if number.bit_length() <= 128 else f"of {number.bit_length()} bits"
