"""Which log-probabilities are told: the model's own or those drawn from, normalised or as they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from headrace.core.interfaces import LogitsRow
from headrace.core.logprobs import TokenLogprobs
from headrace.core.plan import NewRequest
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.executors.candidates import drawn_from, kept_candidates
from headrace.executors.sampler import Sampler
from headrace.plugins.logit_bias import logit_bias
from headrace.plugins.penalties import penalties

V = 200
FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.7},
    {"temperature": 0.5, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "top_k": 1},
]


def told(
    logits: torch.Tensor, params: list[SamplingParams], mode: Any = "raw_logprobs"
) -> list[TokenLogprobs]:
    processors = [("logit_bias", logit_bias, "p"), ("penalties", penalties, "p")]
    sampler = Sampler(processors, [], logits.shape[1], logprobs_mode=mode)
    rows = []
    for i, one in enumerate(params):
        request = NewRequest(
            request_id=f"r{i}", token_ids=[1, 2, 3], num_prompt_tokens=2, params=one, start=0, count=3,
            block_ids=[[1]],
        )  # fmt: skip
        sampler.add(request)
        rows.append(LogitsRow(f"r{i}", one, Stash(), 2, 3, [1, 2, 3], 3))
    results = sampler.sample(rows, logits.clone())
    assert all(result.error is None and result.logprobs is not None for result in results)
    assert all(result.logprobs.token_ids[0] == result.token_id for result in results if result.logprobs)
    return [result.logprobs for result in results if result.logprobs is not None]


def make_logits(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(7)) * 2


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_processed_are_those_drawn_from(filters: dict[str, Any]) -> None:
    """Bias, penalty, temperature and filters enter; what cannot be drawn has -inf."""
    logits = make_logits()
    changed = logits[0].clone()
    changed[[4, 9]] += torch.tensor([3.0, -100.0])
    changed[3] -= 1.5 + 0.5
    params = SamplingParams(
        seed=1,
        logprobs=-1,
        logit_bias={4: 3.0, 9: -100.0},
        presence_penalty=1.5,
        frequency_penalty=0.5,
        **filters,
    )
    kept = kept_candidates(changed.numpy(), params)[0] if params.temperature else torch.arange(V).numpy()
    right = torch.full((V,), -math.inf, dtype=torch.float64)
    scaled = changed.double() / (params.temperature or 1.0)
    right[kept] = scaled[kept]
    for mode, values in (("processed_logprobs", right.log_softmax(-1)), ("processed_logits", right)):
        (entry,) = told(logits, [params], mode)
        got = dict(zip(entry.token_ids, entry.logprobs, strict=True))
        assert [got[i] for i in range(V)] == pytest.approx(values.tolist(), abs=1e-5)
        assert entry.rank == 1 + int((right > right[entry.token_ids[0]]).sum())


def test_raw_are_the_models_own_whatever_is_asked_for() -> None:
    logits = make_logits(len(FILTERS))
    params = [
        SamplingParams(seed=i, logprobs=3, logit_bias={5: 50.0}, **filters)
        for i, filters in enumerate(FILTERS)
    ]
    for mode, values in (("raw_logprobs", logits.double().log_softmax(-1)), ("raw_logits", logits)):
        for i, entry in enumerate(told(logits, params, mode)):
            assert entry.token_ids[1:] == logits[i].topk(3).indices.tolist()
            assert entry.logprobs == pytest.approx(values[i][entry.token_ids].tolist(), abs=1e-9)


def test_a_request_may_choose_and_rows_of_all_modes_stand_beside_each_other() -> None:
    modes = ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits", None]
    logits = make_logits(len(modes))
    params = [
        SamplingParams(seed=3, top_k=5, logit_bias={7: 4.0}, logprobs=6, logprobs_mode=mode) for mode in modes
    ]
    for default in modes[:4]:
        together = told(logits, params, default)
        for i, mode in enumerate(modes):
            plain = params[i].model_copy(update={"logprobs_mode": None})
            assert together[i] == told(logits[i : i + 1], [plain], mode or default)[0]


def test_a_forced_token_in_processed_logprobs() -> None:
    logits = torch.zeros(V)
    logits[[3, 8]] = math.inf
    for temperature in (0.0, 0.7):
        scores = drawn_from(logits.numpy(), SamplingParams(temperature=temperature))
        assert {i for i in range(V) if scores[i] == 0} == {3, 8}
        assert {float(score) for score in scores} == {0.0, -math.inf}


def test_ids_asked_for_are_told_in_every_mode() -> None:
    """Beside the likeliest ones, of the same values, with their own ranks; `logprobs` is 0 without a number."""
    logits = make_logits()
    params = SamplingParams(seed=1, top_k=4, logprob_token_ids=[11, 150, 3])
    assert params.logprobs == 0
    everything = params.model_copy(update={"logprobs": -1, "logprob_token_ids": None})
    for mode in ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"):
        (entry,), (right,) = told(logits, [params], mode), told(logits, [everything], mode)
        assert len(entry.token_ids) == 1
        ranked = dict(zip(right.token_ids[1:], right.logprobs[1:], strict=True))
        assert [one[0] for one in entry.more] == [11, 150, 3]
        for token_id, value, rank in entry.more:
            assert value == ranked[token_id]
            assert rank == list(ranked).index(token_id) + 1


def test_rows_with_and_without_ids_do_not_mix() -> None:
    logits = make_logits(3)
    params = [
        SamplingParams(seed=1, logprobs=2, logprob_token_ids=[5]),
        SamplingParams(seed=1, logprobs=2),
        SamplingParams(seed=1, logprobs=2, logprob_token_ids=[9, 5]),
    ]
    together = told(logits, params)
    assert together == [told(logits[i : i + 1], [one])[0] for i, one in enumerate(params)]
    assert [len(entry.more) for entry in together] == [1, 0, 2]
