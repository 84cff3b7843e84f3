"""Features in pairs, with drafts and without: the same ids, bit by bit, or the pair is told.

    python benchmarks/matrix.py [--cases 200] [--tokens 128] [--output matrix.json] [--page docs/speculative.md]

Each case is a prompt with one value of every factor; every pair of values is in some case, whatever the two factors.
The plain run has the model as it is, nothing recorded, and no drafts; each case runs once with drafts, in the engine
its factors ask for. Ids, log-probabilities, texts and reasons must be equal. The table goes between the marks of the
page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance import provenance
from speculative_texts import chat_prompts, copying_prompts

from headrace import LLM, SamplingParams, hookimpl
from headrace.core.interfaces import EngineListener
from headrace.core.plan import StepPlan, StepResult

__all__ = ["FACTORS", "Case", "Material", "Outcome", "pairwise", "run_matrix", "smollm2", "table"]

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "matrix.json"
PAGE = HERE.parent / "docs" / "speculative.md"
MARKS = ("<!-- matrix: rewritten by `make matrix` -->", "<!-- end of matrix -->")

FACTORS: Mapping[str, tuple[str, ...]] = {
    "drafts": ("ngram 5", "ngram 1", "ngram adaptive", "draft_model 4"),
    "engine": ("roomy", "chunked prompts", "tight pool", "no prefix cache"),
    "prompt": ("copying", "loop", "question", "code", "two ids"),
    "sampling": ("temperature 0", "temperature 1", "top_k, top_p", "min_p"),
    "end": ("max_tokens", "end token", "stop string", "stop id", "min_tokens, stop id"),
    "penalties": ("none", "repetition", "presence, frequency"),
    "logit_bias": ("none", "some"),
    "mask": ("none", "bad words", "expression"),
    "logprobs": ("none", "3"),
    "n": ("1", "2"),
    "prefix": ("new", "cached"),
}

IMPOSSIBLE = (("n", "2"), ("sampling", "temperature 0"))
"""A pair that no request can have: greedy answers are all alike."""

DRAFTS: Mapping[str, dict[str, Any]] = {
    "ngram 5": {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False},
    "ngram 1": {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 1, "adaptive": False},
    "ngram adaptive": {"method": "ngram", "num_speculative_tokens": 8},
    "draft_model 4": {"method": "draft_model", "num_speculative_tokens": 4, "adaptive": False},
}
SAMPLING: Mapping[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top_k, top_p": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
}
PENALTIES: Mapping[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.15},
    "presence, frequency": {"presence_penalty": 0.4, "frequency_penalty": 0.3},
}

Case = dict[str, str]
"""Factor → value."""


@dataclass(frozen=True)
class Material:
    """What cases are made of: a model, prompts by kind, and what may end or bend an answer."""

    model: str
    draft_model: str
    prompts: Mapping[str, Callable[[int], list[int]]]
    """Kind → (number) -> ids; equal numbers give equal prompts."""
    stop: list[str]
    stop_ids: list[int]
    bias: dict[int, float]
    masks: Mapping[str, dict[str, Any]]
    """Kind → parameters."""
    tokens: int
    engines: Mapping[str, dict[str, Any]]
    """Kind → options."""


@dataclass
class Outcome:
    """A case that was run."""

    case: Case
    tokens: int = 0
    """Generated, over all answers."""
    drafted: int = 0
    accepted: int = 0
    differences: list[str] = field(default_factory=list)
    """What is not as in the plain run; empty: nothing."""


# Cases ------------------------------------------------------------------------------------------------------


def _pairs(case: Case) -> Iterable[tuple[tuple[str, str], tuple[str, str]]]:
    return itertools.combinations(sorted(case.items()), 2)


def pairwise(factors: Mapping[str, Sequence[str]], count: int, seed: int = 0) -> list[Case]:
    """Return `count` cases that hold every pair of values; more than are needed repeat the rarest pairs.

    Raises `ValueError` where so many cases cannot hold all.
    """
    draw = random.Random(seed)
    seen: dict[Any, int] = {}
    for (one, values), (other, others) in itertools.combinations(sorted(factors.items()), 2):
        seen.update(dict.fromkeys([((one, a), (other, b)) for a in values for b in others], 0))
    seen.pop(IMPOSSIBLE, None)
    cases = []
    for _ in range(count):
        candidates = [{name: draw.choice(values) for name, values in factors.items()} for _ in range(60)]
        # A pair counts the less the more often it was had.
        possible = [case for case in candidates if IMPOSSIBLE not in _pairs(case)]
        best = max(possible, key=lambda case: sum(0.1 ** min(seen[pair], 8) for pair in _pairs(case)))
        for pair in _pairs(best):
            seen[pair] += 1
        cases.append(best)
    missing = [pair for pair, times in seen.items() if not times]
    if missing:
        raise ValueError(f"{count} cases do not hold {len(missing)} of {len(seen)} pairs; take more")
    return cases


def params(case: Case, number: int, material: Material) -> SamplingParams:
    """Return what a case asks for."""
    fields: dict[str, Any] = {**SAMPLING[case["sampling"]], **PENALTIES[case["penalties"]]}
    fields |= {"max_tokens": material.tokens, "seed": number, "n": int(case["n"])}
    fields["ignore_eos"] = case["end"] != "end token"
    if case["end"] == "stop string":
        fields["stop"] = material.stop
    if case["end"] in ("stop id", "min_tokens, stop id"):
        fields["stop_token_ids"] = material.stop_ids
    if case["end"] == "min_tokens, stop id":
        fields["min_tokens"] = material.tokens // 3
    if case["logit_bias"] != "none":
        fields["logit_bias"] = material.bias
    if case["mask"] != "none":
        fields |= material.masks[case["mask"]]
    if case["logprobs"] != "none":
        fields["logprobs"] = int(case["logprobs"])
    return SamplingParams(**fields)


# Engines ----------------------------------------------------------------------------------------------------


class DraftCount(EngineListener):
    """Counts drafts by request."""

    name = "draft_count"

    def __init__(self) -> None:
        self.drafted: dict[str, int] = {}
        self.accepted: dict[str, int] = {}

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """Count a step."""
        for entry in plan.continued:
            tokens = result.requests[entry.request_id].tokens
            if entry.num_drafts and tokens:
                name = entry.request_id
                accepted = min(entry.num_drafts, len(tokens) - 1)
                self.drafted[name] = self.drafted.get(name, 0) + entry.num_drafts
                self.accepted[name] = self.accepted.get(name, 0) + accepted


class _Counting:
    """The plugin that brings the listener."""

    name = "draft_count"
    headrace_api = ">=1,<2"

    def __init__(self) -> None:
        self.listener = DraftCount()

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        registrar.engine_listener("draft_count", lambda context: self.listener)


Answers = list[list[tuple[Any, ...]]]
"""By request: an answer's ids, log-probabilities, text and reasons."""


