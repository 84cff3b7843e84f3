"""Beam search: its rules on made-up models, and its answers and scores beside transformers' on the real one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from headrace import LLM, BeamSearchParams, RequestOutput, SamplingParams
from headrace.beams.search import Beam, BeamSearch
from headrace.core.errors import RequestError
from headrace.outputs import Logprob

V, EOS = 4, 3


class Table:
    """A made-up model: a distribution a beginning, the same in every run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        rng = np.random.default_rng([self._seed, *token_ids])
        logits = rng.normal(size=V) * 2
        return list(logits - np.log(np.exp(logits).sum()))

    def likeliest(self, token_ids: Sequence[int], count: int) -> dict[int, Logprob]:
        values = self.logprobs(token_ids)
        order = sorted(range(V), key=lambda i: -values[i])[:count]
        return {i: Logprob(values[i], rank, None) for rank, i in enumerate(order, start=1)}

    def score(self, token_ids: Sequence[int], params: BeamSearchParams) -> float:
        total = sum(self.logprobs(token_ids[:i])[token_id] for i, token_id in enumerate(token_ids))
        return total / len(token_ids) ** params.length_penalty


def search(table: Table, params: BeamSearchParams, max_tokens: int) -> list[Beam]:
    found = BeamSearch(params, max_tokens, [EOS])
    while not found.is_over:
        found.advance([table.likeliest(beam.token_ids, found.num_candidates) for beam in found.running])
    return found.results


def is_answer(ids: Sequence[int], length: int, ignore_eos: bool) -> bool:
    """Whether these tokens can be an answer of at most `length`."""
    if ignore_eos or EOS not in ids:
        return len(ids) == length
    return ids.index(EOS) == len(ids) - 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_wide_search_finds_the_best_of_all(seed: int, ignore_eos: bool) -> None:
    """Wide enough that nothing is dropped: every answer there is, in order."""
    length = 3
    params = BeamSearchParams(beam_width=V**length, length_penalty=0.7, ignore_eos=ignore_eos)
    table = Table(seed)
    every = [
        ids
        for n in range(1, length + 1)
        for ids in itertools.product(range(V), repeat=n)
        if is_answer(ids, length, ignore_eos)
    ]
    best = sorted(every, key=lambda ids: -table.score(ids, params))
    assert [beam.token_ids for beam in search(table, params, length)] == best


def test_a_width_of_one_is_greedy() -> None:
    for seed in range(10):
        table, params = Table(seed), BeamSearchParams(beam_width=1)
        (beam,) = search(table, params, 6)
        ids: list[int] = []
        while len(ids) < 6 and EOS not in ids:
            ids.append(next(iter(table.likeliest(ids, 1))))
        assert list(beam.token_ids) == ids
        assert beam.ended == (EOS in ids)


def test_results_are_in_order_of_score_and_ended_ones_end_once() -> None:
    for seed, penalty in itertools.product(range(10), (-1.0, 0.0, 0.6, 1.0, 3.0)):
        table, params = Table(seed), BeamSearchParams(beam_width=3, length_penalty=penalty)
        results = search(table, params, 5)
        scores = [table.score(beam.token_ids, params) for beam in results]
        assert scores == sorted(scores, reverse=True)
        assert len({beam.token_ids for beam in results}) == len(results) == 3
        for beam, score in zip(results, scores, strict=True):
            assert beam.ended == (beam.token_ids[-1] == EOS)
            assert is_answer(beam.token_ids, 5, False)
            assert params.score(beam.logprob, len(beam.token_ids)) == pytest.approx(score)


def test_a_large_length_penalty_favours_long_answers() -> None:
    def mean(penalty: float) -> float:
        params = BeamSearchParams(beam_width=2, length_penalty=penalty)
        found = [beam for seed in range(30) for beam in search(Table(seed), params, 6)]
        return sum(len(beam.token_ids) for beam in found) / len(found)

    assert mean(-2.0) < mean(3.0)


def test_several_end_tokens_leave_enough_to_go_on_with() -> None:
    found = BeamSearch(BeamSearchParams(beam_width=2), 4, [1, 2])
    assert found.num_candidates == 4
    found.advance([{1: Logprob(-0.5, 1, None), 2: Logprob(-1.0, 2, None), 0: Logprob(-3.0, 3, None)}])
    assert [beam.token_ids for beam in found.results] == [(1,), (2,)]
    assert found.is_over, "no running beam can reach the worst of these"


def test_what_cannot_be_drawn_is_not_followed() -> None:
    found = BeamSearch(BeamSearchParams(beam_width=2, ignore_eos=True), 3, [])
    found.advance(
        [{0: Logprob(-0.1, 1, None), 1: Logprob(-math.inf, 2, None), 2: Logprob(-math.inf, 3, None)}]
    )
    assert [beam.token_ids for beam in found.running] == [(0,)]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "beam_width: Field required"),
        ({"beam_width": 0}, "beam_width: .* greater than or equal to 1, got 0"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens: .* got 0"),
        ({"beam_width": 2, "temperature": 3.0}, "temperature"),
        ({"beam_width": 2, "length_penalty": 11.0}, "length_penalty"),
        ({"beam_width": 2, "length_penalty": math.nan}, "length_penalty"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p"),
        ({"beam_width": True}, "beam_width"),
    ],
    ids=str,
)
def test_parameters_that_are_wrong(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        BeamSearchParams(**fields)


# On the real model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", dtype="float32", max_model_len=256, show_report=False) as made:
        yield made


QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("The capital of France is", {"beam_width": 4, "max_tokens": 12}),
    (QUESTION, {"beam_width": 3, "max_tokens": 24}),
    ("Water is made of hydrogen and", {"beam_width": 5, "max_tokens": 10, "length_penalty": 0.3}),
]


