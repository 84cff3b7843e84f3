"""The sampler: a row's token depends on that row alone, and follows the distribution it asks for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from headrace.backends.cpu.ops import CpuOps
from headrace.core.errors import PluginCallError, RequestError
from headrace.core.interfaces import LogitsRow, RunnerListener
from headrace.core.plan import NewRequest
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.executors.noise import child_seed
from headrace.executors.sampler import Sampled, Sampler, SamplingOps
from headrace.executors.scoring import token_logprobs
from headrace.plugins.logit_bias import logit_bias
from headrace.plugins.min_tokens import min_tokens
from headrace.plugins.penalties import penalties

V = 1000
BUILT_IN = [
    ("min_tokens", min_tokens, "min_tokens"),
    ("logit_bias", logit_bias, "logit_bias"),
    ("penalties", penalties, "penalties"),
]


def make_row(
    params: SamplingParams, request_id: str = "r", tokens: list[int] | None = None, prompt: int = 3
) -> LogitsRow:
    tokens = [1, 2, 3] if tokens is None else tokens
    return LogitsRow(request_id, params, Stash(), prompt, len(tokens), tokens, len(tokens))


def new_request(row: LogitsRow) -> NewRequest:
    return NewRequest(
        request_id=row.request_id,
        token_ids=list(row.tokens),
        num_prompt_tokens=row.num_prompt_tokens,
        params=row.params,
        start=0,
        count=1,
        block_ids=[[1]],
    )


def sample(
    rows: list[LogitsRow],
    logits: torch.Tensor,
    processors: list[Any] | None = None,
    listeners: list[RunnerListener] | None = None,
    ops: SamplingOps | None = None,
) -> list[Sampled]:
    sampler = Sampler(BUILT_IN if processors is None else processors, listeners or [], logits.shape[1], ops)
    for row in rows:
        sampler.add(new_request(row))
    return sampler.sample(rows, logits.clone())


def one(params: SamplingParams, logits: torch.Tensor, **fields: Any) -> Sampled:
    return sample([make_row(params, **fields)], logits[None])[0]


def random_logits(rows: int = 1, seed: int = 0, size: int = V) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 2


MIXES = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 40},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "top_k": V - 1},
    {"temperature": 1.0, "top_k": V * 2, "top_p": 0.5},
    {"temperature": 0.01, "top_p": 0.95},
    {"temperature": 0.8, "repetition_penalty": 1.4, "logprobs": 3},
    {"temperature": 0.8, "presence_penalty": 1.0, "frequency_penalty": -0.5, "top_k": 5},
    {"temperature": 0.6, "logit_bias": {4: 6.0, 9: -100.0}, "logprobs": 0},
    {"temperature": 1.0, "min_tokens": 2, "stop_token_ids": [7, 8], "top_p": 0.7},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": -1},
]


def mixed_rows() -> list[LogitsRow]:
    return [
        make_row(
            SamplingParams(seed=i * 7 - 51, max_tokens=64, **MIXES[i % len(MIXES)]),
            request_id=f"r{i}",
            tokens=[i, i, 5, *range(i % 9)],
        )
        for i in range(64)
    ]


def native_ops() -> SamplingOps:
    found = CpuOps()
    draw, score = found.get("draw"), found.get("score")
    assert draw is not None
    assert score is not None
    return SamplingOps(draw.fn, score.fn)


@pytest.mark.parametrize("native", [False, True])
def test_64_rows_equal_each_row_alone_bit_for_bit(native: bool) -> None:
    """A seeded request must not depend on its neighbours. Source: vllm-project/vllm#51226"""
    ops = native_ops() if native else None
    logits, rows = random_logits(64, seed=2), mixed_rows()
    together = sample(rows, logits, ops=ops)
    assert {row.params.temperature > 0 for row in rows} == {True, False}
    assert all(result.error is None for result in together)
    alone = [sample([row], logits[i : i + 1], ops=ops)[0] for i, row in enumerate(rows)]
    assert together == alone
    assert any(result.logprobs is not None for result in alone)
    for count in (2, 3, 17, 33):
        assert sample(rows[:count], logits[:count], ops=ops) == alone[:count]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
    assert sample([rows[i] for i in order], logits[order], ops=ops) == [alone[i] for i in order]


