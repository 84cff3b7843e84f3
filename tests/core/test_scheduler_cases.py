"""What the scheduler promises, one case at a time, on simulated memory."""

from __future__ import annotations

import msgspec
import pytest

from headrace.core.errors import EngineError, RequestError
from headrace.core.interfaces import Constraint, Wait
from headrace.core.request import BlockKey, Request
from headrace.core.scheduler.policies import PriorityPolicy
from headrace.testing.fakes import FakeProposer, fake_layout
from headrace.testing.simulation import Simulation


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def assert_all_as_alone(sim: Simulation) -> None:
    for name in sim.requests:
        assert sim.tokens[name] == sim.expected(name), name


# Unified token scheduling -------------------------------------------------------------------------------


def test_one_step_holds_a_prompt_chunk_decodes_and_drafts() -> None:
    sim = Simulation(max_num_batched_tokens=16, proposer=FakeProposer(2, wrong_every=100), num_blocks=200)
    sim.add("decoding", prompt(4), max_tokens=30)
    for _ in range(3):
        sim.step()
    sim.add("long", prompt(60, 500), max_tokens=4)
    sim.run()
    mixed = [
        plan
        for plan in sim.plans
        if any(entry.num_drafts for entry in plan.continued)
        and any(entry.count > 3 for entry in [*plan.new, *plan.continued])
    ]
    assert mixed
    assert sim.executor.num_accepted_drafts > 0
    assert_all_as_alone(sim)


def test_short_requests_leave_and_enter_while_a_long_one_runs() -> None:
    sim = Simulation(max_num_seqs=2, num_blocks=200)
    sim.add("long", prompt(4), max_tokens=100)
    for i in range(6):
        sim.add(f"short{i}", prompt(4, 10 * i), max_tokens=5)
    steps = sim.run()
    assert steps < 110  # batches that wait for their longest member would take 100 + 5 · 5
    assert_all_as_alone(sim)


def test_a_long_prompt_is_chunked_and_decodes_go_on_meanwhile() -> None:
    sim = Simulation(max_num_batched_tokens=32, max_model_len=600, num_blocks=400)
    sim.add("decoding", prompt(4), max_tokens=40)
    sim.step()
    sim.add("long", prompt(500, 1000), max_tokens=2)
    sim.run()
    chunks = [
        plan
        for plan in sim.plans
        if any(entry.request_id == "long" for entry in [*plan.new, *plan.continued])
    ]
    assert len(chunks) >= 16
    for plan in chunks[:-1]:
        assert any(entry.request_id == "decoding" for entry in plan.continued)
    assert_all_as_alone(sim)


def test_the_threshold_caps_one_prompt_unless_it_runs_alone() -> None:
    sim = Simulation(max_num_batched_tokens=64, long_prefill_token_threshold=8, num_blocks=200)
    sim.add("alone", prompt(60), max_tokens=1)
    sim.run()
    assert sim.plans[0].new[0].count == 60
    sim.add("first", prompt(60, 100), max_tokens=1)
    sim.add("second", prompt(60, 200), max_tokens=1)
    sim.run()
    counts = [entry.count for plan in sim.plans[2:] for entry in [*plan.new, *plan.continued]]
    assert max(counts[:6]) == 8


def test_a_steady_decode_plan_does_not_grow_with_the_prompt() -> None:
    sizes = []
    for length in (8, 200):
        sim = Simulation(num_blocks=200, max_num_batched_tokens=256)
        sim.add("a", prompt(length), max_tokens=12)
        sim.run()
        entries = [entry for plan in sim.plans for entry in plan.continued]
        sizes.append([(len(e.new_token_ids), sum(len(ids) for ids in e.new_block_ids)) for e in entries])
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) == 11


