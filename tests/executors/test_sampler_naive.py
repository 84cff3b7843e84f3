"""The whole way from a row of logits to a token against plain Python: each field alone, and every two together."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.backends.cpu.ops import CpuOps
from headrace.builtin import BUILTIN
from headrace.core.interfaces import LogitsRow
from headrace.core.plan import NewRequest
from headrace.core.plugin.registry import Registrar, Registry
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.executors.noise import Purpose, gumbel
from headrace.executors.sampler import Sampled, Sampler, SamplingOps
from headrace.plugins import allowed_token_ids, bad_words, logit_bias, min_tokens, penalties

V = 96
EOS = 2
PROMPT = 4
SEQUENCES = [[7], [11, 12], [13, 14, 15]]
FIELDS: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": [EOS, *range(5, 60, 3), 7, 12, 15, 61]},
    "bad_words": {"bad_words": ["as in SEQUENCES"]},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": [5, 61], "max_tokens": 64},
    "logit_bias": {"logit_bias": {EOS: 3.0, 5: 5.5, 7: 100.0, 12: 4.0, 14: -100.0, 15: 2.5, 95: 1.25}},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": -1.5},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.6},
    "top_k": {"top_k": 11},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.08},
}
PAIRS = [(name,) for name in FIELDS] + list(itertools.combinations(FIELDS, 2))


def naive_logits(logits: Sequence[float], params: SamplingParams, tokens: list[int]) -> list[float]:
    """What processors leave of a row, token by token, each step rounded to float32."""
    output = tokens[PROMPT:]
    allowed = params.options.get("allowed_token_ids")
    result = []
    for i, value in enumerate(logits):
        x = np.float32(value)
        if allowed is not None and i not in allowed:
            x = np.float32(-math.inf)
        for ids in SEQUENCES if params.options.get("bad_words") else []:
            before = ids[:-1]
            if ids[-1] == i and output[len(output) - len(before) :] == before:
                x = np.float32(-math.inf)
        if len(output) < params.min_tokens and i in (EOS, *params.stop_token_ids):
            x = np.float32(-math.inf)
        x += np.float32((params.logit_bias or {}).get(i, 0.0))
        if i in tokens:
            r = np.float32(params.repetition_penalty)
            x = x / r if x > 0 else x * r
        count = output.count(i)
        if count:
            x -= np.float32(params.frequency_penalty) * np.float32(count) + np.float32(
                params.presence_penalty
            )
        result.append(float(x))
    return result


def naive_token(logits: Sequence[float], params: SamplingParams, position: int) -> int:
    """The token drawn from what processors left."""
    best = max(logits)
    if params.temperature == 0:
        return list(logits).index(best)
    scores = {i: (x - best) / params.temperature for i, x in enumerate(logits) if x > -math.inf}
    kept = [i for i in scores if params.min_p == 0 or scores[i] >= math.log(params.min_p)]
    kept.sort(key=lambda i: (-scores[i], i))
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, mass, nucleus = sum(math.exp(scores[i]) for i in kept), 0.0, []
    for i in kept:
        if params.top_p < 1 and mass >= params.top_p * total:
            break
        nucleus.append(i)
        mass += math.exp(scores[i])
    assert params.seed is not None
    noise = gumbel(params.seed, position, Purpose.TOKEN, np.arange(len(logits)))
    return min(nucleus, key=lambda i: (-(scores[i] + noise[i]), i))


def registry() -> Registry:
    made = Registry()
    for plugin in (allowed_token_ids, bad_words, min_tokens, logit_bias, penalties):
        plugin.headrace_register(Registrar(made, plugin.name), None)  # type: ignore[attr-defined]
    return made


def make_stash() -> Stash:
    stash = Stash()
    stash[bad_words.SEQUENCES] = SEQUENCES
    stash[min_tokens.EOS_TOKEN_IDS] = [EOS]
    return stash


def sample(
    rows: list[LogitsRow], logits: torch.Tensor, ops: SamplingOps | None, seen: list[Any]
) -> list[Sampled]:
    """Sample with the built-in processors, and one behind them that looks at what they leave."""

    def look(row: LogitsRow, own: torch.Tensor) -> torch.Tensor:
        seen.append((row.request_id, own.tolist()))
        return own

    built_in = [(entry.name, entry.factory, entry.plugin) for entry in registry().entries("logits_processor")]
    sampler = Sampler([*built_in, ("look", lambda params: look, "test")], [], V, ops)
    for row in rows:
        request = NewRequest(
            request_id=row.request_id, token_ids=list(row.tokens), num_prompt_tokens=PROMPT, params=row.params,
            start=0, count=1, block_ids=[[1]], stash=row.stash,
        )  # fmt: skip
        sampler.add(request)
    return sampler.sample(rows, logits.clone())


def make_rows(names: tuple[str, ...], seed: int = 0) -> list[LogitsRow]:
    """Rows behind answers of different lengths, some of them ending in parts of bad words; some check drafts."""
    fields: dict[str, Any] = {name: value for field in names for name, value in FIELDS[field].items()}
    rng = random.Random(0)
    outputs = [
        [],
        [11],
        [13, 14],
        [14],
        [13, 14, 15, 11],
        [12, 12, 12, 12, 5],
        [7, 5, 5, 5, EOS, EOS, 15],
        *([rng.randrange(V) for _ in range(length)] for length in range(9)),
    ]
    rows = []
    for i, output in enumerate(outputs):
        tokens = [3, 11, 61, i, *output]
        params = SamplingParams(**{"seed": seed + i * 1000 - 5, **fields})
        confirmed = len(tokens) - (i % 3 if len(output) > 3 else 0)
        rows.append(LogitsRow(f"r{i}", params, make_stash(), PROMPT, len(tokens), tokens, confirmed))
    return rows


def make_logits(count: int) -> torch.Tensor:
    """Random ones, in which the tokens that fields speak of are often among the likeliest; one row has ties."""
    logits = torch.randn(count, V, generator=torch.Generator().manual_seed(1)) * 2.5
    logits[:, [EOS, 5, 7, 12, 15]] += 4.5
    logits[2] = logits[2].round()
    return logits


@pytest.fixture(scope="module")
def native() -> SamplingOps:
    found = CpuOps()
    draw, score = found.get("draw"), found.get("score")
    assert draw is not None
    assert score is not None
    return SamplingOps(draw.fn, score.fn)


@pytest.mark.parametrize("names", PAIRS, ids=", ".join)
def test_equals_plain_python(names: tuple[str, ...], native: SamplingOps) -> None:
    if names == ("greedy", "temperature"):
        names = ("temperature", "greedy")  # the later one is meant
    rows = make_rows(names)
    logits = make_logits(len(rows))
    right_logits = [
        naive_logits(own.tolist(), row.params, list(row.tokens))
        for own, row in zip(logits, rows, strict=True)
    ]
    right = [naive_token(own, row.params, row.position) for own, row in zip(right_logits, rows, strict=True)]
    for ops in (None, native):
        seen: list[Any] = []
        sampled = sample(rows, logits, ops, seen)
        assert [one.error for one in sampled] == [None] * len(rows)
        assert [own for _, own in seen] == right_logits
        assert [one.token_id for one in sampled] == right


def test_the_rows_bring_every_field_to_bear() -> None:
    """Each field changes the token of some row, or the test above would say nothing of it."""

    def tokens(*names: str) -> list[int]:
        rows = [row for seed in range(4) for row in make_rows(names, seed)]
        logits = make_logits(len(rows) // 4).repeat(4, 1)
        return [one.token_id for one in sample(rows, logits, None, [])]

    plain = tokens()
    assert [name for name in FIELDS if tokens(name) == plain] == []


def test_the_order_is_that_of_the_page() -> None:
    """Processors of the built-in plugins in order of registration, then what `naive_token` applies, step by step."""
    page = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()
    table = re.findall(r"^\| \d+ \| (`.*?)?\|", page, re.MULTILINE)
    documented = re.findall(r"\w+", " ".join(table))
    processors = [
        "allowed_token_ids", "bad_words", "min_tokens", "logit_bias",
        "repetition_penalty", "frequency_penalty", "presence_penalty",
    ]  # fmt: skip
    drawing = ["temperature", "min_p", "top_k", "top_p", "seed"]
    assert documented == ["logprobs", *processors, "processors", *drawing, "logprobs"]
    plugins = [name.rpartition(".")[2] for name in BUILTIN]
    places = [plugins.index(name) for name in (*processors[:4], "penalties")]
    assert places == sorted(places)