def test_ops_change_no_token() -> None:
    """An op set's ops are quicker and draw the same; their log-probabilities round differently."""
    logits, rows = random_logits(64, seed=6), mixed_rows()
    logits[5, 3] = math.nan
    plain, native = sample(rows, logits), sample(rows, logits, ops=native_ops())
    assert [(one.token_id, one.error) for one in native] == [(one.token_id, one.error) for one in plain]
    scored = [(a.logprobs, b.logprobs) for a, b in zip(plain, native, strict=True) if a.logprobs is not None]
    assert len(scored) > 5
    for right, got in scored:
        assert got is not None
        assert (got.token_ids, got.rank) == (right.token_ids, right.rank)
        assert got.logprobs == pytest.approx(right.logprobs, abs=1e-6)


def test_what_an_op_is_not_certain_of_is_drawn_by_the_reference() -> None:
    logits, rows = (
        random_logits(8, seed=7),
        [make_row(SamplingParams(seed=i, temperature=float(i != 3)), f"r{i}") for i in range(8)],
    )
    right = [result.token_id for result in sample(rows, logits)]
    asked = []

    def draw(logits: torch.Tensor, best: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        asked.append(logits.shape[0])
        return torch.tensor([999 if i % 2 else -1 for i in range(8)])

    got = [result.token_id for result in sample(rows, logits, ops=SamplingOps(draw))]
    assert got == [right[i] if i % 2 == 0 or i == 3 else 999 for i in range(8)]
    greedy = [make_row(SamplingParams(temperature=0.0), f"r{i}") for i in range(8)]
    sample(greedy, logits, ops=SamplingOps(draw))
    assert asked == [8], "greedy rows ask nobody"


def test_a_seeded_request_beside_unlike_neighbours() -> None:
    """0, 1 and 7 neighbours with other seeds, five times. Source: vllm-project/vllm#51226"""
    logits = random_logits(24, seed=5)
    me = SamplingParams(seed=11, temperature=0.9, max_tokens=24, ignore_eos=True)
    runs = set()
    for neighbours in (0, 1, 7):
        for repeat in range(5):
            tokens = [1, 2]
            for step in range(24):
                rows = [make_row(me, "x", tokens, prompt=2)] + [
                    make_row(SamplingParams(seed=1000 * repeat + n), f"n{n}", [3] * (step + 1 + n))
                    for n in range(neighbours)
                ]
                block = torch.cat((logits[step : step + 1], random_logits(neighbours, seed=repeat)))
                tokens = [*tokens, sample(rows, block)[0].token_id]
            runs.add(tuple(tokens))
    assert len(runs) == 1
    assert len(set(runs.pop()[2:])) > 12, "the draws vary over positions"


def test_seeds_and_children() -> None:
    logits = torch.zeros(V)

    def run(seed: int) -> list[int]:
        params = SamplingParams(temperature=1.2).model_copy(update={"seed": seed})
        return [one(params, logits, tokens=[0] * n).token_id for n in range(3, 13)]

    assert run(5) == run(5)
    different = [run(seed) for seed in (5, 6, -6, 0, 2**63 - 1, -(2**63))]
    assert len({tuple(ids) for ids in different}) == 6
    children = [run(child_seed(5, i)) for i in range(3)]
    assert children == [run(5), run(6), run(7)]
    assert len({tuple(ids) for ids in children}) == 3


@pytest.mark.parametrize(
    "mix",
    [
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.0, "top_p": 0.1, "top_k": 3, "min_p": 0.5},
    ],
)
def test_what_equals_greedy(mix: dict[str, Any]) -> None:
    for seed in range(20):
        logits = random_logits(seed=seed)[0]
        assert one(SamplingParams(seed=seed, **mix), logits).token_id == int(logits.argmax())


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(V)
    logits[[400, 17, 900]] = 5.0
    for mix in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-6}):
        assert one(SamplingParams(seed=1, **mix), logits).token_id == 17


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((V,), -math.inf)
    logits[[3, 5]] = torch.tensor([1.0, -80.0])
    for mix in ({}, {"top_k": 50}, {"top_p": 0.999999}, {"temperature": 2.0}):
        drawn = {one(SamplingParams(seed=seed, **mix), logits).token_id for seed in range(30)}
        assert drawn <= {3, 5}
    for mix in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5}):
        result = one(SamplingParams(seed=1, **mix), torch.full((V,), -math.inf))
        assert result.token_id == -1
        assert "no token can be chosen" in (result.error or "")


