"""How drafting is asked for, what is refused before a model is loaded, and what is counted."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.cli import main
from headrace.configuration import start_configuration
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.interfaces import Proposer
from headrace.core.interfaces.build import CoreContext
from headrace.core.plan import Continued, RequestResult, StepPlan, StepResult
from headrace.core.plugin.registry import Registry
from headrace.plugins.speculative.metrics import DraftMetrics
from headrace.plugins.speculative.options import SpeculativeSection


def section(**keywords: Any) -> SpeculativeSection:
    config = start_configuration("m", keywords=keywords, discover=False).config
    return config.section("speculative", SpeculativeSection)


def test_by_mapping_by_flat_names_and_by_the_name_of_other_engines(tmp_path: Path) -> None:
    asked = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 1}
    right = SpeculativeSection(**asked)  # type: ignore[arg-type]
    assert section(speculative=asked) == section(speculative_config=asked) == right
    flat = {"speculative_method": "ngram", **{k: v for k, v in asked.items() if k != "method"}}
    assert section(**flat) == right
    file = tmp_path / "engine.yaml"
    for name in ("speculative", "speculative_config"):
        file.write_text(json.dumps({"model": "m", name: asked}))
        started = start_configuration(file=file, discover=False)
        assert started.config.sections["speculative"] == right
    with pytest.raises(ConfigError, match="speculative_method is given twice"):
        section(speculative=asked, speculative_config={"method": "ngram"})


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> Any:
        with pytest.raises(SystemExit) as ended:
            main(("config", "show", "--json", *words))
        assert not ended.value.code
        return json.loads(capsys.readouterr().out)["options"]

    text = json.dumps({"method": "ngram", "num_speculative_tokens": 7})
    for flag in ("--speculative", "--speculative-config"):
        options = shown("m", flag, text)
        assert options["speculative_method"]["value"] == "ngram"
        assert options["num_speculative_tokens"] == {"value": 7, "source": f"flag {flag}"}
    options = shown("m", "--speculative-method", "ngram", "--no-adaptive-drafts")
    assert options["adaptive_drafts"]["value"] is False


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"method": "ngrm"}, ["'ngrm'", "did you mean 'ngram'", "speculative_method"]),
        ({"num_speculative_tokens": 3}, ["num_speculative_tokens without a method"]),
        ({"method": "ngram", "num_speculative_tokens": 0}, ["from 1 to 64, got 0"]),
        ({"method": "ngram", "prompt_lookup_min": 5}, ["prompt_lookup_min (5)", "prompt_lookup_max (4)"]),
        ({"method": "ngram", "model": "smollm2"}, ["'ngram'", "'smollm2'", "ngram takes none"]),
        ({"method": "ngram", "numspeculative_tokens": 3}, ["did you mean 'num_speculative_tokens'"]),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(asked: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        section(speculative=asked)
    for word in words:
        assert word in str(raised.value)


# Metrics ------------------------------------------------------------------------------------------------


def metrics(**asked: Any) -> DraftMetrics:
    config = EngineConfig(model="m", sections={"speculative": SpeculativeSection(**asked)})
    return DraftMetrics(CoreContext(config, Registry(), threading.Event().set))


def step(told: DraftMetrics, **entries: tuple[int, int]) -> None:
    """Name → (drafts in the plan, tokens in the result)."""
    plan = StepPlan(
        step=0, continued=[Continued(n, 5, drafts + 1, [], [], drafts) for n, (drafts, _) in entries.items()]
    )
    results = {
        name: RequestResult(tokens=[1] * count, num_computed=5) for name, (_, count) in entries.items()
    }
    told.on_result(plan, StepResult(step=0, requests=results))


def test_drafts_are_counted_by_request_and_by_place() -> None:
    told = metrics(method="ngram", num_speculative_tokens=3)
    assert set(told.metrics().values()) == {0}
    step(told, none=(0, 1), all=(3, 4), first=(3, 2), rejected=(2, 1), failed=(3, 0))
    assert told.metrics() == {
        "spec_decode_num_drafts": 3,
        "spec_decode_num_draft_tokens": 8,
        "spec_decode_num_accepted_tokens": 4,
        'spec_decode_num_accepted_tokens_per_pos{position="0"}': 2,
        'spec_decode_num_accepted_tokens_per_pos{position="1"}': 1,
        'spec_decode_num_accepted_tokens_per_pos{position="2"}': 1,
    }


def test_drafts_of_others_may_be_longer() -> None:
    told = metrics()
    step(told, long=(9, 9))
    series = told.metrics()
    assert series['spec_decode_num_accepted_tokens_per_pos{position="7"}'] == 1
    assert 'spec_decode_num_accepted_tokens_per_pos{position="8"}' not in series
    assert series["spec_decode_num_draft_tokens"] == 9


# On an engine -------------------------------------------------------------------------------------------


class Sevens(Proposer):
    """Drafts one token, ever the same."""

    name = "sevens"

    def __init__(self, context: Any) -> None:
        assert context.vocab_size == 128

    def propose(self, batch: Any, hidden: Any, taps: Any, result: Any) -> Mapping[str, Sequence[int]]:
        return {row.request_id: [7] for row in batch.rows}


def test_a_proposer_may_be_given_as_it_is(tiny_llama_folder: Path) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plain = LLM(str(tiny_llama_folder), show_report=False)
    assert "drafts  " not in str(plain.report)
    right = plain.generate([[1, 2, 3]], sampling, use_tqdm=False)[0].outputs[0].token_ids
    llm = LLM(str(tiny_llama_folder), show_report=False, speculative_method=Sevens)
    assert "drafts       by sevens (speculative_method)" in str(llm.report).splitlines()
    assert llm.generate([[1, 2, 3]], sampling, use_tqdm=False)[0].outputs[0].token_ids == right
    told = llm.metrics()
    assert told["spec_decode_num_drafts"] == told["spec_decode_num_draft_tokens"] > 5


def test_counts_fit_together(tiny_llama_folder: Path) -> None:
    llm = LLM(str(tiny_llama_folder), show_report=False, speculative={"method": "ngram", "adaptive": False})
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = llm.generate([[1, 2, 3] * 4, [9] * 5], sampling, use_tqdm=False)
    told = llm.metrics()
    by_place = [v for name, v in told.items() if name.startswith("spec_decode_num_accepted_tokens_per_pos")]
    assert len(by_place) == 5
    assert by_place == sorted(by_place, reverse=True)
    assert 0 < sum(by_place) == told["spec_decode_num_accepted_tokens"]
    assert told["spec_decode_num_accepted_tokens"] <= told["spec_decode_num_draft_tokens"]
    assert told["spec_decode_num_draft_tokens"] <= 5 * told["spec_decode_num_drafts"]
    assert told["generation_tokens"] == sum(len(o.outputs[0].token_ids) for o in outputs) == 120
