"""The requests of a benchmark: read from a file, or made up from lengths and a seed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError

__all__ = [
    "BenchRequest",
    "Conversation",
    "prefix_repetition_requests",
    "random_requests",
    "read_sharegpt",
    "read_workload",
    "sharegpt_requests",
]

SHAREGPT_MIN_TOKENS = 4
SHAREGPT_MAX_PROMPT = 1024
SHAREGPT_MAX_TOTAL = 2048
"""Tokens; conversations outside of these are passed over, as vLLM's benchmark does."""


@dataclass(frozen=True)
class BenchRequest:
    """A prompt, and how many tokens to generate: exactly so many, since end tokens are ignored."""

    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Conversation:
    """The first turn of a ShareGPT conversation and the answer to it."""

    prompt: str
    answer: str


def read_workload(path: Path) -> list[BenchRequest]:
    """Read a JSON list of `{"prompt_ids": [...], "max_tokens": N}`. Raises `ConfigError`."""
    requests = []
    for index, item in enumerate(_read_list(path)):
        ids, count = _fields(item, "prompt_ids", "max_tokens")
        if not _are_ids(ids) or not isinstance(count, int) or count < 1:
            raise _wrong(
                path,
                f"entry {index} is {item!r:.100}; each must be an object with prompt_ids, a list of token ids, and "
                "max_tokens, at least 1 (a ShareGPT file needs --dataset-name sharegpt)",
            )
        requests.append(BenchRequest(ids, count))
    return requests


def read_sharegpt(path: Path) -> list[Conversation]:
    """Read a JSON list of `{"conversations": [{"value": text}, ...]}`; those of one turn are left out.

    Raises `ConfigError`.
    """
    conversations = []
    for index, item in enumerate(_read_list(path)):
        (turns,) = _fields(item, "conversations")
        if not isinstance(turns, list):
            raise _wrong(
                path,
                f"entry {index} is {item!r:.100}; each must be an object with conversations, a list of turns (a file "
                "of token ids needs --dataset-name workload)",
            )
        if len(turns) < 2:
            continue
        values = [value for turn in turns[:2] for value in _fields(turn, "value")]
        if not all(isinstance(value, str) for value in values):
            raise _wrong(
                path, f"entry {index}: the first two turns must have a text as value, got {values!r:.100}"
            )
        conversations.append(Conversation(*values))
    return conversations


def sharegpt_requests(
    conversations: Sequence[Conversation],
    encode: Callable[[str], list[int]],
    *,
    num_prompts: int | None = None,
    seed: int = 0,
    output_len: int | None = None,
) -> list[BenchRequest]:
    """Return requests in an order drawn by `seed`; those too short or too long are passed over.

    num_prompts: at most so many; None: all.
    output_len: tokens to generate; None: as many as the answer in the file has.
    """
    order = list(conversations)
    random.Random(seed).shuffle(order)
    requests: list[BenchRequest] = []
    for conversation in order:
        if len(requests) == num_prompts:
            break
        if not conversation.prompt or not conversation.answer:
            continue
        ids = encode(conversation.prompt)
        count = output_len or len(encode(conversation.answer))
        fits = len(ids) <= SHAREGPT_MAX_PROMPT and len(ids) + count <= SHAREGPT_MAX_TOTAL
        if fits and len(ids) >= SHAREGPT_MIN_TOKENS and (output_len or count >= SHAREGPT_MIN_TOKENS):
            requests.append(BenchRequest(ids, count))
    return requests


def random_requests(
    num_prompts: int,
    vocab: Sequence[int],
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> list[BenchRequest]:
    """Return prompts of random ids of `vocab`.

    range_ratio: lengths are drawn from [length * (1 - ratio), length * (1 + ratio)], both of prompt and output.
    prefix_len: random tokens that all prompts begin with, beside `input_len`.
    """
    draw = random.Random(seed)
    prefix = draw.choices(vocab, k=prefix_len)
    return [
        BenchRequest(
            prefix + draw.choices(vocab, k=_length(draw, input_len, range_ratio)),
            _length(draw, output_len, range_ratio),
        )
        for _ in range(num_prompts)
    ]


def prefix_repetition_requests(
    num_prompts: int,
    vocab: Sequence[int],
    *,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
    seed: int = 0,
) -> list[BenchRequest]:
    """Return prompts that share prefixes: `num_prompts // num_prefixes` for each of the prefixes, shuffled."""
    draw = random.Random(seed)
    requests = []
    for _ in range(num_prefixes):
        prefix = draw.choices(vocab, k=prefix_len)
        for _ in range(num_prompts // num_prefixes):
            requests.append(BenchRequest(prefix + draw.choices(vocab, k=suffix_len), output_len))
    draw.shuffle(requests)
    return requests


def _length(draw: random.Random, mean: int, ratio: float) -> int:
    return max(1, draw.randint(math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))))


def _read_list(path: Path) -> list[Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(path, f"it cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _wrong(path, f"it is not JSON: {error}") from None
    if not isinstance(content, list) or not content:
        raise _wrong(path, f"it must be a JSON list with at least one entry, got {content!r:.100}")
    return content


def _wrong(path: Path, why: str) -> ConfigError:
    return ConfigError(f"--dataset-path {path}: {why}", option="dataset_path")


def _fields(item: Any, *names: str) -> list[Any]:
    """Return an object's fields; None for one that is not there, or for what is no object."""
    return [item.get(name) if isinstance(item, dict) else None for name in names]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
