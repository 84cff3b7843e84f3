"""Structured answers on the real model, end to end: every form, alone and beside what else the engine does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from headrace import LLM, RequestOutput, SamplingParams, hookimpl
from headrace.core.errors import RequestError
from headrace.core.interfaces import KVCacheSpec, LogitsRow, Proposer, RunnerBatch
from headrace.core.plan import StepResult
from headrace.plugins.structured.runner import GrammarListener

pytestmark = pytest.mark.weights

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def make(**options: Any) -> LLM:
    return LLM("smollm2", **{"max_model_len": 512, "show_report": False, **options})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make(max_num_seqs=16) as made:
        yield made


def run(
    llm: LLM, form: Mapping[str, Any], prompt: str = "A person as JSON: ", **params: Any
) -> RequestOutput:
    given = {"temperature": 0, "max_tokens": 64, **params}
    (output,) = llm.generate(prompt, SamplingParams(structured=dict(form), **given), use_tqdm=False)
    return output


def text(llm: LLM, form: Mapping[str, Any], **params: Any) -> str:
    answer = run(llm, form, **params).outputs[0]
    assert answer.finish_reason == "stop", answer.error
    return answer.text


def many(llm: LLM, params: Sequence[SamplingParams], prompt: str = "A person as JSON: ") -> list[list[int]]:
    outputs = llm.generate([prompt] * len(params), list(params), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


# Each form ----------------------------------------------------------------------------------------------


def test_json(llm: LLM) -> None:
    for schema in (PERSON, json.dumps(PERSON)):
        jsonschema.validate(json.loads(text(llm, {"json": schema})), PERSON)
    assert isinstance(json.loads(text(llm, {"json_object": True}, max_tokens=200)), dict)


def test_regex_choice_and_grammar(llm: LLM) -> None:
    assert re.fullmatch(r"\d{3}-[a-z]{2}", text(llm, {"regex": r"\d{3}-[a-z]{2}"}))
    assert text(llm, {"choice": ["maybe so", "never"]}) in ("maybe so", "never")
    assert re.fullmatch("a[bc]{1,9}[.]", text(llm, {"grammar": 'start: "a" /[bc]{1,9}/ "."'}))


def test_a_choice_in_other_scripts_is_its_text(llm: LLM) -> None:
    """Source: waybarrios/vllm-mlx PR#109, PR#195."""
    wanted = "źdźbło 🙂 漢字 ďábel"
    assert text(llm, {"choice": [wanted]}) == wanted


def test_an_answer_ends_with_its_grammar_whatever_the_request_says(llm: LLM) -> None:
    answer = run(llm, {"regex": "[ab]{5}"}, ignore_eos=True, min_tokens=20).outputs[0]
    assert (answer.finish_reason, len(answer.text)) == ("stop", 5)
    open_ended = run(llm, {"regex": "a+"}, ignore_eos=True, logit_bias={2: 100}).outputs[0]
    assert open_ended.finish_reason == "stop"
    assert set(open_ended.text) == {"a"}


def test_a_whole_answer_of_max_tokens_stopped_and_a_cut_one_says_length(llm: LLM) -> None:
    whole = run(llm, {"json": PERSON}).outputs[0]
    exact = run(llm, {"json": PERSON}, max_tokens=len(whole.token_ids)).outputs[0]
    assert (exact.token_ids, exact.finish_reason) == (whole.token_ids, "stop")
    cut = run(llm, {"json": PERSON}, max_tokens=len(whole.token_ids) - 1).outputs[0]
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:-1], "length")


def test_raw_logprobs_stay_those_of_the_model(llm: LLM) -> None:
    """Source: vllm-project/vllm PR#4149."""
    plain = llm.generate("Is it?", SamplingParams(temperature=0, max_tokens=1, logprobs=3), use_tqdm=False)[0]
    bound = run(llm, {"choice": ["yes", "no"]}, prompt="Is it?", logprobs=3).outputs[0]
    assert bound.text in ("yes", "no")
    assert plain.outputs[0].logprobs is not None
    assert bound.logprobs is not None
    first = {one: value.logprob for one, value in bound.logprobs[0].items()}
    for one, value in plain.outputs[0].logprobs[0].items():
        assert first[one] == pytest.approx(value.logprob, abs=1e-4)
    assert all(value.logprob > float("-inf") for entry in bound.logprobs for value in entry.values())


def test_several_answers_each_keep_to_the_grammar(llm: LLM) -> None:
    output = run(llm, {"json": PERSON}, n=4, temperature=1, seed=5)
    assert len({answer.text for answer in output.outputs}) > 1
    for answer in output.outputs:
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), PERSON)