def _answers(
    llm: LLM, prompts: list[list[int]], asked: list[SamplingParams]
) -> tuple[Answers, list[list[str]]]:
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    told: Answers = [
        [(a.token_ids, a.logprobs, a.text, a.finish_reason, a.stop_reason) for a in output.outputs]
        for output in outputs
    ]
    # The engine's names of the answers, by which drafts are counted.
    names = [
        [o.request_id] if p.n == 1 else [f"{o.request_id}-{i}" for i in range(p.n)]
        for o, p in zip(outputs, asked, strict=True)
    ]
    return told, names


_PARTS = ("token ids", "logprobs", "text", "finish_reason", "stop_reason")


def _differences(got: list[tuple[Any, ...]], right: list[tuple[Any, ...]]) -> list[str]:
    found = []
    for index, (one, other) in enumerate(zip(got, right, strict=True)):
        found += [f"answer {index}: {part}" for part, a, b in zip(_PARTS, one, other, strict=True) if a != b]
    return found


def run_matrix(
    cases: Sequence[Case], material: Material, say: Callable[[str], None] = lambda text: None
) -> list[Outcome]:
    """Run all cases without drafts in one engine and with drafts each in its own kind; return what came out.

    Raises `RuntimeError` where an engine did not do what it is there for, such as preempt.
    """
    prompts = [material.prompts[case["prompt"]](i) for i, case in enumerate(cases)]
    asked = [params(case, i, material) for i, case in enumerate(cases)]
    plain = LLM(material.model, enforce_eager=True, show_report=False, **material.engines["roomy"])
    right, _ = _answers(plain, prompts, asked)
    plain.shutdown()
    outcomes = [Outcome(case, sum(len(a[0]) for a in right[i])) for i, case in enumerate(cases)]
    say(f"plain: {sum(o.tokens for o in outcomes)} tokens")
    kinds = sorted({(case["drafts"], case["engine"]) for case in cases})
    for drafts, engine in kinds:
        own = [i for i, case in enumerate(cases) if (case["drafts"], case["engine"]) == (drafts, engine)]
        _run_kind(own, outcomes, material, prompts, asked, right)
        accepted, drafted = (sum(getattr(outcomes[i], what) for i in own) for what in ("accepted", "drafted"))
        say(f"{drafts}, {engine}: {len(own)} cases, {accepted} of {drafted} drafts accepted")
    return outcomes


