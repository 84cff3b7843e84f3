"""What a plugin puts around products: at work in the steps that it says, at rest in others, recorded both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams, hookimpl
from headrace.core.interfaces import LinearWrapper, RunnerBatch, Segment, SummedProduct

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5]


class Around:
    """A product that is counted, and says itself that it can be wrapped again."""

    def __init__(self, owner: Counting, inner: SummedProduct) -> None:
        self.segments: Sequence[Segment] = inner.segments
        self.finish = inner.finish
        self._owner = owner
        self._inner = inner

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._owner.calls.append(self._owner.active)
        if not self._owner.active:
            return self._inner(x)
        return self._inner.finish(self._inner.sums(x), x.dtype)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.sums(x)


class Counting(LinearWrapper):
    name = "counting"

    def __init__(self) -> None:
        self.names: list[str] = []
        self.calls: list[bool] = []
        self.works = False
        self.head_rows: list[list[int]] = []

    def wrap(
        self,
        op: Callable[[str], Callable[..., Any]],
        names: Sequence[str],
        out_features: Sequence[int],
        product: SummedProduct,
        in_features: int,
    ) -> SummedProduct:
        self.names += names
        assert sum(segment.end - segment.start for segment in product.segments) == sum(out_features)
        return Around(self, product)

    def on_batch(self, batch: RunnerBatch) -> None:
        self.active = self.works

    def on_head_rows(self, rows: Sequence[int]) -> None:
        self.head_rows.append(list(rows))


class Plugin:
    name = "counting"
    headrace_api = ">=1,<2"

    def __init__(self) -> None:
        self.wrapper = Counting()

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        registrar.linear_wrapper("counting", lambda context: self.wrapper)
        registrar.linear_wrapper("nobody", lambda context: None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"disable_plugins": ["cpu"]}], ids=str)
def test_sums_that_are_finished_are_the_product(
    tmp_path: Path, tiny_gguf: Callable[..., Path], dtype: str, options: dict[str, Any]
) -> None:
    file = str(tiny_gguf(tmp_path / "tiny.gguf"))
    plugin = Plugin()
    with LLM(file, dtype=dtype, show_report=False, **options) as llm:
        plain = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(file, dtype=dtype, plugins=[plugin], show_report=False, **options) as llm:
        wrapper = plugin.wrapper
        assert len(wrapper.names) == 14
        recorded = llm.report.executor["graph"] == "yes"
        assert recorded == (not options)
        if recorded:  # once at rest and once at work, each with a trial
            assert wrapper.calls.count(True) == wrapper.calls.count(False) > 0
        for works in (False, True):
            wrapper.works = works
            wrapper.calls.clear()
            llm.reset_prefix_cache()
            found = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
            assert list(found) == list(plain)
            assert set(wrapper.calls) == (set() if recorded else {works})
        assert wrapper.head_rows[0] == [4]
        assert wrapper.head_rows[1] == [0]
