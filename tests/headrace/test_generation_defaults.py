"""A model's own sampling defaults: applied or reported, never dropped in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.generation_defaults import GenerationDefaults

CONFIG = {
    "temperature": 0.3,
    "top_p": 0.8,
    "top_k": 5,
    "repetition_penalty": 1.2,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "do_sample": True,
    "eos_token_id": 2,
    "transformers_version": "5",
    "num_beams": 4,
    "typical_p": None,
}


def test_every_field_is_applied_or_reported() -> None:
    """Source: vllm-project/vllm#50767."""
    defaults = GenerationDefaults(CONFIG)
    params = defaults.apply(SamplingParams())
    for field in ("temperature", "top_p", "top_k", "repetition_penalty", "min_p"):
        assert getattr(params, field) == CONFIG[field]
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    applied, refused = defaults.notes()
    assert "temperature 0.3" in applied
    assert "num_beams" in refused
    assert "typical_p" not in refused
    assert "do_sample" not in refused


@pytest.mark.parametrize(
    "given",
    [{"temperature": 1.0}, {"top_p": 1.0}, {"top_k": 0}, {"repetition_penalty": 1.0}, {"temperature": 0}],
)
def test_an_explicit_value_wins_also_where_it_is_neutral(given: dict[str, Any]) -> None:
    params = GenerationDefaults(CONFIG).apply(SamplingParams(**given))
    for field, value in given.items():
        assert getattr(params, field) == value
    others = {"temperature", "top_p", "top_k"} - given.keys()
    assert all(getattr(params, field) == CONFIG[field] for field in others)


def test_a_value_out_of_range_is_reported_and_not_applied() -> None:
    defaults = GenerationDefaults({"temperature": 7.0, "top_k": 3})
    assert defaults.apply(SamplingParams()).temperature == 1.0
    assert any("temperature 7.0" in line for line in defaults.notes())


def test_a_default_that_does_not_go_with_the_request_is_left_out() -> None:
    defaults = GenerationDefaults({"max_new_tokens": 8, "temperature": 0.0})
    assert defaults.apply(SamplingParams()).max_tokens == 8
    assert defaults.apply(SamplingParams()).temperature == 0
    long = defaults.apply(SamplingParams(min_tokens=12))
    assert (long.max_tokens, long.min_tokens) == (SamplingParams().max_tokens, 12)
    assert defaults.apply(SamplingParams(n=2)).temperature == 1.0


def test_nothing_to_apply_leaves_the_object_as_it_is() -> None:
    params = SamplingParams()
    assert GenerationDefaults({}).apply(params) is params
    assert GenerationDefaults({}).notes() == []


def test_through_the_engine(tmp_path: Path, tiny_llama_folder: Path) -> None:
    prompt = [3, 1, 4, 1, 5]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (tiny_llama_folder / "generation_config.json").write_text(json.dumps({"top_k": 1, "num_beams": 2}))
    llm = LLM(str(tiny_llama_folder), show_report=False)
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    answers = [
        llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for params in (greedy, free)
    ]
    assert answers[0] == answers[1]  # the model's top_k 1 leaves the likeliest token alone
    assert any("top_k 1" in note for note in llm.report.notes)
    assert any("num_beams" in note for note in llm.report.notes)
    plain = LLM(str(tiny_llama_folder), generation_config="none", show_report=False)
    drawn = [plain.generate(prompt, free, use_tqdm=False)[0].outputs[0].token_ids for _ in range(3)]
    assert any(answer != answers[0] for answer in drawn)