def test_a_damaged_row_fails_alone() -> None:
    logits = random_logits(4)
    logits[1, 500] = math.nan
    logits[2, 3] = math.inf
    for temperature in (0.0, 1.0):
        rows = [
            make_row(SamplingParams(temperature=temperature, seed=i, logprobs=1), f"r{i}") for i in range(4)
        ]
        results = sample(rows, logits)
        assert [result.error is None for result in results] == [True, False, False, True]
        assert "NaN or infinity" in (results[1].error or "")
        assert results[0] == sample(rows[:1], logits[:1])[0]
        assert results[3] == sample(rows[3:], logits[3:])[0]


def test_a_tensor_on_few_threads_and_on_many_gives_the_same() -> None:
    logits = random_logits(8, seed=9, size=50_000)
    rows = [make_row(SamplingParams(seed=i, top_p=0.9, logprobs=2), f"r{i}") for i in range(8)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = sample(rows, logits)
        torch.set_num_threads(2)
        assert sample(rows, logits) == single
    finally:
        torch.set_num_threads(before)


def test_logprobs_are_raw() -> None:
    logits = random_logits(seed=4)[0]
    expected = logits.double().log_softmax(-1)
    params = SamplingParams(
        seed=3,
        temperature=1.7,
        top_k=50,
        top_p=0.9,
        logprobs=5,
        logit_bias={7: 100.0},
        repetition_penalty=2.0,
    )
    result = one(params, logits)
    assert result.logprobs is not None
    assert result.token_id == 7, "the bias decides"
    assert result.logprobs.token_ids[0] == 7
    assert result.logprobs.token_ids[1:] == expected.topk(5).indices.tolist()
    assert result.logprobs.logprobs == pytest.approx(expected[result.logprobs.token_ids].tolist(), abs=1e-9)
    assert result.logprobs.rank == 1 + int((logits > logits[7]).sum())
    assert [result.logprobs] == token_logprobs(logits[None], [7], 5)


@pytest.mark.parametrize(("k", "entries"), [(0, 1), (3, 4), (-1, V + 1)])
def test_number_of_logprobs(k: int, entries: int) -> None:
    result = one(SamplingParams(temperature=0.0, logprobs=k), random_logits()[0])
    assert result.logprobs is not None
    assert len(result.logprobs.token_ids) == len(result.logprobs.logprobs) == entries
    assert result.logprobs.rank == 1
    assert one(SamplingParams(temperature=0.0), random_logits()[0]).logprobs is None


class Forbid(RunnerListener):
    name = "forbid"

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self.seen: list[str] = []

    def on_logits(self, rows: Any, logits: torch.Tensor) -> None:
        self.seen += [row.request_id for row in rows]
        logits[:, self.token_id] = -math.inf


def test_listeners_come_before_processors_and_after_raw_logprobs() -> None:
    logits = random_logits(2)
    best = int(logits[0].argmax())
    values = []

    def factory(params: SamplingParams) -> Any:
        def look(row: LogitsRow, row_logits: torch.Tensor) -> torch.Tensor:
            values.append(row_logits[best].item())
            return row_logits

        return look

    rows = [make_row(SamplingParams(temperature=0.0, logprobs=1), f"r{i}") for i in range(2)]
    listener = Forbid(best)
    results = sample(rows, logits, [("look", factory, "p")], [RunnerListener(), listener])
    assert listener.seen == ["r0", "r1"]
    assert values == [-math.inf, -math.inf]
    assert results[0].token_id == int(logits[0].topk(2).indices[1])
    assert [results[0].logprobs] == token_logprobs(logits[:1], [results[0].token_id], 1)
    # Without processors too: the short way must see the listener's change.
    assert [r.token_id for r in sample(rows, logits, [], [listener])] == [r.token_id for r in results]


def test_a_failing_listener_is_named() -> None:
    class Broken(RunnerListener):
        name = "broken"

        def on_logits(self, rows: Any, logits: torch.Tensor) -> None:
            raise RuntimeError("no power")

    with pytest.raises(PluginCallError, match=r"'broken'.*RuntimeError: no power") as caught:
        sample([make_row(SamplingParams(temperature=0.0))], random_logits(), [], [Broken()])
    assert caught.value.plugin == "broken"


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [("raise", "ZeroDivisionError"), ("none", "NoneType"), ("shape", r"\[3\]"), ("nan", "NaN")],
)
def test_a_failing_processor_fails_its_row_alone(behaviour: str, words: str) -> None:
    def factory(params: SamplingParams) -> Any:
        if params.seed != 1:
            return None

        def process(row: LogitsRow, logits: torch.Tensor) -> Any:
            if behaviour == "raise":
                return 1 / 0
            if behaviour == "nan":
                return logits * math.nan
            return None if behaviour == "none" else logits[:3]

        return process

    logits = random_logits(3)
    rows = [make_row(SamplingParams(seed=i, temperature=0.5), f"r{i}") for i in range(3)]
    results = sample(rows, logits, [("mine", factory, "acme")])
    assert [result.error is None for result in results] == [True, False, True]
    assert re.search(words, results[1].error or "")
    if behaviour != "nan":
        assert "'mine' of plugin 'acme'" in (results[1].error or "")
    assert [results[0], results[2]] == sample([rows[0], rows[2]], logits[[0, 2]], [])


