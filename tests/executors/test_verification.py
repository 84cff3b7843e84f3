"""Drafts are verified by drawing: whatever a proposer says, ids and log-probabilities are those of the plain run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, RequestOutput, SamplingParams, hookimpl
from headrace.backends.cpu.isa import ISA_VARIABLE
from headrace.core.interfaces import LogitsRow, Proposer, RunnerBatch, RunnerListener
from headrace.core.logprobs import LOGPROBS
from headrace.core.plan import NewRequest, StepResult

VOCAB = 128
PROMPTS = [[5, 9, 2, 7], [1] * 21, [3, 4, 5] * 13, [100], [9] * 16, [2, 7, 1, 8, 2, 8]]
NATIVE = {"dtype": "bfloat16"}


class Scripted(Proposer):
    """Drafts from the answers it was told, every `wrong_every`-th token of them wrong."""

    name = "scripted"

    def __init__(self, count: int, wrong_every: int) -> None:
        self._count, self._wrong_every = count, wrong_every
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.known: set[str] = set()
        self.verified = self.accepted = 0
        self.chunks = 0
        self.graph: list[int] = []

    def on_add(self, request: NewRequest) -> None:
        assert request.request_id not in self.known
        self.known.add(request.request_id)

    def on_remove(self, request_id: str) -> None:
        self.known.remove(request_id)

    def propose(
        self, batch: RunnerBatch, hidden: Any, taps: Mapping[int, Any], result: StepResult
    ) -> Mapping[str, Sequence[int]]:
        assert hidden.shape[0] == sum(row.count for row in batch.rows)
        drafts = {}
        for row in batch.rows:
            tokens = result.requests[row.request_id].tokens
            if not tokens:
                self.chunks += 1
                continue
            self.verified += row.num_drafts
            self.accepted += len(tokens) - 1
            known = [*row.tokens[: row.num_confirmed], *tokens]
            blocks = -(-(row.start + row.count) // 16)
            assert [len(table) for table in row.block_ids] == [blocks]
            answer = self.answers.get(tuple(known[: row.num_prompt_tokens]), [])
            first = len(known) - row.num_prompt_tokens
            drafts[row.request_id] = [
                (token + 1) % VOCAB if position % self._wrong_every == 0 else token
                for position, token in enumerate(answer[first : first + self._count], first + 1)
            ]
        return drafts


class With:
    """A plugin that brings what it is given."""

    name = "with"
    headrace_api = ">=1,<2"

    def __init__(self, proposer: Proposer | None = None, listener: RunnerListener | None = None) -> None:
        self.proposer, self.listener = proposer, listener

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        if self.proposer is not None:
            registrar.proposer("scripted", lambda context: self.proposer)
        if self.listener is not None:
            registrar.runner_listener("listener", lambda context: self.listener)


@pytest.fixture
def folder(tiny_llama_folder: Path) -> Path:
    return tiny_llama_folder


@pytest.fixture(params=["native bfloat16", "torch float32"])
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    if request.param == "native bfloat16":
        yield NATIVE
    else:
        monkeypatch.setenv(ISA_VARIABLE, "torch")
        yield {"dtype": "float32"}


def make(folder: Path, *plugins: Any, **options: Any) -> LLM:
    return LLM(str(folder), plugins=list(plugins), show_report=False, **options)


def params(**changes: Any) -> list[SamplingParams]:
    """One a prompt, temperatures in turn."""
    mixes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0, "presence_penalty": 1.5, "logit_bias": {7: 2.0}},
        {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": list(range(0, VOCAB, 5))},
    ]
    common = {"max_tokens": 40, "ignore_eos": True, "logprobs": 2, **changes}
    return [SamplingParams(seed=i, **{**mix, **common}) for i, mix in enumerate(mixes)]


def run(llm: LLM, asked: Sequence[SamplingParams] | None = None) -> list[RequestOutput]:
    return llm.generate(PROMPTS, list(asked or params()), use_tqdm=False)


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def told(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].finish_reason) for o in outputs]


def scripted(outputs: Sequence[RequestOutput], count: int, wrong_every: int) -> Scripted:
    made = Scripted(count, wrong_every)
    made.answers = {tuple(o.prompt_token_ids): o.outputs[0].token_ids for o in outputs}
    return made


@pytest.mark.parametrize(("count", "wrong_every"), [(1, 1000), (3, 2), (5, 3), (8, 1000), (4, 1)])
def test_ids_are_those_of_the_plain_run(
    folder: Path, options: dict[str, Any], count: int, wrong_every: int
) -> None:
    plain = run(make(folder, **options))
    assert plain[5].outputs[0].finish_reason == "stop"
    proposer = scripted(plain, count, wrong_every)
    llm = make(folder, With(proposer), **options)
    drafted = run(llm)
    assert ids(drafted) == ids(plain)
    assert proposer.verified > 60
    if wrong_every == 1:
        assert proposer.accepted == 0
    else:
        assert proposer.accepted > 40
    if count == 8:
        assert llm.metrics()["num_steps"] < 14
    if options == NATIVE:
        assert told(drafted) == told(plain)
        assert llm.report.executor["graph"] == "yes"
    assert not proposer.known


def test_chunks_preemption_and_prefix_hits(folder: Path) -> None:
    plain = run(make(folder, **NATIVE, enforce_eager=True))
    asked = [p.model_copy(update={"max_tokens": 30}) for p in params()]
    right = [(tokens[:30], logprobs[:30]) for tokens, logprobs, _ in told(plain)]
    for options in (
        {"max_num_batched_tokens": 9, "max_num_seqs": 4},
        {"num_kv_blocks": 8, "max_model_len": 80},
        {"enable_prefix_caching": False, "max_num_seqs": 1},
    ):
        proposer = scripted(plain, 5, 4)
        llm = make(folder, With(proposer), **NATIVE, **options)
        for turn in range(2):
            got = [(tokens, logprobs) for tokens, logprobs, _ in told(run(llm, asked))]
            assert got == right, (options, turn)
        metrics = llm.metrics()
        assert proposer.accepted > 80
        if "num_kv_blocks" in options:
            assert metrics["num_preemptions"] > 0
        if "max_num_seqs" in options and "max_num_batched_tokens" in options:
            assert proposer.chunks > 5
        if options.get("enable_prefix_caching", True):
            assert metrics["prefix_cache_hits"] > 0


def test_rejected_drafts_stay_out_of_the_prefix_cache(folder: Path) -> None:
    """What the cache holds after drafting is what a clean prefill makes: hits change no bit of a log-probability."""
    first = make(folder, **NATIVE)
    plain = run(first)
    proposer = scripted(plain, 6, 2)
    llm = make(folder, With(proposer), **NATIVE)
    run(llm)
    assert proposer.verified > proposer.accepted > 0
    longer = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in plain]
    asked = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)
    again = llm.generate(longer, asked, use_tqdm=False)
    assert sum(o.num_cached_tokens for o in again) > 16 * len(PROMPTS)
    clean = make(folder, **NATIVE, enable_prefix_caching=False).generate(longer, asked, use_tqdm=False)
    assert told(again) == told(clean)


@pytest.mark.parametrize("short", [1, 2, 4, 6])
def test_drafts_end_with_the_context(folder: Path, short: int) -> None:
    """Sources: vllm-project/vllm#24662, #44185."""
    prompt = [i % 100 for i in range(64 - short)]
    asked = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    answers = []
    for plugins in ([], [With(Scripted(5, 1000))]):
        llm = make(folder, *plugins, **NATIVE, max_model_len=64, num_kv_blocks=4)
        if plugins:
            plugins[0].proposer.answers = {tuple(prompt): [*answers[0][0], *range(9)]}
        (output,) = llm.generate([prompt], asked, use_tqdm=False)
        answers.append((output.outputs[0].token_ids, output.outputs[0].finish_reason))
    assert answers[0] == answers[1]
    assert len(answers[0][0]) == short
    assert answers[0][1] == "length"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_accepted_drafts_never_exceed_max_tokens(folder: Path, max_tokens: int) -> None:
    first = make(folder, **NATIVE)
    proposer = scripted(run(first), 5, 1000)
    asked = params(max_tokens=max_tokens, min_tokens=0)
    assert told(run(make(folder, With(proposer), **NATIVE), asked)) == told(run(first, asked))