# What is wrong ------------------------------------------------------------------------------------------


def test_a_bad_grammar_fails_alone(llm: LLM) -> None:
    """Source: vllm-project/vllm#43920."""
    good = SamplingParams(temperature=0, max_tokens=20, structured={"json": PERSON})
    plain = SamplingParams(temperature=0, max_tokens=20)
    alone = many(llm, [good, plain])
    bad = SamplingParams(max_tokens=20, structured={"json": {"type": "whatever"}})
    outputs = llm.generate(["A person as JSON: "] * 3, [good, bad, plain], use_tqdm=False)
    failed = outputs[1].outputs[0]
    assert (failed.finish_reason, failed.error_kind) == ("error", "request")
    assert failed.error is not None
    assert "whatever" in failed.error
    assert [outputs[0].outputs[0].token_ids, outputs[2].outputs[0].token_ids] == alone


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"structured": {"json": {}, "regex": "a"}}, "exactly one"),
        ({"structured": {"no_such": 1}}, "no_such"),
        ({"structured": {"regex": ""}}, "is empty"),
        ({"structured": {"json_object": True}, "max_tokens": 0, "prompt_logprobs": 1}, "max_tokens 0"),
    ],
)
def test_what_is_plainly_wrong_is_refused_at_once(llm: LLM, params: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        llm.generate("x", SamplingParams(**params), use_tqdm=False)


def test_masks_that_exclude_each_other_fail_their_request(llm: LLM) -> None:
    (space,) = llm.generate(" ", SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids
    failed, plain = llm.generate(
        ["x", "x"],
        [
            SamplingParams(structured={"regex": r"\d+"}, allowed_token_ids=[space]),
            SamplingParams(max_tokens=3, ignore_eos=True),
        ],
        use_tqdm=False,
    )
    assert failed.outputs[0].error_kind == "request"
    assert "leave none of the vocabulary" in (failed.outputs[0].error or "")
    assert len(plain.outputs[0].token_ids) == 3


# Beside what else the engine does -----------------------------------------------------------------------

LONG = "This is a list of facts about people who live by the river, written as JSON. " * 4


def mixed() -> list[SamplingParams]:
    forms: list[dict[str, Any]] = [{"json": PERSON}, {"json_object": True}, {"regex": r"[a-z ]{30,60}\."}]
    return [
        SamplingParams(structured=form, temperature=temperature, seed=seed, max_tokens=40)
        for seed, form in enumerate(forms * 2)
        for temperature in (0.0, 1.0)
    ]


@pytest.fixture(scope="module")
def reference(llm: LLM) -> list[list[int]]:
    return [many(llm, [params], LONG)[0] for params in mixed()]


def test_neighbours_change_nothing(llm: LLM, reference: list[list[int]]) -> None:
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    alone = many(llm, [plain], LONG)
    assert many(llm, [*mixed(), plain], LONG) == reference + alone


def test_drawing_first_or_masking_first_changes_nothing(
    llm: LLM, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of what is drawn from need masks before the draw."""
    asked: list[int] = []
    refused: list[int] = []
    judge = GrammarListener.on_drawn

    def on_drawn(self: GrammarListener, rows: Sequence[LogitsRow], tokens: Sequence[int]) -> Sequence[int]:
        places = judge(self, rows, tokens)
        asked.extend(tokens)
        refused.extend(places)
        return places

    monkeypatch.setattr(GrammarListener, "on_drawn", on_drawn)
    whole = {"logprobs": 0, "logprobs_mode": "processed_logprobs"}
    masked = [params.model_copy(update=whole) for params in mixed()]
    assert many(llm, masked, LONG) == reference
    assert not asked
    assert many(llm, [*mixed(), *masked], LONG) == reference * 2
    assert len(asked) > 2 * len(refused) > 0


def test_chunks_and_preemption_change_nothing(reference: list[list[int]]) -> None:
    tight = {"num_kv_blocks": 11, "max_model_len": 160, "enable_prefix_caching": False}
    with make(max_num_batched_tokens=24, max_num_seqs=8, **tight) as llm:
        assert many(llm, mixed(), LONG) == reference
        assert llm.metrics()["num_preemptions"] > 0


class KnownDrafts(Proposer):
    """Drafts what the plain run said, with every fourth draft wrong."""

    name = "known"
    lookahead = 0
    taps = ()

    def __init__(self, known: Sequence[Sequence[int]]) -> None:
        self._known = known

    def kv_specs(self) -> Mapping[str, KVCacheSpec]:
        return {}

    def propose(
        self, batch: RunnerBatch, hidden: torch.Tensor, taps: Mapping[int, torch.Tensor], result: StepResult
    ) -> Mapping[str, Sequence[int]]:
        drafts = {}
        for row in batch.rows:
            confirmed = row.start + row.count - row.num_drafts
            said = [int(one) for one in row.tokens[row.num_prompt_tokens : confirmed]]
            said += result.requests[row.request_id].tokens
            for whole in self._known:
                if said and list(whole[: len(said)]) == said:
                    guess = list(whole[len(said) : len(said) + 3])
                    drafts[row.request_id] = [*guess[:2], 7, 7] if len(said) % 4 == 0 else [*guess, 7]
        return drafts


class DraftPlugin:
    name = "known_drafts"
    headrace_api = ">=1,<2"

    def __init__(self, known: Sequence[Sequence[int]]) -> None:
        self._known = known

    @hookimpl
    def headrace_register(self, registrar: Any, options: Any) -> None:
        registrar.proposer("known", lambda context: KnownDrafts(self._known))


def test_drafts_change_nothing(reference: list[list[int]]) -> None:
    with make(plugins=[DraftPlugin(reference)], num_kv_blocks=64, max_num_seqs=8) as llm:
        assert many(llm, mixed(), LONG) == reference


def test_drafts_behind_the_end_are_dropped() -> None:
    form = {"regex": "[ab]{6}"}
    with make() as llm:
        plain = run(llm, form, ignore_eos=True).outputs[0]
    with make(plugins=[DraftPlugin([[*plain.token_ids, 7, 7, 7]])]) as llm:
        drafted = run(llm, form, ignore_eos=True).outputs[0]
    assert (drafted.token_ids, drafted.finish_reason) == (plain.token_ids, "stop")


def test_a_form_may_begin_behind_ids_of_the_answer(llm: LLM) -> None:
    """As behind a model's thinking; and drafts that cross its beginning change nothing."""
    [stop] = llm.encode(".")
    form = {"regex": "[ab]{6}", "after_ids": [stop]}
    params = [SamplingParams(temperature=t, seed=3, max_tokens=40, structured=form) for t in (0, 0.7)]
    prompt = "The capital of France is"
    plain = llm.generate([prompt] * 2, params, use_tqdm=False)
    for output in plain:
        answer = output.outputs[0]
        assert re.fullmatch(r"[^.]+[.][ab]{6}", answer.text), answer.text
        assert answer.finish_reason == "stop"
    [opening] = llm.encode(" Paris")
    for bias, expected in ((0.0, r" Paris[.][ab]{6}"), (-100.0, "[ab]{6}")):
        more = {"prompt": prompt, "logit_bias": {str(opening): bias}}
        assert re.fullmatch(expected, text(llm, {**form, "opening_id": opening}, **more))
    for wrong in ({"after_ids": [10**6]}, {"opening_id": -1}):
        with pytest.raises(RequestError, match="not in the model's vocabulary"):
            run(llm, {**form, **wrong})
    known = [output.outputs[0].token_ids for output in plain]
    with make(plugins=[DraftPlugin(known)]) as drafting:
        assert many(drafting, params, prompt) == known


# Schemas ------------------------------------------------------------------------------------------------


def test_thirty_schemas_at_temperature_1(llm: LLM) -> None:
    """Every answer that finished fits its schema; what is not supported names itself."""
    data = json.loads((Path(__file__).parents[1] / "data" / "schemas.json").read_text())["schemas"]
    chosen = data[1::7] + data[160:162]
    outputs = llm.chat(
        [
            [
                {
                    "role": "user",
                    "content": f"Answer with JSON for this schema: {json.dumps(entry['schema'])[:400]}",
                }
            ]
            for entry in chosen
        ],
        [
            SamplingParams(temperature=1, seed=seed, max_tokens=64, structured={"json": entry["schema"]})
            for seed, entry in enumerate(chosen)
        ],
        use_tqdm=False,
    )
    finished = 0
    for entry, output in zip(chosen, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "error":
            assert answer.error_kind == "request", answer.error
            assert answer.error is not None
            assert "structured.json" in answer.error
        elif answer.finish_reason == "stop":
            finished += 1
            jsonschema.Draft202012Validator(entry["schema"]).validate(json.loads(answer.text))
    assert len(chosen) >= 30
    assert finished >= 12
