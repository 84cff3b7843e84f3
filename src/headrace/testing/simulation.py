"""A whole engine without a model: the real scheduler, KV cache manager and loop around a `FakeExecutor`.

Give it your own policy, constraint, listener, scheduler or manager, and see what a step did:

    simulation = Simulation(num_blocks=20, policy=MyPolicy())
    simulation.add("a", [1, 2, 3], max_tokens=5)
    simulation.run()
    assert simulation.tokens["a"] == simulation.expected("a")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.core.engine import EngineCore
from headrace.core.interfaces import (
    Constraint,
    EngineListener,
    KVCacheLayout,
    KVCacheManager,
    SchedulingPolicy,
)
from headrace.core.interfaces.build import KVCacheBuild, SchedulerBuild
from headrace.core.kv.manager import PagedKVCacheManager
from headrace.core.listeners import Listeners
from headrace.core.plan import EngineOutput, StepPlan
from headrace.core.request import BlockKey, EngineRequest
from headrace.core.sampling_params import SamplingParams
from headrace.core.scheduler.policies import FCFSPolicy
from headrace.core.scheduler.scheduler import UnifiedScheduler
from headrace.testing.fakes import FakeExecutor, FakeProposer, fake_layout, fake_next_token

__all__ = ["Simulation"]


class Simulation:
    """Runs requests against simulated KV memory, and checks budgets and books after every step.

    Requests are added with rising arrival times. `tokens`, `reasons` and `errors` collect what came out.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        layout: KVCacheLayout | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 256,
        long_prefill_token_threshold: int = 0,
        prefix_caching: bool = True,
        policy: SchedulingPolicy | None = None,
        constraints: Sequence[Constraint] = (),
        listeners: Sequence[EngineListener] = (),
        max_in_flight: int = 1,
        runs_ahead: bool = False,
        proposer: FakeProposer | None = None,
        lookahead: int = 0,
        lose: Callable[[str, int], bool] | None = None,
        raise_at: frozenset[int] = frozenset(),
        interrupt_at: frozenset[int] = frozenset(),
        manager: Callable[[KVCacheBuild], KVCacheManager] = PagedKVCacheManager,
        scheduler: Callable[[SchedulerBuild], Any] = UnifiedScheduler,
    ) -> None:
        self.layout = layout or fake_layout()
        self.executor = FakeExecutor(
            self.layout,
            max_in_flight=max_in_flight,
            runs_ahead=runs_ahead,
            proposer=proposer,
            lose=lose,
            raise_at=raise_at,
            interrupt_at=interrupt_at,
        )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv = manager(
            KVCacheBuild(
                self.layout, num_blocks, prefix_caching, max_num_batched_tokens * max_in_flight + lookahead
            )
        )
        told = Listeners(listeners)
        self.scheduler = scheduler(
            SchedulerBuild(
                kv=self.kv,
                policy=policy or FCFSPolicy(),
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                long_prefill_token_threshold=long_prefill_token_threshold,
                lookahead=lookahead,
                runs_ahead=runs_ahead,
                constraints=constraints,
                listener=told,
            )
        )
        self.engine = EngineCore(self.scheduler, self.executor, told)
        self.requests: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.preemptions: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        self.num_steps = 0

    @property
    def plans(self) -> list[StepPlan]:
        """Every plan sent, oldest first."""
        return self.executor.plans

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        priority: int = 0,
        block_keys: Sequence[BlockKey] = (),
        **params: Any,
    ) -> None:
        """Hand in a request."""
        self.requests[name] = request = EngineRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            params=SamplingParams(max_tokens=max_tokens, **params),
            priority=priority,
            arrival_time=float(len(self.requests)),
            block_keys=list(block_keys),
        )
        self.tokens[name] = []
        self.engine.add(request)

    def abort(self, *names: str) -> None:
        """End requests from outside."""
        self.engine.finish(names, "abort")

    def step(self) -> list[EngineOutput]:
        """Run the loop once, then check budgets and books."""
        sent = len(self.plans)
        outputs = self.engine.step()
        self.num_steps += 1
        for output in outputs:
            name = output.request_id
            self.tokens[name] += output.new_token_ids
            self.preemptions[name] = output.num_preemptions
            self.cached[name] = output.num_cached_tokens
            if output.finish_reason is not None:
                if name in self.reasons:
                    raise AssertionError(f"{name} ended twice: {self.reasons[name]}, {output.finish_reason}")
                self.reasons[name] = output.finish_reason
            if output.error is not None:
                self.errors[name] = output.error
        for plan in self.plans[sent:]:
            if plan.num_tokens > self.max_num_batched_tokens or plan.num_requests > self.max_num_seqs:
                raise AssertionError(f"step {plan.step} exceeds a budget: {plan}")
        self.scheduler.check_integrity()
        return outputs

    def run(self, max_steps: int = 10_000) -> int:
        """Step until every request has ended and every block is back; return how many steps that took."""
        before = self.num_steps
        while self.engine.has_work:
            self.step()
            if self.num_steps - before > max_steps:
                raise AssertionError(f"not done after {max_steps} steps: {self.engine.snapshot()}")
        self.check_drained()
        return self.num_steps - before

    def check_drained(self) -> None:
        """Raise unless nothing is left behind: no holder of a block, no state on a worker, no open request."""
        if self.kv.num_free != self.kv.num_blocks or self.executor.known_requests:
            raise AssertionError(
                f"{self.kv.num_blocks - self.kv.num_free} blocks and worker state of "
                f"{self.executor.known_requests} are left behind"
            )
        open_requests = set(self.requests) - set(self.reasons)
        if open_requests:
            raise AssertionError(f"requests never ended: {open_requests}")

    def expected(self, name: str) -> list[int]:
        """What the fake model answers to this request when it runs alone."""
        request = self.requests[name]
        tokens = list(request.prompt_token_ids)
        for _ in range(request.params.max_tokens or 0):
            tokens.append(fake_next_token(tokens))
        return tokens[len(request.prompt_token_ids) :]