def test_processors_run_in_order_of_registration() -> None:
    def writer(value: float) -> Any:
        def process(row: LogitsRow, logits: torch.Tensor) -> torch.Tensor:
            logits[5] = logits[5] * 2 + value
            return logits

        return lambda params: process

    seen: list[float] = []

    def reader(params: SamplingParams) -> Any:
        def process(row: LogitsRow, logits: torch.Tensor) -> torch.Tensor:
            seen.append(logits[5].item())
            return logits

        return process

    order = [("a", writer(1.0), "p"), ("b", writer(10.0), "p"), ("c", reader, "p")]
    sample([make_row(SamplingParams(temperature=0.0))], torch.zeros(1, V), order)
    assert seen == [12.0]


def test_a_forced_token_may_be_infinite() -> None:
    def factory(params: SamplingParams) -> Any:
        def force(row: LogitsRow, logits: torch.Tensor) -> torch.Tensor:
            logits[42] = math.inf
            return logits

        return force

    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1, logprobs=1)
        result = sample([make_row(params)], random_logits(), [("force", factory, "p")])[0]
        assert result.token_id == 42
        assert result.error is None
        assert result.logprobs is not None
        assert all(map(math.isfinite, result.logprobs.logprobs))


def test_a_failing_factory_fails_its_request_alone() -> None:
    def factory(params: SamplingParams) -> Any:
        if params.seed == 1:
            raise KeyError("colour")
        return None

    sampler = Sampler([("mine", factory, "acme")], [], V)
    with pytest.raises(PluginCallError, match="'mine' of plugin 'acme' failed: KeyError: 'colour'") as caught:
        sampler.add(new_request(make_row(SamplingParams(seed=1))))
    assert caught.value.plugin == "acme"
    sampler.add(new_request(make_row(SamplingParams(seed=2), "other")))


def test_processors_are_made_once_and_forgotten() -> None:
    made = []

    def factory(params: SamplingParams) -> Any:
        made.append(params.seed)
        return lambda row, logits: torch.zeros_like(logits).index_fill(0, torch.tensor([9]), 1.0)

    sampler = Sampler([("nine", factory, "p")], [], V)
    row = make_row(SamplingParams(seed=4, temperature=0.0))
    sampler.add(new_request(row))
    logits = random_logits()
    assert [sampler.sample([row], logits.clone())[0].token_id for _ in range(3)] == [9, 9, 9]
    assert made == [4]
    sampler.remove("r")
    sampler.remove("never known")
    assert sampler.sample([row], logits.clone())[0].token_id == int(logits.argmax())


def test_a_draw_needs_a_seed() -> None:
    with pytest.raises(RequestError, match=r"'r' samples with temperature 1.0 .* without a seed"):
        sample([make_row(SamplingParams())], random_logits())
    assert sample([make_row(SamplingParams(temperature=0.0))], random_logits())[0].error is None


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1, 1000\], got \[2, 1000\]"):
        Sampler([], [], V).sample([make_row(SamplingParams(temperature=0.0))], random_logits(2))


# Drawn before anything is forbidden ---------------------------------------------------------------------


class Judge(RunnerListener):
    """Forbids every token but one in `keep`, and notes what it was asked."""

    name = "judge"

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self.masked: list[str] = []
        self.refused: list[str] = []
        self.passed: list[str] = []

    def _allows(self, row: LogitsRow) -> torch.Tensor:
        shift = int(row.request_id[1:])
        return (torch.arange(V) + shift) % self._keep == 0

    def on_logits(self, rows: Sequence[LogitsRow], logits: torch.Tensor) -> bool:
        assert len(rows) == len(logits)
        for row, own in zip(rows, logits, strict=True):
            self.masked.append(row.request_id)
            own[~self._allows(row)] = -math.inf
        return True

    def on_drawn(self, rows: Sequence[LogitsRow], tokens: Sequence[int]) -> Sequence[int]:
        refused = [
            i for i, (row, token) in enumerate(zip(rows, tokens, strict=True)) if not self._allows(row)[token]
        ]
        for i, row in enumerate(rows):
            (self.refused if i in refused else self.passed).append(row.request_id)
        return refused


