"""The paged manager's prefix cache against a model that remembers what every block holds."""

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

from headrace.core.interfaces.build import KVCacheBuild
from headrace.core.kv.manager import PagedKVCacheManager
from headrace.core.request import EngineRequest, Request
from headrace.core.sampling_params import SamplingParams
from headrace.testing.fakes import fake_layout

FUZZ = int(os.environ.get("HEADRACE_FUZZ", "1"))
SEEN = {"hits": 0, "evictions": 0, "refusals": 0, "windows": 0}
B = 2


class PrefixCacheMachine(RuleBasedStateMachine):
    """The model: content[(group, block)] is the token prefix whose last block lies there, as last written."""

    @initialize(windows=st.sampled_from([(None,), (4,), (None, 4), (None, 5, 3)]), blocks=st.integers(12, 40))
    def start(self, windows, blocks):
        self.windows = windows
        self.kv = PagedKVCacheManager(KVCacheBuild(fake_layout(*windows, block_size=B), blocks, True, 4))
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}
        self.requests: list[Request] = []
        self.step = 0
        self.random = random.Random(blocks)

    @rule(seed=st.integers(0, 3), length=st.integers(1, 18))
    def arrive(self, seed, length):
        tokens = [random.Random(f"{seed}{i // 4}").randrange(3) for i in range(length)]
        request = Request(
            EngineRequest(request_id=str(self.step), prompt_token_ids=tokens, params=SamplingParams()),
            max_tokens_total=100,
        )
        hit = self.kv.match_prefix(request)
        assert hit.length % B == 0
        assert hit.length < len(tokens)
        for group, (window, table) in enumerate(zip(self.windows, hit.block_ids, strict=True)):
            assert len(table) == hit.length // B
            first = 0 if window is None else max(0, hit.length - window + 1) // B
            for i, block in enumerate(table):
                if i < first:
                    assert block == 0
                else:
                    assert self.content[group, block] == tuple(tokens[: (i + 1) * B])
        SEEN["hits"] += hit.length > 0
        SEEN["windows"] += any(0 in table for table in hit.block_ids)
        cached = self.kv._pool.num_cached
        granted = self.kv.allocate(request, len(tokens), hit=hit)
        if granted is None:
            SEEN["refusals"] += 1
            self.kv.release(hit)
            return
        SEEN["evictions"] += self.kv._pool.num_cached < cached
        self.requests.append(request)
        for group, table in enumerate(request.block_ids):
            for i in range(hit.length // B, len(table)):
                self.content[group, table[i]] = tuple(tokens[: (i + 1) * B])

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), share=st.floats(0, 1))
    def compute(self, data, share):
        request = data.draw(st.sampled_from(self.requests))
        request.num_computed = max(request.num_computed, int(share * request.num_tokens))
        self.kv.publish(request, request.num_computed, fence=self.step)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data):
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.kv.free(request, fence=self.step)

    @rule()
    def update(self):
        self.kv.advance_fence(self.step)
        self.step += 1
        assert self.kv.num_fenced == 0

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity(self.requests)
        for request in self.requests:
            self.kv.free(request, fence=self.step)
        self.kv.advance_fence(self.step)
        assert self.kv.num_free == self.kv.num_blocks
        assert self.kv.reset_prefix_cache()


def test_prefix_cache_stateful() -> None:
    # What is drawn depends on the constants of all modules that are loaded, so a run may miss something.
    for examples in (200, 400, 800, 1600):
        run_state_machine_as_test(
            PrefixCacheMachine,
            settings=settings(
                max_examples=examples * FUZZ, stateful_step_count=50, derandomize=True, deadline=None
            ),
        )
        if all(SEEN.values()):
            break
    assert all(SEEN.values()), SEEN
