"""Scheduler, KV cache and loop under random pressure, against a strict worker over simulated memory.

`Simulation` checks after every step: budgets kept, books balanced, every read of KV memory right (so no block has
two writers and no hit finds what was never computed). At the end: same tokens as alone, nothing left behind.
"""

from __future__ import annotations

import os
import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.core.errors import RequestError
from headrace.core.interfaces import Constraint, Wait
from headrace.core.request import BlockKey, Request
from headrace.core.scheduler.policies import FCFSPolicy, PriorityPolicy
from headrace.testing.fakes import FakeProposer, fake_layout
from headrace.testing.simulation import Simulation

FUZZ = int(os.environ.get("HEADRACE_FUZZ", "1"))
SEEN = dict.fromkeys(
    (
        "preempted",
        "cached",
        "accepted",
        "skipped",
        "parked",
        "refused",
        "failed",
        "windowed",
        "ahead",
        "reset",
    ),
    0,
)


class Moody(Constraint):
    """Refuses, parks, halves or lets pass, at random but reproducibly."""

    name = "moody"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def limit(self, request: Request, start: int, count: int) -> int | Wait:
        mood = self._random.random()
        if mood < 0.005:
            SEEN["refused"] += 1
            raise RequestError("not in this mood")
        if mood < 0.1:
            SEEN["parked"] += 1
            return Wait("mood")
        return max(1, count // 2) if mood < 0.3 else count


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 2**16),
        windows=st.sampled_from([(None,), (None, 8), (6,), (None, 8, 8, 3)]),
        block_size=st.sampled_from([1, 2, 4]),
        mode=st.sampled_from(
            ["plain", "three plans", "runs ahead", "drafts", "drafts in three plans", "loses"]
        ),
        budget=st.sampled_from([4, 8, 64]),
        seqs=st.sampled_from([1, 2, 4]),
        caching=st.booleans(),
        policy=st.sampled_from([FCFSPolicy, PriorityPolicy]),
        lookahead=st.sampled_from([0, 0, 2]),
        threshold=st.sampled_from([0, 3]),
        moody=st.booleans(),
        failing=st.sampled_from([0, 0, 0.5]),
    )
    def start(
        self,
        seed,
        windows,
        block_size,
        mode,
        budget,
        seqs,
        caching,
        policy,
        lookahead,
        threshold,
        moody,
        failing,
    ):
        self.random = random.Random(seed)
        self.mode = mode
        losing = random.Random(seed)
        self.sim = Simulation(
            layout=fake_layout(*windows, block_size=block_size),
            # Enough for one request in every group, and far too little for all of them.
            num_blocks=(45 // block_size + 4) * len(windows),
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=40,
            prefix_caching=caching,
            policy=policy(),
            lookahead=lookahead,
            long_prefill_token_threshold=threshold,
            constraints=[Moody(seed)] if moody else [],
            max_in_flight=1 if mode in ("plain", "drafts") else 3,
            runs_ahead=mode == "runs ahead",
            proposer=FakeProposer(3) if mode.startswith("drafts") else None,
            lose=(lambda name, step: losing.random() < 0.15) if mode == "loses" else None,
            # Two plans may be in flight behind one that fails, and go with it; three failures in a row stop all.
            raise_at=frozenset(step for step in range(0, 1000, 5) if self.random.random() < failing),
        )
        self.shared = [self.random.randrange(1000) for _ in range(16)]
        self.windowed = any(window is not None for window in windows)

    @rule(
        shared=st.integers(0, 16),
        own=st.integers(1, 8),
        answer=st.integers(0, 15),
        priority=st.integers(0, 2),
        adapter=st.sampled_from([None, None, b"adapter"]),
    )
    def add(self, shared, own, answer, priority, adapter):
        prompt = self.shared[:shared] + [self.random.randrange(1000) for _ in range(own)]
        self.sim.add(
            f"r{len(self.sim.requests)}",
            prompt,
            max_tokens=answer,
            priority=priority,
            block_keys=[BlockKey(0, None, adapter)] if adapter else [],
            prompt_logprobs=None if answer else 1,  # asked for nothing else, the prompt alone is computed
        )

    @rule(steps=st.integers(1, 6))
    def steps(self, steps):
        for _ in range(steps):
            if self.sim.engine.has_work:
                self.sim.step()

    @precondition(lambda self: self.sim.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.sim.abort(data.draw(st.sampled_from(sorted(self.sim.requests))))

    @rule()
    def reset_prefix_cache(self):
        idle = self.sim.kv.num_free == self.sim.kv.num_blocks
        assert self.sim.scheduler.reset_prefix_cache() == idle
        SEEN["reset"] += idle and bool(self.sim.plans)

    def teardown(self):
        if not hasattr(self, "sim"):
            return
        sim = self.sim
        sim.run()
        for name, reason in sim.reasons.items():
            expected = sim.expected(name)
            if reason in ("abort", "error"):
                assert sim.tokens[name] == expected[: len(sim.tokens[name])]
                SEEN["failed"] += "was told to fail" in sim.errors.get(name, "")
            else:
                assert reason == "length", sim.errors
                assert sim.tokens[name] == expected
        metrics = sim.engine.metrics()
        SEEN["preempted"] += int(metrics["num_preemptions"])
        SEEN["cached"] += int(metrics["prefix_cache_hits"])
        SEEN["accepted"] += sim.executor.num_accepted_drafts
        SEEN["skipped"] += sim.executor.num_skipped
        SEEN["windowed"] += self.windowed and any(len(tokens) > 8 for tokens in sim.tokens.values())
        SEEN["ahead"] += self.mode == "runs ahead" and len(sim.plans) > 3


def test_scheduler_stateful() -> None:
    # What is drawn depends on the constants of all modules that are loaded, so a run may miss something.
    for examples in (200, 400, 800):
        run_state_machine_as_test(
            SchedulerMachine,
            settings=settings(
                max_examples=examples * FUZZ, stateful_step_count=50, derandomize=True, deadline=None
            ),
        )
        if all(SEEN.values()):
            break
    # The run is worth nothing unless each of these happened.
    assert all(SEEN.values()), SEEN