def judged_and_masked(
    keeps: Sequence[int], ops: SamplingOps | None = None
) -> tuple[list[Sampled], list[Sampled], list[Judge]]:
    """Sample the mixed rows with and without drawing first."""
    rows, logits = mixed_rows(), random_logits(64, seed=3)
    judges = [Judge(keep) for keep in keeps]
    sampler = Sampler(BUILT_IN, judges, V, ops)
    for row in rows:
        sampler.add(new_request(row))
    masked = sampler.sample(rows, logits.clone())
    for judge in judges:
        judge.masked.clear()
    rows = [replace(row, drawn_first=sampler.draws_first(row.request_id)) for row in rows]
    return sampler.sample(rows, logits.clone()), masked, judges


@pytest.mark.parametrize("native", [False, True])
def test_drawing_first_draws_what_masking_first_does(native: bool) -> None:
    judged, masked, (judge,) = judged_and_masked([2], native_ops() if native else None)
    assert judged == masked
    plain = {
        f"r{i}" for i in range(64) if MIXES[i % len(MIXES)] in ({"temperature": t} for t in (1.0, 0.3, 0.0))
    }
    assert len(judge.refused) >= 3
    assert len(judge.passed) >= 3
    assert {*judge.refused, *judge.passed} == plain
    assert sorted(judge.masked) == sorted({f"r{i}" for i in range(64)} - plain | set(judge.refused))


def test_one_judge_may_refuse_what_another_let_pass() -> None:
    judged, masked, (one, other) = judged_and_masked([2, 3])
    assert judged == masked
    assert set(one.passed) & set(other.refused)
    assert not set(one.refused) & {*other.refused, *other.passed}, "what is refused is asked about once"


def test_raw_logprobs_are_those_of_the_model_where_a_token_is_drawn_first() -> None:
    params = SamplingParams(temperature=1.0, seed=4, logprobs=2)
    for mode, first in (("raw_logprobs", True), ("processed_logprobs", False)):
        row, sampler = make_row(params, "r1"), Sampler([], [Judge(2)], V, None, mode)  # type: ignore[arg-type]
        sampler.add(new_request(row))
        assert sampler.draws_first("r1") is first
        logits = random_logits()
        (masked,) = sampler.sample([row], logits.clone())
        (judged,) = sampler.sample([replace(row, drawn_first=first)], logits.clone())
        assert judged == masked


def test_nothing_is_drawn_first_where_a_listener_does_not_judge() -> None:
    class Changes(RunnerListener):
        def on_logits(self, rows: Sequence[LogitsRow], logits: torch.Tensor) -> bool:
            logits += 1
            return True

    row = make_row(SamplingParams(temperature=0.0))
    for listeners, first in (([], False), ([Judge(2)], True), ([Judge(2), Changes()], False)):
        sampler = Sampler([], listeners, V)
        sampler.add(new_request(row))
        assert sampler.draws_first("r") is first
        sampler.remove("r")
        assert not sampler.draws_first("r")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_refused_token_with_nothing_beside_it_fails_its_request(temperature: float) -> None:
    class Nothing(Judge):
        def _allows(self, row: LogitsRow) -> torch.Tensor:
            return torch.zeros(V, dtype=torch.bool)

    params = SamplingParams(temperature=temperature, seed=1)
    row, sampler = make_row(params), Sampler([], [Nothing(1)], V)
    sampler.add(new_request(row))
    (found,) = sampler.sample([replace(row, drawn_first=True)], random_logits())
    assert (found.token_id, found.error_kind) == (-1, "request")
    assert "leave none of the vocabulary" in (found.error or "")


def test_a_failing_judge_is_named() -> None:
    class Broken(Judge):
        def on_drawn(self, rows: Sequence[LogitsRow], tokens: Sequence[int]) -> Sequence[int]:
            raise ValueError("no opinion")

    row, sampler = make_row(SamplingParams(temperature=0.0)), Sampler([], [Broken(1)], V)
    sampler.add(new_request(row))
    with pytest.raises(PluginCallError, match="'judge' failed in on_drawn: ValueError: no opinion"):
        sampler.sample([replace(row, drawn_first=True)], random_logits())
