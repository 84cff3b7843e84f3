"""The worker's half by itself: masks of draft rows, ends, preemption, and failures that stay with their request."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from headrace.core.errors import RequestError
from headrace.core.interfaces import BatchRow, Grammar, GrammarMatcher, GrammarSpec, LogitsRow, RunnerBatch
from headrace.core.plan import NewRequest, RequestResult, StepResult
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.plugins.structured.cache import GrammarCache
from headrace.plugins.structured.masks import Mask
from headrace.plugins.structured.options import STRUCTURED, Structured
from headrace.plugins.structured.runner import GrammarListener

V = 40
PROMPT = [30, 31, 32]


@dataclass
class Counting:
    """Allows token i as the i-th one, and ends behind the last of `length`. Token 39 breaks it, 38 ends it."""

    length: int
    taken: list[int] = field(default_factory=list)

    def fill_mask(self, mask: torch.Tensor) -> None:
        assert not self.is_ended
        if self.length == 99:
            raise RequestError("structured: too large a state")
        if self.length == 98:
            raise KeyError("a fault of the backend")
        mask.zero_()
        for token in (len(self.taken), 38):
            mask[token // 32] |= torch.tensor(1 << (token % 32), dtype=torch.int64).to(torch.int32)

    def accept(self, token_id: int) -> bool:
        if self.is_ended or token_id not in (len(self.taken), 38):
            return False
        self.taken.append(token_id)
        return True

    def rollback(self, count: int) -> None:
        if count:
            del self.taken[-count:]

    @property
    def is_ended(self) -> bool:
        return len(self.taken) >= self.length or self.taken[-1:] == [38]


class Counted:
    def __init__(self, length: int) -> None:
        self._length = length

    def matcher(self) -> GrammarMatcher:
        return Counting(self._length)


class Cache:
    """Grammars whose text is their length."""

    def get(self, wanted: Structured) -> Future[Grammar]:
        future: Future[Grammar] = Future()
        if wanted.spec.text == "bad":
            future.set_exception(RequestError("structured: bad"))
        else:
            future.set_result(Counted(int(wanted.spec.text)))
        return future


class Worker:
    """Runs steps as the runner does, for requests whose answers are told."""

    def __init__(self) -> None:
        self.listener = GrammarListener(cast(GrammarCache, Cache()), V)
        self.stash: dict[str, Stash] = {}

    def add(
        self,
        name: str,
        text: str | None,
        answer: Sequence[int] = (),
        after_ids: tuple[int, ...] = (),
        opening_id: int | None = None,
    ) -> None:
        self.stash[name] = Stash()
        if text is not None:
            self.stash[name][STRUCTURED] = Structured(
                GrammarSpec("regex", text), (38,), after_ids, opening_id
            )
        self.listener.on_add(
            NewRequest(
                request_id=name,
                token_ids=[*PROMPT, *answer],
                num_prompt_tokens=len(PROMPT),
                params=SamplingParams(),
                start=0,
                count=1,
                block_ids=[],
                stash=self.stash[name],
            )
        )

    def step(
        self, *rows: tuple[str, Sequence[int], Sequence[int]], drawn: dict[str, list[int]]
    ) -> tuple[list[set[int]], StepResult]:
        """rows: (name, answer so far, drafts). Returns what each row of logits allows, and the result."""
        batch_rows, logits_rows = [], []
        for name, answer, drafts in rows:
            tokens = [*PROMPT, *answer, *drafts]
            first = len(PROMPT) + len(answer)
            batch_rows.append(
                BatchRow(
                    name,
                    SamplingParams(),
                    self.stash[name],
                    len(PROMPT),
                    first - 1,
                    1 + len(drafts),
                    tokens,
                    len(drafts),
                )
            )
            logits_rows += [
                LogitsRow(name, SamplingParams(), self.stash[name], len(PROMPT), p, tokens[:p], first)
                for p in range(first, len(tokens) + 1)
            ]
        batch = cast(RunnerBatch, SimpleNamespace(step=0, stash=Stash(), rows=batch_rows))
        self.listener.on_batch(batch)
        logits = torch.zeros(len(logits_rows), V)
        changed = self.listener.on_logits(logits_rows, logits)
        assert changed == bool(torch.isinf(logits).any())
        result = StepResult(
            step=0, requests={n: RequestResult(tokens=list(t), num_computed=0) for n, t in drawn.items()}
        )
        self.listener.on_tokens(batch, result)
        return [set(torch.isfinite(row).nonzero().flatten().tolist()) for row in logits], result


@pytest.fixture
def worker() -> Worker:
    return Worker()


EVERYTHING = set(range(V))


def test_rows_are_masked_and_an_answer_ends_with_its_grammar(worker: Worker) -> None:
    worker.add("bound", "2")
    worker.add("free", None)
    allowed, result = worker.step(("bound", [], []), ("free", [], []), drawn={"bound": [0], "free": [9]})
    assert allowed == [{0, 38}, EVERYTHING]
    assert result.requests["bound"].finish_reason is None
    allowed, result = worker.step(("free", [9], []), ("bound", [0], []), drawn={"bound": [1], "free": [9]})
    assert allowed == [EVERYTHING, {1, 38}]
    assert result.requests["bound"].finish_reason == "stop"
    assert result.requests["free"].finish_reason is None


def test_an_end_token_ends_whatever_the_request_ignores(worker: Worker) -> None:
    worker.add("bound", "9")
    _, result = worker.step(("bound", [], []), drawn={"bound": [38]})
    assert (result.requests["bound"].tokens, result.requests["bound"].finish_reason) == ([38], "stop")


def test_draft_rows_are_masked_behind_the_drafts_before_them(worker: Worker) -> None:
    worker.add("bound", "9")
    worker.step(("bound", [], []), drawn={"bound": [0]})
    allowed, result = worker.step(("bound", [0], [1, 7, 3]), drawn={"bound": [1, 2]})
    assert allowed[:2] == [{1, 38}, {2, 38}]
    assert result.requests["bound"].tokens == [1, 2]
    allowed, _ = worker.step(("bound", [0, 1, 2], []), drawn={"bound": [3]})
    assert allowed == [{3, 38}]


def test_what_is_drawn_behind_the_end_is_dropped(worker: Worker) -> None:
    worker.add("bound", "3")
    worker.step(("bound", [], []), drawn={"bound": [0]})
    allowed, result = worker.step(("bound", [0], [1, 2, 5]), drawn={"bound": [1, 2, 5, 6]})
    assert allowed[:2] == [{1, 38}, {2, 38}]
    assert (result.requests["bound"].tokens, result.requests["bound"].finish_reason) == ([1, 2], "stop")
    worker.add("other", "9")
    _, result = worker.step(("other", [], [38, 5]), drawn={"other": [38, 5]})
    assert (result.requests["other"].tokens, result.requests["other"].finish_reason) == ([38], "stop")


def test_a_preempted_request_goes_on_where_it_was(worker: Worker) -> None:
    worker.add("bound", "9")
    worker.step(("bound", [], []), drawn={"bound": [0]})
    worker.listener.on_remove("bound")
    worker.add("bound", "9", answer=[0, 1, 2])
    allowed, _ = worker.step(("bound", [0, 1, 2], []), drawn={"bound": [3]})
    assert allowed == [{3, 38}]


def test_tokens_that_others_confirmed_are_caught_up_with(worker: Worker) -> None:
    worker.add("bound", "9")
    worker.step(("bound", [], []), drawn={"bound": [0]})
    allowed, _ = worker.step(("bound", [0, 1, 2, 3], []), drawn={"bound": [4]})
    assert allowed == [{4, 38}]


@pytest.mark.parametrize(
    ("text", "told", "kind"),
    [
        ("99", "too large a state", "request"),
        ("98", "KeyError: 'a fault of the backend'", "plugin"),
        ("bad", "structured: bad", "request"),
    ],
)
def test_what_fails_fails_its_request_alone(worker: Worker, text: str, told: str, kind: str) -> None:
    worker.add("broken", text)
    worker.add("bound", "9")
    allowed, result = worker.step(("broken", [], []), ("bound", [], []), drawn={"broken": [0], "bound": [0]})
    assert allowed == [EVERYTHING, {0, 38}]
    assert told in (result.requests["broken"].error or "")
    assert result.requests["broken"].error_kind == kind
    assert result.requests["bound"].error is None


def test_a_token_that_does_not_fit_fails_its_request(worker: Worker) -> None:
    worker.add("bound", "9")
    _, result = worker.step(("bound", [], []), drawn={"bound": [5]})
    assert "token 5 is not what" in (result.requests["bound"].error or "")


def test_a_form_may_begin_behind_some_ids(worker: Worker) -> None:
    worker.add("bound", "9", after_ids=(20, 21))
    allowed, result = worker.step(("bound", [], []), drawn={"bound": [38]})
    assert allowed == [EVERYTHING]
    assert result.requests["bound"].finish_reason is None, "an end token of the free part is the scheduler's"
    worker.step(("bound", [38], []), drawn={"bound": [20]})
    worker.step(("bound", [38, 20], []), drawn={"bound": [20]})
    allowed, _ = worker.step(("bound", [38, 20, 20], []), drawn={"bound": [21]})
    assert allowed == [EVERYTHING]
    allowed, _ = worker.step(("bound", [38, 20, 20, 21], []), drawn={"bound": [0]})
    assert allowed == [{0, 38}]
    allowed, _ = worker.step(("bound", [38, 20, 20, 21, 0], [1]), drawn={"bound": [1, 2]})
    assert allowed == [{1, 38}, {2, 38}]


def test_drafts_may_cross_the_beginning_of_a_form(worker: Worker) -> None:
    worker.add("bound", "9", after_ids=(20, 21))
    allowed, _ = worker.step(("bound", [], [7, 20, 21, 0, 1]), drawn={"bound": [7, 20]})
    assert allowed == [EVERYTHING] * 3 + [{0, 38}, {1, 38}, {2, 38}]
    allowed, _ = worker.step(("bound", [7, 20], [21]), drawn={"bound": [21, 0]})
    assert allowed == [EVERYTHING, {0, 38}]
    allowed, _ = worker.step(("bound", [7, 20, 21, 0], []), drawn={"bound": [1]})
    assert allowed == [{1, 38}]


def test_an_answer_that_does_not_open_has_its_form_at_once(worker: Worker) -> None:
    worker.add("bound", "9", after_ids=(21,), opening_id=20)
    allowed, _ = worker.step(("bound", [], []), drawn={"bound": [0]})
    assert allowed == [{0, 20, 38}]
    allowed, _ = worker.step(("bound", [0], [1]), drawn={"bound": [1, 2]})
    assert allowed == [{1, 38}, {2, 38}]
    worker.add("thinks", "9", after_ids=(21,), opening_id=20)
    allowed, _ = worker.step(("thinks", [], []), drawn={"thinks": [20]})
    assert allowed == [{0, 20, 38}]
    allowed, _ = worker.step(("thinks", [20], [5, 21, 0]), drawn={"thinks": [5, 21, 0, 1]})
    assert allowed == [EVERYTHING, EVERYTHING, {0, 38}, {1, 38}]


def test_drafts_may_open(worker: Worker) -> None:
    worker.add("thinks", "9", after_ids=(21,), opening_id=20)
    allowed, _ = worker.step(("thinks", [], [20, 7, 21, 0]), drawn={"thinks": [20, 7, 21]})
    assert allowed == [{0, 20, 38}, EVERYTHING, EVERYTHING, {0, 38}, {1, 38}]
    allowed, _ = worker.step(("thinks", [20, 7, 21], []), drawn={"thinks": [0]})
    assert allowed == [{0, 38}]
    worker.add("other", "9", after_ids=(21,), opening_id=20)
    allowed, _ = worker.step(("other", [], [0, 1]), drawn={"other": [20]})
    assert allowed == [{0, 20, 38}, {1, 38}, {2, 38}]
    allowed, _ = worker.step(("other", [20], []), drawn={"other": [9]})
    assert allowed == [EVERYTHING]


def test_a_preempted_request_remembers_where_its_form_began(worker: Worker) -> None:
    for answer, expected in (([7, 20], EVERYTHING), ([7, 20, 21, 0], {1, 38})):
        worker.add("bound", "9", answer=answer, after_ids=(20, 21))
        allowed, _ = worker.step(("bound", answer, []), drawn={"bound": [1]})
        assert allowed == [expected]
        worker.listener.on_remove("bound")


def test_chunks_of_a_prompt_need_no_masks(worker: Worker) -> None:
    worker.add("bound", "9")
    row = BatchRow("bound", SamplingParams(), worker.stash["bound"], 3, 0, 2, PROMPT[:2], 0)
    batch: Any = SimpleNamespace(step=0, stash=Stash(), rows=[row])
    worker.listener.on_batch(batch)
    assert worker.listener.on_logits([], torch.zeros(0, V)) is False
    worker.listener.on_tokens(
        batch, StepResult(step=0, requests={"bound": RequestResult(tokens=[], num_computed=2)})
    )
    allowed, _ = worker.step(("bound", [], []), drawn={"bound": [0]})
    assert allowed == [{0, 38}]


# Drawn first --------------------------------------------------------------------------------------------


def first_row(worker: Worker, answer: Sequence[int]) -> tuple[Any, LogitsRow]:
    tokens, end = [*PROMPT, *answer], len(PROMPT) + len(answer)
    stash = worker.stash["bound"]
    row = BatchRow(
        "bound", SamplingParams(), stash, len(PROMPT), end - 1, 1, tokens, num_drafts=0, drawn_first=True
    )
    batch = SimpleNamespace(step=0, stash=Stash(), rows=[row])
    logits_row = LogitsRow("bound", SamplingParams(), stash, len(PROMPT), end, tokens, end, drawn_first=True)
    return batch, logits_row


def drawn(worker: Worker, batch: Any, token: int) -> RequestResult:
    outcome = RequestResult(tokens=[token], num_computed=0)
    worker.listener.on_tokens(batch, StepResult(step=0, requests={"bound": outcome}))
    return outcome


def allowed_by(worker: Worker, row: LogitsRow) -> set[int]:
    logits = torch.zeros(1, V)
    assert worker.listener.on_logits([row], logits)
    return set(torch.isfinite(logits[0]).nonzero().flatten().tolist())


def test_a_fitting_token_drawn_first_needs_no_mask(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.add("bound", "3")
    batch, row = first_row(worker, [])
    worker.listener.on_batch(batch)
    assert list(worker.listener.on_drawn([row], [0])) == []
    assert drawn(worker, batch, 0).finish_reason is None
    monkeypatch.setattr(Counting, "fill_mask", None)  # from here on nothing is to be asked for one
    for answer, token, reason in (([0], 1, None), ([0, 1], 2, "stop")):
        batch, row = first_row(worker, answer)
        worker.listener.on_batch(batch)
        assert list(worker.listener.on_drawn([row], [token])) == []
        assert drawn(worker, batch, token).finish_reason == reason


def test_a_refused_token_drawn_first_is_drawn_again_under_the_mask(worker: Worker) -> None:
    worker.add("bound", "9")
    for answer in ([], [0], [0, 1]):  # the first mask is made ahead, the others when they are needed
        batch, row = first_row(worker, answer)
        worker.listener.on_batch(batch)
        assert list(worker.listener.on_drawn([row], [7])) == [0]
        assert allowed_by(worker, row) == {len(answer), 38}
        assert drawn(worker, batch, len(answer)).error is None


def test_a_token_that_another_listener_refused_is_taken_back(worker: Worker) -> None:
    worker.add("bound", "9")
    for answer in ([], [0], [0, 1]):
        batch, row = first_row(worker, answer)
        worker.listener.on_batch(batch)
        assert list(worker.listener.on_drawn([row], [len(answer)])) == []
        assert allowed_by(worker, row) == {len(answer), 38}
        assert drawn(worker, batch, len(answer)).error is None
    batch, row = first_row(worker, [0, 1, 2])
    worker.listener.on_batch(batch)
    assert list(worker.listener.on_drawn([row], [3])) == []
    assert drawn(worker, batch, 38).finish_reason == "stop"


def test_free_tokens_drawn_first_are_not_refused(worker: Worker) -> None:
    worker.add("bound", "9", after_ids=(21,), opening_id=20)
    for answer, token, refused in (
        ([], 7, [0]),  # neither the opening nor what the form begins with
        ([], 20, []),
        ([20], 7, []),
        ([20, 7], 21, []),
        ([20, 7, 21], 7, [0]),
        ([20, 7, 21], 0, []),
        ([20, 7, 21, 0], 1, []),
    ):
        batch, row = first_row(worker, answer)
        worker.listener.on_batch(batch)
        assert list(worker.listener.on_drawn([row], [token])) == refused, answer
        if not refused:
            assert drawn(worker, batch, token).error is None


def test_what_fails_when_a_token_is_judged_fails_its_request(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.add("bound", "9")
    batch, row = first_row(worker, [])
    worker.listener.on_batch(batch)
    monkeypatch.setattr(Counting, "accept", lambda self, token: 1 // 0)
    assert list(worker.listener.on_drawn([row], [0])) == []
    assert "ZeroDivisionError" in (drawn(worker, batch, 0).error or "")


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000])
def test_a_mask_is_its_bits_whichever_way_it_is_told(vocab_size: int) -> None:
    random = np.random.default_rng(vocab_size)
    for share in (0.0, 0.01, 0.5, 0.99, 1.0):
        allowed = random.random(vocab_size) < share
        allowed[random.integers(vocab_size)] = True
        padded = np.zeros(-(-vocab_size // 32) * 32, bool)
        padded[:vocab_size] = allowed
        logits = random.normal(size=vocab_size).astype(np.float32)
        expected = np.where(allowed, logits, -np.inf)
        Mask.of(np.packbits(padded, bitorder="little").tobytes(), vocab_size).put_on(logits)
        assert np.array_equal(logits, expected)