class Rows(RunnerListener):
    """Notes what each row was drawn from."""

    name = "rows"

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], list[list[int]]] = {}
        self.unconfirmed = 0

    def on_logits(self, rows: Sequence[LogitsRow], logits: Any) -> None:
        for row in rows:
            assert len(row.tokens) == row.position >= row.num_confirmed
            self.unconfirmed += row.position - row.num_confirmed
            self.rows.setdefault((row.request_id, row.position), []).append([int(t) for t in row.tokens])


def test_rows_see_the_ids_before_them_and_earlier_drafts(folder: Path) -> None:
    plain = run(make(folder, **NATIVE))
    listener = Rows()
    outputs = run(make(folder, With(scripted(plain, 4, 3), listener), **NATIVE))
    assert listener.unconfirmed > 0
    for output in outputs:
        answer = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        for position in range(len(output.prompt_token_ids), len(answer)):
            # The last row of a position is the one that decided.
            assert listener.rows[output.request_id, position][-1] == answer[:position]


class Cuts(RunnerListener):
    """Takes tokens behind the first multiple of 3 from a step, and ends a request with a multiple of 41."""

    name = "cuts"

    def __init__(self) -> None:
        self.cut = self.ended = 0

    def on_tokens(self, batch: RunnerBatch, result: StepResult) -> None:
        for outcome in result.requests.values():
            assert len(outcome.stash.get(LOGPROBS) or []) == len(outcome.tokens)
            for i, token in enumerate(outcome.tokens):
                if token % 41 == 0 or token % 3 == 0:
                    self.cut += len(outcome.tokens) - i - 1
                    del outcome.tokens[i + 1 :]
                    if token % 41 == 0:
                        outcome.finish_reason = "forty-one"
                        self.ended += 1
                    break


