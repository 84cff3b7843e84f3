"""A workload as prompts that a server takes: token ids or text, made with the server's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.bench.datasets import MADE_UP, Dataset, Vocabulary
from headrace.bench.measure import check_lengths
from headrace.bench.payloads import API, Prompt
from headrace.bench.remote import Server, text_ids
from headrace.bench.workloads import BenchRequest

__all__ = ["Target", "make_requests", "to_prompts", "warm_up_requests"]


@dataclass(frozen=True)
class Target:
    """What is asked, and by which API."""

    server: Server
    api: API
    model: str
    max_model_len: int | None = None
    """The most tokens of a request, where the server says so."""


def make_requests(
    dataset: Dataset, target: Target, *, random_vocab_size: int | None = None
) -> list[BenchRequest]:
    """Make a workload for a served model. The server is asked only where the workload needs its tokenizer.

    random_vocab_size: made-up prompts are drawn from the ids below it; None: from ids that the server's tokenizer
        gives for made-up words.
    Raises `ConfigError`, for requests that are too long, too.
    """
    ids: Sequence[int] = range(random_vocab_size or 0)
    if dataset.name in MADE_UP and random_vocab_size is None:
        ids = text_ids(target.server, target.model)
    requests = dataset.make(Vocabulary(ids, lambda text: target.server.encode(target.model, text)))
    if target.max_model_len is not None:
        check_lengths(requests, target.max_model_len)
    return requests


def to_prompts(requests: Sequence[BenchRequest], target: Target) -> list[Prompt]:
    """Return what is sent for requests; the server turns ids into text where the API takes text.

    Raises `ConfigError`.
    """
    prompts = []
    for request in requests:
        ids = request.prompt_token_ids
        content = target.server.decode(target.model, ids) if target.api.takes_text else ids
        prompts.append(Prompt(content, len(ids), request.max_tokens))
    return prompts


def warm_up_requests(requests: Sequence[BenchRequest], number: int) -> list[BenchRequest]:
    """Return requests as long as the first ones, but read backwards: they leave nothing of use in a prefix cache."""
    return [
        BenchRequest(request.prompt_token_ids[::-1], request.max_tokens)
        for request in (requests[index % len(requests)] for index in range(number))
    ]