def _run_kind(
    own: list[int],
    outcomes: list[Outcome],
    material: Material,
    prompts: list[list[int]],
    asked: list[SamplingParams],
    right: Answers,
) -> None:
    """Run the cases `own`, which share an engine."""
    case = outcomes[own[0]].case
    speculative = dict(DRAFTS[case["drafts"]])
    if speculative["method"] == "draft_model":
        speculative["model"] = material.draft_model
    counting = _Counting()
    llm = LLM(
        material.model,
        show_report=False,
        plugins=[counting],
        speculative=speculative,
        **material.engines[case["engine"]],
    )
    warm = [prompts[i] for i in own if outcomes[i].case["prefix"] == "cached"]
    if warm:
        llm.generate(warm, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    got, names = _answers(llm, [prompts[i] for i in own], [asked[i] for i in own])
    for i, answers, children in zip(own, got, names, strict=True):
        outcomes[i].differences = _differences(answers, right[i])
        outcomes[i].drafted = sum(counting.listener.drafted.get(name, 0) for name in children)
        outcomes[i].accepted = sum(counting.listener.accepted.get(name, 0) for name in children)
    metrics = llm.metrics()
    llm.shutdown()
    if case["engine"] == "tight pool" and len(own) > 5 and not metrics["num_preemptions"]:
        raise RuntimeError(f"{case['drafts']}: nobody was preempted in the tight pool")
    if warm and case["engine"] not in ("no prefix cache", "tight pool") and not metrics["prefix_cache_hits"]:
        raise RuntimeError(f"{case['drafts']}, {case['engine']}: nothing was found in the prefix cache")


# SmolLM2 ----------------------------------------------------------------------------------------------------


def smollm2(tokens: int) -> Material:
    """Return material for the real model."""
    llm = LLM("smollm2", dtype="bfloat16", max_model_len=512, num_kv_blocks=32, show_report=False)
    copying = [llm.encode(text) for text in copying_prompts(50)]
    questions = [llm.encode(f"Question: {text}\nAnswer:") for text in chat_prompts(80)]
    names = ("total", "name", "items", "result", "value", "path", "row", "key")
    code = [
        llm.encode(f"def {a}_of({b}):\n    {a} = {b}.{a}\n    if {a} is None:\n        ")
        for a in names
        for b in names
    ]
    period, comma, word = (llm.encode(text)[-1] for text in ("one.", "one,", " the"))
    ends = [llm.encode(text)[-1] for text in (" such", " because", "one?")]
    llm.shutdown()
    common = {"dtype": "bfloat16", "max_model_len": 512}
    return Material(
        model="smollm2",
        draft_model="smollm2",
        prompts={
            "copying": lambda i: copying[i % len(copying)],
            "loop": lambda i: [1000 + i, 2000 + 3 * i, 3000][: 1 + i % 3] * 8,
            "question": lambda i: questions[i % len(questions)],
            "code": lambda i: code[i % len(code)],
            "two ids": lambda i: [5000 + i, 260],
        },
        stop=[" so", "\n\n\n"],
        stop_ids=ends,
        bias={word: 2.0, comma: -3.0, period: 1.0},
        masks={
            "bad words": {"bad_words": [" and", " is"]},
            "expression": {"structured": {"regex": "([A-Z]?[a-z]+[ ,.\n]{1,2})+"}},
        },
        tokens=tokens,
        engines={
            "roomy": {**common, "max_num_seqs": 16},
            "chunked prompts": {**common, "max_num_seqs": 8, "max_num_batched_tokens": 48},
            "tight pool": {**common, "max_num_seqs": 16, "num_kv_blocks": 36},
            "no prefix cache": {**common, "max_num_seqs": 3, "enable_prefix_caching": False},
        },
    )


# Tables -----------------------------------------------------------------------------------------------------


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return lines of Markdown: by factor and value, cases, tokens, drafts accepted, and cases that differ."""
    lines = [
        "| factor | value | cases | tokens | drafted | accepted | different |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: list[tuple[str, str, Sequence[Outcome]]] = [
        (name, value, [o for o in outcomes if o.case[name] == value])
        for name in FACTORS
        for value in dict.fromkeys(o.case[name] for o in outcomes)
    ]
    groups = sorted(groups, key=lambda g: (list(FACTORS).index(g[0]), FACTORS[g[0]].index(g[1])))
    for name, value, own in [*groups, ("all", "", outcomes)]:
        drafted, accepted = sum(o.drafted for o in own), sum(o.accepted for o in own)
        lines.append(
            f"| {name} | {value} | {len(own)} | {sum(o.tokens for o in own)} | {drafted} | "
            f"{accepted / drafted if drafted else 0:.0%} | {sum(bool(o.differences) for o in own)} |"
        )
    return lines


def write_page(page: Path, lines: Sequence[str]) -> None:
    """Put lines between the marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    page.write_text("\n".join([before + MARKS[0], *lines, MARKS[1] + after]), encoding="utf-8")


def main() -> None:
    """Run, print, write; exit status 1 where something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    cases = pairwise(FACTORS, arguments.cases)
    outcomes = run_matrix(cases, smollm2(arguments.tokens), say=lambda text: print(text, flush=True))
    different = [o for o in outcomes if o.differences]
    lines = table(outcomes)
    found = {
        **provenance(),
        "model": "smollm2",
        "tokens": arguments.tokens,
        "cases": [
            {
                **o.case,
                "tokens": o.tokens,
                "drafted": o.drafted,
                "accepted": o.accepted,
                "differences": o.differences,
            }
            for o in outcomes
        ],
    }
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    write_page(arguments.page, lines)
    print("\n".join(lines))
    for one in different:
        print("DIFFERENT:", one.case, one.differences)
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()
