"""Prompt lookup: what is found, what is drafted from it, and that neither takes longer as a request grows."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.interfaces import BatchRow
from headrace.core.plan import NewRequest, RequestResult, StepResult
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.plugins.speculative.ngram import NgramProposer
from headrace.plugins.speculative.options import SpeculativeSection
from headrace.plugins.speculative.suffix_index import Match, SuffixIndex


def common(ids: list[int], place: int, longest: int) -> int:
    """How many ids before `place` are as those at the end."""
    length = 0
    while length < min(longest, place) and ids[place - length - 1] == ids[-length - 1]:
        length += 1
    return length


def best(ids: list[int], shortest: int, longest: int) -> Match | None:
    """The place by looking through everything: most in common, the latest of equals."""
    found = [Match(common(ids, place, longest), place) for place in range(shortest, len(ids))]
    return max((m for m in found if m.length >= shortest), default=None)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=8), st.integers(1, 3), st.integers(0, 3))
def test_matches_are_those_of_a_search_through_everything(
    parts: list[list[int]], shortest: int, more: int
) -> None:
    longest = shortest + more
    ids: list[int] = []
    index = SuffixIndex(shortest, longest)
    for part in parts:
        index.extend(part)
        ids += part
        assert len(index) == len(ids)
        fresh = SuffixIndex(shortest, longest)
        fresh.extend(list(ids))
        assert fresh.match() == best(ids, shortest, longest)
        match = index.match()
        assert (match is None) == (fresh.match() is None)
        if match is not None:
            # A place that the request followed may be an older one: it has no less in common.
            right = best(ids, shortest, longest)
            assert right is not None
            assert match.length == right.length == common(ids, match.position, longest)


def test_a_place_that_the_request_follows_stays() -> None:
    text = [1, 2, 3, 4, 50, 51, 52, 53, 54, 55]
    index = SuffixIndex(2, 4)
    index.extend([*text, 9, 9, 1, 2, 3, 4, 50])
    match = index.match()
    assert match == Match(4, 5)
    index.extend([51, 52])
    match = index.match()
    assert match == Match(4, 7)
    assert index.following(match.position, 3) == [53, 54, 55]


def test_copies_go_on_into_themselves() -> None:
    index = SuffixIndex(2, 4)
    index.extend([7, 7, 7])
    match = index.match()
    assert match is not None
    assert index.following(match.position, 5) == [7] * 5
    index = SuffixIndex(2, 4)
    index.extend([1, 2, 3] * 3)
    match = index.match()
    assert match == Match(4, 6)
    assert index.following(match.position, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("ids", [[], [4], [4, 4], [1, 2, 3, 4, 5]])
def test_nothing_is_found_where_nothing_recurs(ids: list[int]) -> None:
    index = SuffixIndex(2, 4)
    index.extend(ids)
    assert index.match() is None


@pytest.mark.parametrize("kind", ["random", "one id", "copies"])
def test_a_step_takes_no_longer_in_a_long_request(kind: str) -> None:
    """A look through 200,000 ids takes milliseconds."""
    draw = random.Random(0)
    some = [draw.randrange(30) for _ in range(1000)]
    ids = {
        "random": [draw.randrange(5) for _ in range(200_000)],
        "one id": [7] * 200_000,
        "copies": some * 200,
    }[kind]
    index = SuffixIndex(2, 4)
    index.extend(ids)
    found = 0
    started = time.thread_time()
    for step in range(2000):
        match = index.match()
        drafts = index.following(match.position, 5) if match else []
        found += len(drafts)
        index.extend([*drafts[: step % 3], step % 7])
    assert time.thread_time() - started < 2000 * 4e-4
    assert found > 2000


# The proposer -------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """A step as the runner shows it."""

    rows: list[BatchRow]
    step: int = 0
    started: float = field(default_factory=time.perf_counter)
    stash: Stash = field(default_factory=Stash)


class Requests:
    """Plays the runner for requests of its own."""

    def __init__(self, **section: Any) -> None:
        options = {"method": "ngram", "adaptive": False, **section}
        self.proposer = NgramProposer(SpeculativeSection(**options))
        self.params = SamplingParams()

    def add(self, name: str, params: SamplingParams | None = None) -> None:
        self.proposer.on_add(
            NewRequest(
                request_id=name,
                token_ids=[0],
                num_prompt_tokens=1,
                params=params or self.params,
                start=0,
                count=1,
                block_ids=[[1]],
            )
        )

    def step(self, *rows: tuple[str, list[int], int, int, list[int]]) -> dict[str, list[int]]:
        """(name, ids up to the step's end, where it starts, drafts at its end, what is drawn) -> drafts."""
        batch = [
            BatchRow(name, self.params, Stash(), 0, start, len(ids) - start, ids, num_drafts)
            for name, ids, start, num_drafts, _ in rows
        ]
        results = {
            name: RequestResult(tokens=drawn, num_computed=len(ids)) for name, ids, _, _, drawn in rows
        }
        hidden: Any = None
        found = self.proposer.propose(Batch(batch), hidden, {}, StepResult(step=0, requests=results))
        return {name: list(drafts) for name, drafts in found.items()}


def test_drafts_follow_prompt_and_answer_and_never_rejected_drafts() -> None:
    play = Requests()
    play.add("a")
    play.add("b")
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    # A chunk, the rest of the prompt with a first token, and a request that has nothing to copy.
    assert play.step(("a", prompt[:6], 0, 0, []), ("b", [5, 6, 7], 0, 0, [8])) == {}
    assert play.step(("a", prompt, 6, 0, [2]), ("b", [5, 6, 7, 8], 3, 0, [9])) == {"a": [3, 4, 5, 6, 7]}
    # Two of them are right: 3 4, and then 50.
    ids = [*prompt, 2, 3, 4, 5, 6, 7]
    assert play.step(("a", ids, 10, 5, [3, 4, 50])) == {}
    # Drafts 5 6 7 were rejected: what followed there is 50.
    ids = [*prompt, 2, 3, 4, 50]
    assert play.step(("a", ids, 13, 0, [3])) == {}
    assert play.step(("a", [*ids, 3], 14, 0, [4])) == {"a": [50, 3, 4, 50, 3]}


def test_a_prompt_shorter_than_what_is_looked_for() -> None:
    play = Requests(prompt_lookup_min=3, prompt_lookup_max=3)
    play.add("a")
    assert play.step(("a", [5], 0, 0, [5])) == {}
    assert play.step(("a", [5, 5], 1, 0, [5])) == {}
    assert play.step(("a", [5, 5, 5], 2, 0, [5])) == {"a": [5] * 5}


def test_requests_that_draw_nothing_or_left_are_passed_over() -> None:
    play = Requests()
    play.add("embedded", SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert play.step(("embedded", [3, 3, 3, 3], 0, 0, [])) == {}
    play.add("a")
    assert play.step(("a", [3, 3, 3], 0, 0, [3])) == {"a": [3] * 5}
    play.proposer.on_remove("a")
    play.proposer.on_remove("never came")
    play.add("a")  # another one of that name
    assert play.step(("a", [4, 5, 6], 0, 0, [7])) == {}