def test_listeners_may_cut(folder: Path) -> None:
    """What a listener cuts was never drawn: the next step draws the same again, and drafts go on from there."""
    plain = run(make(folder, **NATIVE))
    listener = Cuts()
    proposer = scripted(plain, 5, 1000)
    got = run(make(folder, With(proposer, listener), **NATIVE))
    assert listener.cut > 5
    assert listener.ended > 0
    for one, other in zip(got, plain, strict=True):
        answer, logprobs, reason = told([other])[0]
        end = next((i + 1 for i, token in enumerate(answer) if token % 41 == 0), len(answer))
        expected = "forty-one" if answer[end - 1] % 41 == 0 else reason
        assert told([one])[0] == (answer[:end], logprobs[:end], expected)


class Broken(Scripted):
    """Fails once it has drafted a few times."""

    def __init__(self, how: str) -> None:
        super().__init__(3, 1000)
        self._how = how
        self.calls = 0

    def propose(self, *step: Any) -> Any:
        self.calls += 1
        drafts = dict(super().propose(*step))
        if self.calls < 4 or not drafts:
            return drafts
        if self._how == "raises":
            raise ValueError("no idea")
        wrong: Any = {"large": [1, VOCAB], "negative": [-1], "fraction": [1.5], "none": None}[self._how]
        return dict.fromkeys(drafts, wrong)


@pytest.mark.parametrize("how", ["raises", "large", "negative", "fraction", "none"])
def test_a_failing_proposer_is_switched_off_and_told_once(
    folder: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = run(make(folder, **NATIVE))
    proposer = Broken(how)
    proposer.answers = scripted(plain, 3, 1000).answers
    llm = make(folder, With(proposer), **NATIVE)
    with caplog.at_level(logging.WARNING, "headrace"):
        assert told(run(llm)) == told(plain)
        assert told(run(llm)) == told(plain)
    (record,) = [r for r in caplog.records if "switched off" in r.getMessage()]
    assert "'scripted'" in record.getMessage()
    assert "propose" in record.getMessage()
    assert proposer.calls == 4
    assert proposer.accepted > 0
