"""The conformance suite of attention backends: subclass it, say how to make yours, run pytest.

    class TestMine(AttentionBackendSuite):
        def make(self):
            return MyBackend()

What a backend refuses through `why_not` is not tried: a test whose every case is refused is skipped with the
reasons. What it does not refuse must be right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import SkipTest

from headrace.core.interfaces import AttentionBackend, AttentionSpec
from headrace.testing.batches import PagedRun, run_case
from headrace.testing.cases import AttentionCase, Chunk, random_case, served_spec
from headrace.testing.compare import check_equal
from headrace.testing.invariance import prove_attention_invariant

__all__ = ["AttentionBackendSuite"]

BASE = AttentionSpec(
    num_heads=6, num_kv_heads=2, head_dim=64, dtype="float32", kv_dtype="float32", block_size=16
)


class AttentionBackendSuite:
    """Proves an attention backend against float64 attention, on 200 random ragged batches and chosen ones.

    Override `make`; `device` and `dtypes` where the backend is not for float32 and bfloat16 on a CPU.
    """

    device = "cpu"
    """Where caches and inputs live."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Dtypes of the chosen batches; the random ones use float32 and bfloat16 where they are served."""

    seeds = 50
    """Random batches of each of the four kinds."""

    def make(self) -> AttentionBackend:
        """Return the backend to test, new for each test."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self) and return a backend")

    # Random batches

    def test_random_prefills(self) -> None:
        """Whole prompts of different lengths in one step."""
        self._run_random("prefill")

    def test_random_decodes(self) -> None:
        """One token of each sequence after a prefill."""
        self._run_random("decode")

    def test_random_mixed_batches(self) -> None:
        """Chunks and single tokens in one step, until all sequences are done."""
        self._run_random("mixed")

    def test_random_chunks(self) -> None:
        """Prompts in several chunks of uneven size."""
        self._run_random("chunked")

    # Features, one by one

    def test_head_sizes(self) -> None:
        """Usual and odd head sizes."""
        self._run_specs([{"head_dim": dim} for dim in (64, 128, 32, 80, 96, 256, 40)])

    def test_head_groups(self) -> None:
        """Multi-head, grouped-query and multi-query attention."""
        pairs = ((1, 1), (4, 4), (9, 3), (8, 2), (8, 1), (32, 8))
        self._run_specs([{"num_heads": heads, "num_kv_heads": kv} for heads, kv in pairs])

    def test_block_sizes(self) -> None:
        """Blocks of 1, 8, 16, 32 tokens."""
        self._run_specs([{"block_size": size} for size in (1, 8, 16, 32)])

    def test_windows(self) -> None:
        """Windows of one token, around a block's border, and longer than any sequence."""
        self._run_specs([{"window": window} for window in (1, 2, 15, 16, 17, 33, 1000)])

    def test_soft_caps(self) -> None:
        """Soft caps that bind."""
        self._run_specs([{"soft_cap": cap} for cap in (0.5, 2.0, 30.0)])

    def test_sinks(self) -> None:
        """Sinks, alone and with a window."""
        self._run_specs([{"sinks": True}, {"sinks": True, "window": 9}])

    def test_layers_that_are_not_causal(self) -> None:
        """Whole prompts in which every token sees all the others, plain and with every feature."""
        features: list[dict[str, Any]] = [{}, {"soft_cap": 2.0}, {"sinks": True}, {"block_size": 8}]
        changes = [{"causal": False, **feature} for feature in features]
        self._run_specs(changes, make_case=_whole_prompts)
        self._run_specs(changes, lse=True, make_case=_whole_prompts)

    def test_log_sum_exp(self) -> None:
        """`lse` with every feature."""
        features: list[dict[str, Any]] = [{}, {"window": 20}, {"soft_cap": 2.0}, {"sinks": True}]
        self._run_specs(features, lse=True)

    def test_long_context(self) -> None:
        """Contexts of many blocks, as a chunk and as decodes."""
        for dtype in self.dtypes:
            run = self._paged_run(replace(BASE, dtype=dtype, kv_dtype=dtype), (1100, 517, 30))
            run.step([Chunk(0, 0, 700), Chunk(1, 0, 516), Chunk(2, 0, 29)])
            for chunks in (
                [Chunk(0, 700, 1098), Chunk(2, 29, 30), Chunk(1, 516, 517)],
                [Chunk(0, 1098, 1099)],
                [Chunk(0, 1099, 1100)],
            ):
                run.check(chunks, run.step(chunks), f"{run.backend.name}, a long context")

    # How it is called

    def test_declarations(self) -> None:
        """Name, properties, reasons and layout are of the kinds the contract names."""
        backend = self.make()
        _check(isinstance(backend.name, str) and bool(backend.name), "name must be a text")
        _check(isinstance(backend.row_invariant, bool), "row_invariant must be a bool")
        _check(isinstance(backend.numerics, str), "numerics must be a text")
        _check(backend.graph in ("never", "decode", "always"), f"graph {backend.graph!r}")
        odd = replace(BASE, dtype="no-such-dtype", kv_dtype="no-such-dtype")
        for spec, device in ((BASE, self.device), (odd, self.device), (BASE, "no-such-device")):
            reasons = backend.why_not(spec, device)
            words = isinstance(reasons, list) and all(isinstance(r, str) and r for r in reasons)
            _check(words, f"why_not must return a list of texts, got {reasons!r}")
        _check(bool(backend.why_not(odd, self.device)), "why_not accepts a dtype that does not exist")
        _check(bool(backend.why_not(BASE, "no-such-device")), "why_not accepts a device that does not exist")
        spec = self._served(BASE)
        page = backend.layout(spec).page_bytes
        _check(isinstance(page, int) and page > 0, f"page_bytes must be a positive int, got {page!r}")

    def test_cache_is_all_that_forward_reads(self) -> None:
        """K and V reach `forward` through the cache, and it changes nothing there."""
        run = self._paged_run(BASE, (40, 7))
        chunks = [Chunk(0, 0, 40), Chunk(1, 0, 7)]
        md = run.backend.prepare(run.group, run.batch(chunks))
        run.write(chunks, md)
        first = run.attend(chunks, md)
        run.check(chunks, first, run.backend.name)
        for a, b in zip(first[0], run.attend(chunks, md)[0], strict=True):
            check_equal(b, a, f"{run.backend.name}: forward called twice")
        other = run.backend.allocate(run.spec, run.num_blocks, self.device)
        run.poison(other)
        for s in range(2):
            run.k[s], run.v[s] = run.k[s].flip(0), run.v[s].neg()
        run.write(chunks, md, cache=other)
        run.check(chunks, run.attend(chunks, md, cache=other), f"{run.backend.name}: a second layer's cache")
        for a, b in zip(first[0], run.attend(chunks, md)[0], strict=True):
            check_equal(b, a, f"{run.backend.name}: a write to another layer's cache changed this one")

    def test_two_groups_in_one_step(self) -> None:
        """Full and window layers alternate in a step, each group with its own tables."""
        lengths, backend = (50, 20, 33), self.make()
        specs = [self._served(BASE), self._served(replace(BASE, window=9, num_kv_heads=3))]
        runs = [
            PagedRun(backend, spec, lengths, seed=i, table_seed=i, device=self.device)
            for i, spec in enumerate(specs)
        ]
        steps = [
            [Chunk(0, 0, 49), Chunk(2, 0, 20)],
            [Chunk(1, 0, 20), Chunk(0, 49, 50), Chunk(2, 20, 33)],
        ]
        for chunks in steps:
            metadata = [backend.prepare(run.group, run.batch(chunks)) for run in runs]
            for run, md in zip(runs, metadata, strict=True):
                run.write(chunks, md)
                run.check(chunks, run.attend(chunks, md), f"{backend.name}, two groups")
            for run, md in zip(runs, metadata, strict=True):
                run.check(chunks, run.attend(chunks, md), f"{backend.name}, two groups, second layer")

    def test_int8_cache(self) -> None:
        """K and V as whole numbers with a scale for each token and head, where the backend has that."""
        for number, dtype in enumerate(self.dtypes):
            backend = self.make()
            for change in ({}, {"window": 20, "block_size": 32}, {"soft_cap": 2.0, "sinks": True}):
                spec = replace(BASE, dtype=dtype, kv_dtype="int8", **change)
                if backend.why_not(spec, self.device):
                    raise SkipTest(f"{backend.name} refuses: {backend.why_not(spec, self.device)}")
                plain = backend.layout(replace(spec, kv_dtype=dtype)).page_bytes
                _check(backend.layout(spec).page_bytes < plain, "pages of int8 must be smaller")
                run_case(backend, _all_kinds(spec, number, lse=True), self.device)
            if backend.row_invariant:
                prove_attention_invariant(backend, replace(BASE, dtype=dtype, kv_dtype="int8"), self.device)

    def test_row_invariance(self) -> None:
        """Bit by bit: alone as in a batch, in one chunk as at every cut, with one thread as with two."""
        backend = self.make()
        if not backend.row_invariant:
            raise SkipTest(f"{backend.name} does not claim row_invariant")
        everything = replace(BASE, window=21, soft_cap=2.0, sinks=True)
        for dtype in self.dtypes:
            plain, full = (
                self._served(replace(spec, dtype=dtype, kv_dtype=dtype), backend)
                for spec in (BASE, everything)
            )
            for spec in dict.fromkeys((plain, full)):
                prove_attention_invariant(backend, spec, self.device)

    def _run_random(self, kind: str) -> None:
        backend = self.make()
        for seed in range(self.seeds):
            case = random_case(seed, kind)
            run_case(backend, replace(case, spec=self._served(case.spec, backend)), self.device)

    def _run_specs(
        self,
        changes: list[dict[str, Any]],
        *,
        lse: bool = False,
        make_case: Callable[[AttentionSpec, int, bool], AttentionCase] | None = None,
    ) -> None:
        """Run a case, by default with prefill, mixed and decode steps, for every spec and dtype that is served."""
        backend = self.make()
        make_case = make_case or _all_kinds
        reasons: list[str] = []
        ran = 0
        for dtype in self.dtypes:
            for seed, change in enumerate(changes):
                spec = replace(BASE, dtype=dtype, kv_dtype=dtype, **change)
                refused = backend.why_not(spec, self.device)
                reasons += refused
                if not refused:
                    run_case(backend, make_case(spec, seed, lse), self.device)
                    ran += 1
        if not ran:
            raise SkipTest(f"{backend.name} refuses: {'; '.join(dict.fromkeys(reasons))}")

    def _served(self, spec: AttentionSpec, backend: AttentionBackend | None = None) -> AttentionSpec:
        backend = backend or self.make()
        served = served_spec(backend, spec, self.device)
        if isinstance(served, list):
            raise SkipTest(f"{backend.name} refuses even plain attention: {'; '.join(served)}")
        return served

    def _paged_run(self, spec: AttentionSpec, lengths: tuple[int, ...]) -> PagedRun:
        backend = self.make()
        return PagedRun(
            backend, self._served(spec, backend), lengths, seed=7, table_seed=7, device=self.device
        )


def _all_kinds(spec: AttentionSpec, seed: int, lse: bool) -> AttentionCase:
    """Three sequences: prefill, then a chunk beside single tokens, then single tokens."""
    steps = (
        (Chunk(0, 0, 20), Chunk(1, 0, 16)),
        (Chunk(1, 16, 17), Chunk(2, 0, 33), Chunk(0, 20, 39)),
        (Chunk(2, 33, 34), Chunk(0, 39, 40), Chunk(1, 17, 18)),
    )
    return AttentionCase(spec, (40, 18, 34), steps, lse, seed)


def _whole_prompts(spec: AttentionSpec, seed: int, lse: bool) -> AttentionCase:
    """Prompts of a token, around a block's border, and of many blocks, each whole in its one step."""
    lengths = (40, 1, 16, 17, 300, 2)
    steps = tuple(tuple(Chunk(s, 0, lengths[s]) for s in step) for step in ((0, 1, 2), (5, 4, 3)))
    return AttentionCase(spec, lengths, steps, lse, seed)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)