def test_a_resumed_request_comes_as_new_with_all_its_blocks() -> None:
    sim = Simulation(num_blocks=6, prefix_caching=False)
    sim.add("a", prompt(6), max_tokens=16)
    sim.add("b", prompt(6, 50), max_tokens=16)
    sim.run()
    again = [new for plan in sim.plans for new in plan.new if len(new.token_ids) > new.num_prompt_tokens]
    assert again
    assert sim.engine.metrics()["num_preemptions"] > 0
    for new in again:
        assert new.start == 0
        assert len(new.block_ids[0]) == -(-(new.start + new.count) // 4)
    removed = [name for plan in sim.plans for name in plan.removed]
    assert removed.count(again[0].request_id) == 2  # preempted once, finished once
    assert_all_as_alone(sim)


# Preemption and policies --------------------------------------------------------------------------------


def test_text_is_not_cut_short_by_preemption() -> None:
    """Source: vllm-project/vllm#16832."""
    runs = {}
    for blocks in (20, 400):
        sim = Simulation(num_blocks=blocks, max_num_seqs=12)
        for i in range(12):
            sim.add(str(i), prompt(16, 100 * i), max_tokens=24)
        sim.run()
        runs[blocks] = (sim.tokens, sim.engine.metrics()["num_preemptions"])
        assert all(len(tokens) == 24 for tokens in sim.tokens.values())
        assert set(sim.reasons.values()) == {"length"}
    assert runs[20][0] == runs[400][0]
    assert runs[20][1] > 0
    assert runs[400][1] == 0


def test_a_preempted_request_is_not_thrown_back_again_and_again() -> None:
    """Source: vllm-project/vllm#41951."""
    order: list[str] = []
    sim = Simulation(
        num_blocks=120,
        layout=fake_layout(block_size=16),
        max_num_seqs=30,
        max_num_batched_tokens=512,
        policy=PriorityPolicy(),
    )
    for i in range(30):
        sim.add(f"{i:02}", prompt(64, 100 * i), max_tokens=128, ignore_eos=True)
    sim.run()
    assert sim.engine.metrics()["num_preemptions"] > 0
    assert max(sim.preemptions.values()) <= 4
    order = [new.request_id for plan in sim.plans for new in plan.new]
    never_ran = set(sim.requests)
    waiting: set[str] = set()
    for plan in sim.plans:
        for new in plan.new:
            if new.request_id in never_ran:
                assert not waiting, f"{new.request_id} never ran and went before {waiting}"
            never_ran.discard(new.request_id)
            waiting.discard(new.request_id)
        waiting |= {
            name for name in plan.removed if name in order and name not in sim_finished(sim, plan.step)
        }
    assert_all_as_alone(sim)


def sim_finished(sim: Simulation, step: int) -> set[str]:
    """Requests that no plan from `step` on holds."""
    later = {e.request_id for plan in sim.plans[step:] for e in [*plan.new, *plan.continued]}
    return set(sim.requests) - later


def test_a_long_prompt_is_not_begun_and_evicted_for_ever() -> None:
    """Source: vllm-project/vllm#25538."""

    def build() -> Simulation:
        return Simulation(
            num_blocks=40, layout=fake_layout(block_size=16), max_num_batched_tokens=64, max_model_len=640
        )

    alone = 0
    for length, answer in ((200, 200), (500, 10)):
        sim = build()
        sim.add("x", prompt(length), max_tokens=answer)
        alone += sim.run()
    sim = build()
    sim.add("A", prompt(200), max_tokens=200, ignore_eos=True)
    for _ in range(4):
        sim.step()
    sim.add("B", prompt(500, 1000), max_tokens=10)
    steps = sim.run() + 4
    assert sim.preemptions["B"] <= 2
    assert steps <= 1.5 * alone
    assert_all_as_alone(sim)


def test_an_urgent_newcomer_takes_the_place_of_a_patient_one() -> None:
    sim = Simulation(max_num_seqs=1, policy=PriorityPolicy())
    sim.add("patient", prompt(8), max_tokens=30, priority=5)
    for _ in range(6):
        sim.step()
    sim.add("urgent", prompt(8, 100), max_tokens=4, priority=0)
    sim.run()
    assert sim.preemptions["patient"] == 1
    order = [new.request_id for plan in sim.plans for new in plan.new]
    assert order == ["patient", "urgent", "patient"]
    assert_all_as_alone(sim)


def test_first_come_first_served_lets_nobody_take_a_place() -> None:
    sim = Simulation(max_num_seqs=1)
    sim.add("first", prompt(8), max_tokens=30)
    sim.step()
    sim.add("second", prompt(8, 100), max_tokens=4)
    sim.run()
    assert sim.engine.metrics()["num_preemptions"] == 0
    assert [new.request_id for plan in sim.plans for new in plan.new] == ["first", "second"]


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    sim = Simulation(num_blocks=20, max_num_seqs=12)
    for i in range(12):
        sim.add(str(i), prompt(16, 100 * i), max_tokens=24)
    sim.run()
    seen = 0
    finished_before: set[str] = set()
    for plan in sim.plans:
        preempted = [name for name in plan.removed if name not in sim_finished(sim, plan.step)]
        seen += bool(preempted)
        assert not (preempted and plan.new)
        finished_before |= set(plan.removed)
    assert seen


@pytest.mark.parametrize("block_size", [1, 8, 32, 64, 128])
def test_every_block_size_serves_what_its_pool_holds(block_size: int) -> None:
    """Source: sgl-project/sglang#4602."""
    sim = Simulation(
        layout=fake_layout(block_size=block_size), num_blocks=2048 // block_size, max_num_batched_tokens=256
    )
    for i in range(8):
        sim.add(str(i), prompt(100, 1000 * i), max_tokens=120)
    sim.run()
    assert_all_as_alone(sim)


# Requests that cannot be served -------------------------------------------------------------------------


def test_a_request_larger_than_the_pool_is_refused_and_others_are_served() -> None:
    """Source: vllm-project/vllm#35541."""
    sim = Simulation(num_blocks=50, layout=fake_layout(block_size=16), max_model_len=4096)
    sim.add("small", prompt(5), max_tokens=40)
    sim.add("huge", prompt(1000), max_tokens=40)
    sim.run()
    assert sim.reasons["huge"] == "error"
    assert "1000 tokens" in sim.errors["huge"]
    assert "800 tokens" in sim.errors["huge"]
    assert sim.tokens["small"] == sim.expected("small")
    sim.add("after", prompt(5), max_tokens=4)
    sim.run()
    assert sim.tokens["after"] == sim.expected("after")


def test_a_lone_request_that_fills_the_pool_ends_by_length() -> None:
    sim = Simulation(num_blocks=5, max_model_len=200)
    sim.add("a", prompt(8), max_tokens=100)
    sim.run()
    assert sim.reasons["a"] == "length"
    assert len(sim.tokens["a"]) == 12
    assert sim.tokens["a"] == sim.expected("a")[:12]


@pytest.mark.parametrize(("length", "message"), [(0, "empty"), (256, "at most 255"), (700, "at most 255")])
def test_prompts_of_impossible_length_are_refused(length: int, message: str) -> None:
    """Source: vllm-project/vllm#7632, #13067."""
    sim = Simulation()
    sim.add("bad", prompt(length))
    sim.add("good", prompt(3))
    sim.run()
    assert message in sim.errors["bad"]
    assert sim.tokens["good"] == sim.expected("good")


def test_the_longest_prompt_gets_its_one_token() -> None:
    sim = Simulation(max_num_batched_tokens=512)
    sim.add("a", prompt(255), max_tokens=30)
    sim.run()
    assert sim.tokens["a"] == sim.expected("a")[:1]
    assert sim.reasons["a"] == "length"


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    sim = Simulation()
    sim.add("a", prompt(3))
    sim.engine.add(sim.requests["a"])
    outputs = sim.step()
    assert any("being served already" in (output.error or "") for output in outputs)


# Aborts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_abort_in_every_state_frees_everything(max_in_flight: int) -> None:
    sim = Simulation(max_num_seqs=2, max_num_batched_tokens=8, max_in_flight=max_in_flight)
    sim.add("prefilling", prompt(60), max_tokens=5)
    sim.add("waiting", prompt(5, 100), max_tokens=5)
    sim.abort("never heard of")
    sim.step()
    sim.abort("prefilling", "waiting", "prefilling")
    sim.run()
    assert sim.reasons == {"prefilling": "abort", "waiting": "abort"}
    sim.abort("prefilling")
    sim.step()
    sim.check_drained()


# Several plans in flight --------------------------------------------------------------------------------


def test_three_plans_are_in_flight_and_change_nothing() -> None:
    sim = Simulation(max_in_flight=3, max_num_batched_tokens=8, num_blocks=40)
    most = 0
    for i in range(6):
        sim.add(str(i), prompt(20, 100 * i), max_tokens=10)
    while sim.engine.has_work:
        sim.step()
        most = max(most, len(sim.engine.snapshot()["in_flight"]))
    assert most == 2  # a third was in flight before its result was taken
    assert_all_as_alone(sim)


def test_a_worker_that_runs_ahead_is_not_waited_for() -> None:
    sim = Simulation(max_in_flight=2, runs_ahead=True)
    sim.add("a", prompt(5), max_tokens=20)
    steps = sim.run()
    assert steps <= 22
    ahead = [plan for plan in sim.plans if plan.continued and plan.continued[0].start > 5]
    assert ahead
    assert_all_as_alone(sim)


def test_blocks_freed_while_plans_are_in_flight_wait_behind_the_fence() -> None:
    sim = Simulation(max_in_flight=3, max_num_batched_tokens=4, num_blocks=12)
    sim.add("a", prompt(30), max_tokens=4)
    sim.step()
    assert sim.engine.snapshot()["in_flight"]
    sim.scheduler.finish(["a"], "abort")
    assert sim.kv.num_fenced > 0
    free = sim.kv.num_free
    sim.reasons["a"] = "abort"
    sim.run()
    assert sim.kv.num_fenced == 0
    assert sim.kv.num_free > free


def test_lost_kv_is_computed_again() -> None:
    lost: list[int] = []

    def lose(name: str, step: int) -> bool:
        if step in (2, 7):
            lost.append(step)
            return True
        return False

    sim = Simulation(lose=lose, max_num_batched_tokens=8)
    sim.add("a", prompt(30), max_tokens=10)
    sim.run()
    assert lost == [2, 7]
    assert_all_as_alone(sim)


# Drafts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong_every", [1, 2, 3, 1000])
def test_drafts_change_no_token(wrong_every: int) -> None:
    sim = Simulation(proposer=FakeProposer(4, wrong_every=wrong_every), lookahead=2)
    sim.add("a", prompt(9), max_tokens=30)
    sim.add("b", prompt(5, 100), max_tokens=21)
    steps = sim.run()
    assert_all_as_alone(sim)
    assert sim.executor.num_verified_drafts > 0
    if wrong_every == 1000:
        assert steps < 15
        assert sim.executor.num_accepted_drafts > 20


def test_rejected_drafts_never_reach_the_prefix_cache() -> None:
    sim = Simulation(proposer=FakeProposer(4, wrong_every=2))
    sim.add("a", prompt(9), max_tokens=30)
    sim.run()
    assert sim.executor.num_verified_drafts > sim.executor.num_accepted_drafts
    # The worker checks each cell it reads: a published block with a rejected draft in it would be found here.
    sim.add("b", [*prompt(9), *sim.tokens["a"][:-1]], max_tokens=6)
    sim.run()
    assert sim.cached["b"] > 9
    assert_all_as_alone(sim)


def test_drafts_leave_every_request_its_token() -> None:
    sim = Simulation(max_num_seqs=6, max_num_batched_tokens=8, proposer=FakeProposer(5, wrong_every=1000))
    for i in range(6):
        sim.add(f"r{i}", prompt(2, 10 * i), max_tokens=40)
    while len(sim.reasons) == 0:
        sim.step()
    assert sim.executor.num_accepted_drafts > 0
    # Whoever comes first in the batch gets more of what is spare; nobody stands still.
    decoding = [plan for plan in sim.plans if len(plan.continued) == 6]
    assert len(decoding) > 5
    assert all(len(plan.continued) == 6 for plan in sim.plans[sim.plans.index(decoding[0]) : -1])
    sim.run()
    assert_all_as_alone(sim)


def test_drafts_leave_room_for_prompts() -> None:
    sim = Simulation(max_num_seqs=5, max_num_batched_tokens=16, proposer=FakeProposer(8, wrong_every=1000))
    for i in range(4):
        sim.add(f"decoding{i}", prompt(2, 10 * i), max_tokens=60)
    for _ in range(2):
        sim.step()
    sim.add("long", prompt(40, 500), max_tokens=2)
    for _ in range(9):
        sim.step()
    assert len(sim.tokens["long"]) > 0
    sim.run()
    assert_all_as_alone(sim)


def test_nobody_is_preempted_for_drafts() -> None:
    # Five blocks of 4: enough for both while "a" lives, but not for places of drafts that are never accepted.
    sim = Simulation(num_blocks=5, proposer=FakeProposer(8, wrong_every=1), prefix_caching=False)
    sim.add("a", prompt(8), max_tokens=4)
    sim.add("b", prompt(4, 100), max_tokens=12)
    sim.run()
    assert sim.executor.num_verified_drafts > 0
    assert sim.engine.metrics()["num_preemptions"] == 0
    assert_all_as_alone(sim)


@pytest.mark.parametrize("short", [1, 2, 4, 6])
def test_drafts_end_with_the_context(short: int) -> None:
    """Source: vllm-project/vllm#24662."""
    sim = Simulation(max_model_len=32, num_blocks=9, proposer=FakeProposer(5, wrong_every=7), lookahead=5)
    sim.add("a", prompt(32 - short), max_tokens=40)
    sim.run()
    assert sim.reasons["a"] == "length"
    assert sim.tokens["a"] == sim.expected("a")[:short]
    assert max(e.start + e.count for plan in sim.plans for e in [*plan.new, *plan.continued]) <= 31


def test_places_for_drafting_end_with_the_context() -> None:
    sim = Simulation(max_model_len=32, num_blocks=8, proposer=FakeProposer(5), lookahead=20)
    sim.add("a", prompt(8), max_tokens=24)
    sim.run()
    assert sim.reasons["a"] == "length"
    assert sim.tokens["a"] == sim.expected("a")
    assert sum(len(plan.new[0].block_ids[0]) for plan in sim.plans if plan.new) == 7


# Prefix cache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [15, 16, 17])
def test_at_least_one_token_is_computed(length: int) -> None:
    """Source: GeeeekExplorer/nano-vllm#144."""
    sim = Simulation()
    for name in ("cold", "warm"):
        sim.add(name, prompt(length))
        sim.run()
    assert sim.cached["cold"] == 0
    assert sim.cached["warm"] == (length - 1) // 4 * 4
    assert sim.tokens["warm"] == sim.tokens["cold"] == sim.expected("cold")


def test_a_claimed_block_is_no_hit() -> None:
    """Source: GeeeekExplorer/nano-vllm#208."""
    sim = Simulation(max_num_batched_tokens=8)
    for i in range(6):
        sim.add(str(i), [*prompt(20), 100 + i], max_tokens=5)
    sim.run()
    assert max(sim.cached.values()) > 0
    assert_all_as_alone(sim)


def test_a_preempted_request_may_find_its_own_blocks() -> None:
    """Source: GeeeekExplorer/nano-vllm#211."""
    sim = Simulation(num_blocks=100, max_num_seqs=64)
    for i in range(40):
        sim.add(str(i), [*prompt(12), *prompt(10, 1000 + 100 * i)], max_tokens=40)
    sim.run()
    metrics = sim.engine.metrics()
    assert metrics["num_preemptions"] > 0
    assert metrics["prefix_cache_hits"] > 0
    assert_all_as_alone(sim)


def test_keys_keep_blocks_apart() -> None:
    sim = Simulation()
    keys = {"plain": [], "adapter": [BlockKey(0, None, b"a")], "image": [BlockKey(10, 14, b"i")]}
    for name, block_keys in keys.items():
        sim.add(name, prompt(21), block_keys=block_keys)
        sim.run()
    assert sim.cached == {"plain": 0, "adapter": 0, "image": 8}
    for name, block_keys in keys.items():
        sim.add(f"{name} again", prompt(21), block_keys=block_keys)
        sim.run()
        assert sim.cached[f"{name} again"] == 20


def test_the_cache_is_reset_only_while_nobody_holds_a_block() -> None:
    sim = Simulation()
    sim.add("a", prompt(21), max_tokens=4)
    sim.step()
    assert not sim.scheduler.reset_prefix_cache()
    sim.run()
    assert sim.scheduler.reset_prefix_cache()
    sim.add("b", prompt(21))
    sim.run()
    assert sim.cached["b"] == 0


def test_blocks_of_an_aborted_prefill_are_found_only_as_far_as_computed() -> None:
    sim = Simulation(max_num_batched_tokens=8)
    sim.add("a", prompt(40))
    sim.step()
    sim.abort("a")
    sim.step()
    sim.add("b", prompt(40))
    sim.run()
    assert sim.cached["b"] == 8
    assert_all_as_alone_except(sim, "a")


def assert_all_as_alone_except(sim: Simulation, *names: str) -> None:
    for name in set(sim.requests) - set(names):
        assert sim.tokens[name] == sim.expected(name)


# Window groups ------------------------------------------------------------------------------------------


def test_blocks_behind_the_window_go_back_while_the_request_runs() -> None:
    sim = Simulation(layout=fake_layout(8), max_num_batched_tokens=16, num_blocks=30)
    sim.add("a", prompt(60), max_tokens=20)
    held = []
    while sim.engine.has_work:
        sim.step()
        held.append(sim.kv.num_blocks - sim.kv.num_free)
    assert max(held) <= sim.kv.blocks_needed(80) < 20
    assert_all_as_alone(sim)


def test_a_hit_must_be_valid_in_all_groups() -> None:
    sim = Simulation(layout=fake_layout(None, 8), num_blocks=40)
    sim.add("a", prompt(33), max_tokens=1)
    sim.run()
    sim.add("b", prompt(33), max_tokens=1)
    sim.run()
    assert sim.cached["b"] == 32
    (new,) = sim.plans[-2].new
    full, window = new.block_ids
    assert all(full)
    assert window[:6] == [0] * 6  # (32 - 8 + 1) // 4 = 6 blocks are behind the window
    assert all(window[6:])
    # Take window blocks away: the hit shrinks to what both groups still have.
    sim.kv._pool.forget(window[7])
    sim.add("c", prompt(33), max_tokens=1)
    sim.run()
    assert sim.cached["c"] < 32
    assert_all_as_alone(sim)


# Parking ------------------------------------------------------------------------------------------------


class Gate(Constraint):
    """Holds back requests by name until opened."""

    name = "gate"

    def __init__(self) -> None:
        self.closed: set[str] = set()
        self.revoked: list[str] = []

    def limit(self, request: Request, start: int, count: int) -> int | Wait:
        return Wait("gate") if request.request_id in self.closed else count

    def revoke(self, request: Request, plan: object) -> None:
        self.revoked.append(request.request_id)


def test_a_parked_request_holds_no_place_and_blocks_nobody() -> None:
    """Source: vllm-project/vllm#53130."""
    gate = Gate()
    gate.closed = {f"parked{i}" for i in range(10)}
    sim = Simulation(max_num_seqs=2, constraints=[gate])
    for i in range(10):
        sim.add(f"parked{i}", prompt(5, 100 * i))
    for i in range(4):
        sim.add(f"free{i}", prompt(5, 5000 + 100 * i))
    while sum(name.startswith("free") for name in sim.reasons) < 4:
        sim.step()
    metrics = sim.engine.metrics()
    assert metrics['num_requests_waiting_by_reason{reason="gate"}'] == 10
    assert metrics["num_requests_running"] == 0
    sim.abort("parked0")
    gate.closed.clear()
    sim.engine.wake()
    sim.run()
    assert sim.reasons["parked0"] == "abort"
    assert_all_as_alone_except(sim, "parked0")


def test_a_request_parked_while_running_keeps_its_blocks_until_they_are_wanted() -> None:
    gate = Gate()
    sim = Simulation(constraints=[gate], num_blocks=10)
    sim.add("a", prompt(8), max_tokens=12)
    for _ in range(3):
        sim.step()
    gate.closed.add("a")
    sim.step()
    assert sim.scheduler.num_parked == 1
    assert sim.kv.num_free < sim.kv.num_blocks
    sim.add("b", prompt(30, 100), max_tokens=8)
    while "b" not in sim.reasons:
        sim.step()
    gate.closed.clear()
    sim.run()
    assert sim.preemptions["a"] == 1
    assert_all_as_alone(sim)


def test_blocks_of_one_who_waits_again_do_not_block_the_one_before_it() -> None:
    gate = Gate()
    gate.closed.add("first")
    sim = Simulation(constraints=[gate], num_blocks=12, max_num_seqs=1)
    sim.add("first", prompt(28), max_tokens=8)
    sim.add("second", prompt(24, 100), max_tokens=8)
    for _ in range(3):
        sim.step()
    gate.closed = {"first", "second"}
    sim.step()
    gate.closed.clear()  # second holds 7 of 12 blocks; first comes before it in the queue and needs 7
    sim.run()
    assert sim.preemptions["second"] == 1
    assert_all_as_alone(sim)


def test_who_was_parked_with_drafts_goes_on_in_a_full_pool() -> None:
    """All blocks are held by requests that wait again, and their drafts ask for more than there are."""
    gate = Gate()
    sim = Simulation(
        constraints=[gate], num_blocks=5, proposer=FakeProposer(8, wrong_every=1), prefix_caching=False
    )
    sim.add("a", prompt(9), max_tokens=7)
    sim.add("b", prompt(7, 100), max_tokens=8)
    sim.step()
    gate.closed = {"a", "b"}
    sim.step()
    assert sim.scheduler.num_parked == 2
    assert sim.kv.num_free == 0
    gate.closed.clear()
    sim.run(max_steps=100)
    assert_all_as_alone(sim)


class Broken(Constraint):
    name = "broken"

    def limit(self, request: Request, start: int, count: int) -> int | Wait:
        if request.request_id == "bad":
            raise KeyError("oops")
        return 10**6 if request.request_id == "greedy" else count


def test_a_failing_constraint_fails_its_request_alone() -> None:
    sim = Simulation(constraints=[Broken()])
    for name in ("good", "bad", "greedy"):
        sim.add(name, prompt(5))
    sim.run()
    assert "constraint 'broken' failed in limit: KeyError" in sim.errors["bad"]
    assert "allowed 1000000 tokens" in sim.errors["greedy"]
    assert sim.tokens["good"] == sim.expected("good")


def test_pause_and_resume() -> None:
    sim = Simulation()
    sim.add("a", prompt(5), max_tokens=10)
    sim.step()
    sim.scheduler.pause()
    assert sim.scheduler.schedule().is_empty
    sim.scheduler.resume()
    sim.run()
    assert_all_as_alone(sim)


def test_max_tokens_zero_computes_the_prompt_alone() -> None:
    sim = Simulation(max_num_batched_tokens=8)
    sim.add("a", prompt(30), max_tokens=0, prompt_logprobs=0)
    sim.run()
    assert sim.reasons["a"] == "length"
    assert sim.tokens["a"] == []
    assert sum(plan.num_tokens for plan in sim.plans) == 30


def test_a_request_may_leave_the_prefix_cache_unread() -> None:
    sim = Simulation()
    sim.add("a", prompt(21))
    sim.run()
    sim.requests["b"] = request = msgspec.structs.replace(
        sim.requests["a"], request_id="b", reads_prefix_cache=False
    )
    sim.tokens["b"] = []
    sim.engine.add(request)
    sim.run()
    assert sim.cached == {"a": 0, "b": 0}


# A prefix that is being computed --------------------------------------------------------------------------


def computed_tokens(sim: Simulation) -> int:
    return sum(entry.count for plan in sim.plans for entry in [*plan.new, *plan.continued])


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_equal_prompts_that_arrive_together_compute_the_prefix_once(max_in_flight: int) -> None:
    sim = Simulation(max_num_batched_tokens=64, num_blocks=200, max_in_flight=max_in_flight)
    for i in range(4):
        sim.add(f"r{i}", [*prompt(160), 900 + i], max_tokens=1)
    sim.run()
    size = sim.layout.block_size
    shared = 160 // size * size
    assert computed_tokens(sim) == 161 + 3 * (161 - shared)
    assert sim.kv.metrics()["prefix_cache_hits"] == 3 * shared
    assert_all_as_alone(sim)


def test_who_waits_for_a_prefix_holds_up_nobody_behind_it() -> None:
    sim = Simulation(max_num_batched_tokens=64, long_prefill_token_threshold=32, num_blocks=200)
    sim.add("first", prompt(80), max_tokens=2)
    sim.add("same", prompt(80), max_tokens=2)
    sim.add("other", prompt(8, 500), max_tokens=2)
    sim.step()
    assert {entry.request_id for entry in sim.plans[0].new} == {"first", "other"}
    (waiting,) = sim.scheduler.snapshot()["parked"]
    assert (waiting["request_id"], waiting["reason"]) == ("same", "prefix")
    sim.run()
    assert_all_as_alone(sim)


def test_who_waits_for_a_prefix_goes_on_when_its_owner_leaves() -> None:
    sim = Simulation(max_num_batched_tokens=32, num_blocks=200)
    sim.add("first", prompt(160), max_tokens=2)
    sim.add("same", prompt(160), max_tokens=2)
    sim.step()
    sim.abort("first")
    sim.run()
    assert sim.tokens["same"] == sim.expected("same")


def test_without_a_prefix_cache_nobody_waits_for_one() -> None:
    sim = Simulation(max_num_batched_tokens=64, num_blocks=200, prefix_caching=False)
    for i in range(2):
        sim.add(f"r{i}", prompt(32), max_tokens=1)
    sim.step()
    assert len(sim.plans[0].new) == 2
    assert sim.kv.metrics()["prefix_cache_seconds"] == 0


class Commits(Constraint):
    """Refuses a request, or breaks, once its tokens are in the plan."""

    name = "commits"

    def __init__(self, *, at: int = 0) -> None:
        self.at = at
        self.finished: list[str] = []

    def commit(self, request: Request, start: int, count: int, plan: object) -> None:
        if start >= self.at and request.request_id == "bad":
            raise KeyError("oops")
        if start >= self.at and request.request_id == "refused":
            raise RequestError("not this one")

    def on_finish(self, request: Request) -> None:
        self.finished.append(request.request_id)


@pytest.mark.parametrize("at", [0, 7])
@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_a_constraint_that_fails_in_commit_fails_its_request_alone(at: int, max_in_flight: int) -> None:
    commits = Commits(at=at)
    sim = Simulation(constraints=[commits], max_in_flight=max_in_flight, runs_ahead=max_in_flight > 1)
    for i, name in enumerate(("bad", "good", "refused", "late")):
        sim.add(name, prompt(5, 100 * i))
    sim.run()
    assert sim.errors == {
        "bad": "constraint 'commits' failed in commit: KeyError: 'oops'",
        "refused": "not this one",
    }
    for name in ("good", "late"):
        assert sim.tokens[name] == sim.expected(name)
    assert sorted(commits.finished) == ["bad", "good", "late", "refused"]
    for name in ("bad", "refused"):
        assert sim.tokens[name] == sim.expected(name)[: len(sim.tokens[name])]
        assert bool(sim.tokens[name]) is (at > 0)


class Begins(Constraint):
    name = "begins"

    def begin(self, plan: object) -> None:
        raise KeyError("oops")


def test_a_constraint_that_fails_for_a_whole_step_stops_the_engine_by_name() -> None:
    sim = Simulation(constraints=[Begins()])
    sim.add("a", prompt(5))
    with pytest.raises(
        EngineError, match="no step can be planned: constraint 'begins' failed in begin: KeyError"
    ):
        sim.step()
