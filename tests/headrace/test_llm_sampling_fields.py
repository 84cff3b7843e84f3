"""Masks, processors and log-probabilities on the real model, in every mode of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace import LLM, CompletionOutput, SamplingParams
from headrace.core.errors import RequestError

pytestmark = pytest.mark.weights


PLUGIN = '''
from pydantic import BaseModel

from headrace import hookimpl

name = "banning"
headrace_api = ">=1,<2"


class Ban(BaseModel):
    token_ids: list[int]


def banning(params, parameters):
    """Ban tokens, of those named, that were generated already."""

    def process(row, logits):
        own = {int(token_id) for token_id in row.tokens[row.num_prompt_tokens :]}
        logits[[token_id for token_id in parameters.token_ids if token_id in own]] = float("-inf")
        return logits

    return process


@hookimpl
def headrace_register(registrar):
    registrar.logits_processor("banning", banning, parameters=Ban)
'''


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    """Starts engines that have the plugin above."""
    path = tmp_path_factory.mktemp("plugins") / "banning.py"
    path.write_text(PLUGIN)

    def start(**options: Any) -> LLM:
        fixed = {"dtype": "float32", "max_model_len": 256, "show_report": False}
        return LLM("smollm2", plugin_files=[str(path)], **fixed, **options)

    return start


@pytest.fixture(scope="module")
def llm(make: Callable[..., LLM]) -> Iterator[LLM]:
    with make() as made:
        yield made


def run(llm: LLM, prompt: Any, **params: Any) -> CompletionOutput:
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]


def test_penalties_in_what_is_told(llm: LLM) -> None:
    """A prompt of 20 times one id. Sources: vllm-project/vllm-metal#69, NVIDIA/TensorRT-LLM#5623."""
    prompt, token = [260] * 20, 260

    def first(**fields: Any) -> dict[int, float]:
        told = {"logprobs": 5, "logprob_token_ids": [token], "logprobs_mode": "processed_logprobs"}
        entry = run(llm, prompt, temperature=0, max_tokens=1, **told, **fields).logprobs
        assert entry is not None
        return {token_id: one.logprob for token_id, one in entry[0].items()}

    plain = first()
    assert first(frequency_penalty=2.0) == plain
    assert first(presence_penalty=2.0) == plain
    assert first(repetition_penalty=1.5)[token] < plain[token]


def test_raw_logprobs_know_nothing_of_masks(llm: LLM) -> None:
    plain = run(llm, "The sea is", temperature=0, max_tokens=1, logprobs=3).logprobs
    assert plain is not None
    best = next(iter(plain[0]))
    banned = run(llm, "The sea is", temperature=0, max_tokens=1, logprobs=3, logit_bias={best: -100}).logprobs
    assert banned is not None
    assert banned[0][best] == plain[0][best]
    assert next(iter(banned[0])) != best


def test_words_are_absent_and_a_beginning_they_share_is_not(llm: LLM) -> None:
    prompt = "The capital of France is"
    plain = run(llm, prompt, temperature=0, max_tokens=20, ignore_eos=True)
    tokenizer = llm.front.tokenizer
    assert tokenizer is not None
    shares = [tokenizer.token_bytes(token).decode() for token in plain.token_ids]
    pair = shares[0] + shares[1]
    banned = run(llm, prompt, temperature=0, max_tokens=20, ignore_eos=True, bad_words=[pair.strip()])
    assert pair.strip() not in banned.text
    assert banned.token_ids[0] == plain.token_ids[0]
    assert banned.token_ids[1] != plain.token_ids[1]
    drawn = [
        run(llm, prompt, seed=i, temperature=1.3, max_tokens=20, bad_words=["Paris", "the"]).text
        for i in range(4)
    ]
    for text in drawn:
        assert not {"Paris", "the"} & set(text.replace(".", " ").replace(",", " ").split())


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 32, "max_num_seqs": 4},
        {"num_kv_blocks": 20},
        {"engine_process": True},
        {"speculative": {"method": "ngram", "num_speculative_tokens": 4}},
    ],
    ids=str,
)
def test_the_same_answers_in_every_mode(llm: LLM, make: Callable[..., LLM], options: dict[str, Any]) -> None:
    """Chunks, preemption, another process, drafts: masks, processors and biases are functions of the tokens."""
    allowed = list(range(200, 3000))
    fields: list[dict[str, Any]] = [
        {"allowed_token_ids": allowed},
        {"bad_words": ["the", "and", "one two"], "temperature": 1.0},
        {"processors": {"banning": {"token_ids": allowed}}},
        {"allowed_token_ids": allowed, "bad_words": ["of"], "frequency_penalty": 0.5, "min_tokens": 30},
        {"processors": {"banning": {"token_ids": [260, 284, 253]}}, "logit_bias": {260: 4.0}, "min_p": 0.02},
        {"logprob_token_ids": [5, 260], "logprobs": 2, "logprobs_mode": "processed_logprobs", "top_k": 7},
    ]
    prompts = [[i * 13 + 300 + j for j in range(40 + 5 * i)] for i in range(len(fields))]
    params = [
        SamplingParams(**{"seed": i, "temperature": 0.8, "max_tokens": 40, "ignore_eos": True, **own})
        for i, own in enumerate(fields)
    ]
    right = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    with make(**options) as other:
        got = [output.outputs[0] for output in other.generate(prompts, params, use_tqdm=False)]
        if "num_kv_blocks" in options:
            assert other.metrics()["num_preemptions"] > 0
        if "speculative" in options:
            assert other.metrics()["spec_decode_num_draft_tokens"] > 0
    assert [one.token_ids for one in got] == [one.token_ids for one in right]
    assert got[5].logprobs == right[5].logprobs
    assert set(right[0].token_ids) <= set(allowed)
    assert len(set(right[2].token_ids) & set(allowed)) == sum(
        token in allowed for token in right[2].token_ids
    )


def test_processors_that_are_not_there(llm: LLM) -> None:
    with pytest.raises(RequestError, match="there are: banning"):
        run(llm, "a", processors={"other": {}})
    with pytest.raises(RequestError, match=r"processors\.banning\.token_ids: Field required"):
        run(llm, "a", processors={"banning": {}})


def test_masks_that_leave_nothing_fail_their_request_alone(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=[5], stop_token_ids=[5], min_tokens=2),
        SamplingParams(temperature=0, max_tokens=3),
    ]
    failed, good = llm.generate(["a", "a"], params, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert "leave none of the vocabulary" in (failed.error or "")
    assert good.outputs[0].finish_reason == "length"