def ids_of(llm: LLM, text: str) -> list[int]:
    assert llm.front.tokenizer is not None
    return llm.front.tokenizer.encode(text, add_special_tokens=False, parse_special=True)


def find(llm: LLM, prompt: Any, **fields: Any) -> RequestOutput:
    (output,) = llm.beam_search(prompt, BeamSearchParams(**fields), use_tqdm=False)
    assert output.finished
    assert [answer.index for answer in output.outputs] == list(range(fields["beam_width"]))
    return output


@pytest.mark.weights
@pytest.mark.parametrize(("text", "fields"), CASES, ids=["base", "chat", "penalty"])
def test_answers_and_scores_are_those_of_transformers(
    llm: LLM, oracle: Any, text: str, fields: dict[str, Any]
) -> None:
    params, ids = BeamSearchParams(**fields), ids_of(llm, text)
    end = llm.front.eos_token_ids[0]
    right = oracle.beams(ids, params.beam_width, params.max_tokens, end, params.length_penalty)
    output = find(llm, ids, **fields)
    for answer, (token_ids, score) in zip(output.outputs, right, strict=True):
        assert answer.cumulative_logprob is not None
        got = params.score(answer.cumulative_logprob, len(answer.token_ids))
        assert got == pytest.approx(score, abs=1e-4)
        assert answer.token_ids == token_ids
        assert answer.finish_reason == ("stop" if token_ids[-1] == end else "length")


@pytest.mark.weights
def test_several_prompts_side_by_side_are_as_each_alone(llm: LLM) -> None:
    prompts = ["The river", "A dog and", "One, two,"]
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    together = llm.beam_search(prompts, params, use_tqdm=False)
    assert [output.prompt for output in together] == prompts
    for output, prompt in zip(together, prompts, strict=True):
        alone = find(llm, prompt, beam_width=3, max_tokens=8)
        assert [a.token_ids for a in alone.outputs] == [a.token_ids for a in output.outputs]
    metrics = llm.metrics()
    assert metrics["kv_blocks_free"] == metrics["kv_blocks_total"]


@pytest.mark.weights
def test_the_end_token_is_stripped_from_the_text_and_kept_among_the_ids(llm: LLM) -> None:
    ids, end = ids_of(llm, QUESTION), llm.front.eos_token_ids[0]
    fields = {"beam_width": 3, "max_tokens": 24}
    shown = {
        tuple(answer.token_ids): answer.text
        for answer in find(llm, ids, include_stop_str_in_output=True, **fields).outputs
    }
    stopped = [answer for answer in find(llm, ids, **fields).outputs if answer.finish_reason == "stop"]
    assert stopped
    for answer in stopped:
        assert answer.token_ids[-1] == end
        assert "<|im_end|>" not in answer.text
        assert shown[tuple(answer.token_ids)] == answer.text + "<|im_end|>"
    ignoring = find(llm, ids, ignore_eos=True, **fields)
    assert all(len(answer.token_ids) == 24 for answer in ignoring.outputs)


@pytest.mark.weights
def test_a_width_of_one_is_what_greedy_gives(llm: LLM) -> None:
    (beam,) = find(llm, "The moon is", beam_width=1, max_tokens=10, logprobs=2).outputs
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=2)
    (greedy,) = llm.generate("The moon is", params, use_tqdm=False)[0].outputs
    assert (beam.token_ids, beam.text) == (greedy.token_ids, greedy.text)
    assert beam.cumulative_logprob == pytest.approx(greedy.cumulative_logprob, abs=1e-4)
    assert [list(entry) for entry in beam.logprobs or []] == [list(entry) for entry in greedy.logprobs or []]
    assert find(llm, "The moon is", beam_width=1, max_tokens=2).outputs[0].logprobs is None


@pytest.mark.weights
def test_temperature_changes_the_scores(llm: LLM) -> None:
    cold, own, warm, hot = (
        find(llm, "The moon is", beam_width=2, max_tokens=4, temperature=t).outputs[0].cumulative_logprob
        or 0.0
        for t in (0.5, 0.0, 1.0, 2.0)
    )
    assert own == pytest.approx(warm, abs=1e-4)
    assert cold > warm > hot


@pytest.mark.weights
def test_the_context_ends_a_search_and_a_wide_one_is_refused(llm: LLM) -> None:
    output = find(llm, [300] * 250, beam_width=2, max_tokens=None, ignore_eos=True)
    assert [len(answer.token_ids) for answer in output.outputs] == [6, 6]
    with pytest.raises(
        RequestError, match=r"beam_width 30 .* looks at 31 candidates .* at most 20"
    ) as caught:
        llm.beam_search("a", BeamSearchParams(beam_width=30))
    assert caught.value.param == "beam_width"
    with pytest.raises(RequestError, match="empty"):
        llm.beam_search(["a", ""], BeamSearchParams(beam_width=2))
