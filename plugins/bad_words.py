"""`bad_words`: texts that an answer must not hold.

The front end turns each word into token sequences, one as it stands at the beginning of a text and one as it stands
behind a space. Where an answer ends in all of a sequence but its last token, that token cannot be drawn. What the
sequence shares with other words stays possible, and so does another spelling: upper and lower case differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from headrace.core.errors import RequestError
from headrace.core.plugin.hookspecs import hookimpl
from headrace.core.stash import StashKey

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from headrace.core.interfaces import LogitsProcessor, LogitsRow, ProcessedInput, Tokenizer
    from headrace.core.interfaces.build import FrontContext
    from headrace.core.plugin.registry import Registrar
    from headrace.core.sampling_params import SamplingParams

__all__ = ["SEQUENCES", "BadWords", "WordTokens", "bad_words", "headrace_api", "headrace_register", "name"]

name = "bad_words"
headrace_api = ">=1,<2"

MAX_SEQUENCES = 128
MAX_CHARACTERS = 1000


def _text(word: str) -> str:
    try:
        word.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"holds half a surrogate pair at character {error.start}, which is no text"
        ) from None
    return word


Word = Annotated[
    str, StringConstraints(strict=True, min_length=1, max_length=MAX_CHARACTERS), AfterValidator(_text)
]
BadWords = Annotated[list[Word], Field(max_length=MAX_SEQUENCES)]
"""The request option."""

SEQUENCES: StashKey[list[list[int]]] = StashKey("bad_words/sequences", list[list[int]], direction="request")


class WordTokens:
    """Input processor: words become token sequences."""

    name = "bad_words"

    def __init__(self, context: FrontContext) -> None:
        self._tokenizer = context.tokenizer
        self._vocab_size = context.vocab_size

    def process(self, item: ProcessedInput) -> None:
        """Fill the stash. Raises `RequestError` without a tokenizer, and for too many sequences."""
        words = item.params.options.get(name)
        if not words:
            return
        if self._tokenizer is None:
            raise RequestError(
                "bad_words: this model has no tokenizer, so words cannot be told from its tokens; use logit_bias",
                param=name,
            )
        sequences = list(dict.fromkeys(self._sequences(self._tokenizer, words)))
        if len(sequences) > MAX_SEQUENCES:
            raise RequestError(
                f"bad_words: the {len(words)} words are {len(sequences)} token sequences (with a space before them "
                f"and without), at most {MAX_SEQUENCES} are allowed; leave some out",
                param=name,
            )
        item.stash[SEQUENCES] = [list(sequence) for sequence in sequences]

    def _sequences(self, tokenizer: Tokenizer, words: list[str]) -> Iterator[tuple[int, ...]]:
        for word in words:
            bare = word.lstrip(" ")
            for text in (bare, " " + bare) if bare else (word,):
                ids = tuple(tokenizer.encode(text, add_special_tokens=False, parse_special=False))
                # A tokenizer may know more ids than the model has rows for; those cannot be drawn anyway.
                if ids and max(ids) < self._vocab_size:
                    yield ids


def bad_words(params: SamplingParams) -> LogitsProcessor | None:
    """Return the processor, or None without words."""
    if not params.options.get(name):
        return None

    def process(row: LogitsRow, logits: torch.Tensor) -> torch.Tensor:
        sequences = row.stash.get(SEQUENCES) or []
        longest = max(map(len, sequences), default=1)
        # What was generated last, as far as a sequence may reach back. Prompts may hold what they like.
        first = max(row.num_prompt_tokens, row.position - longest + 1)
        recent = [int(token_id) for token_id in row.tokens[first : row.position]]
        banned = [ids[-1] for ids in sequences if len(ids) == 1 or recent[1 - len(ids) :] == ids[:-1]]
        logits[banned] = float("-inf")
        return logits

    return process


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the option, both halves and what travels between them."""
    registrar.request_option(name, BadWords)
    registrar.stash_key(SEQUENCES)
    registrar.input_processor(name, WordTokens)
    registrar.logits_processor(name, bad_words)
