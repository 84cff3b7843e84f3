"""Recorded passes: the bits of the calls themselves, for any number of rows; what cannot be recorded is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headrace.backends.cpu.attention import CpuAttention
from headrace.backends.cpu.ops import CpuOps
from headrace.backends.torch_reference.attention import TorchAttention
from headrace.core.interfaces import GraphRecorder, RecordError

WIDTH = 64


@pytest.fixture
def ops() -> CpuOps:
    return CpuOps()


@pytest.fixture
def recorder(ops: CpuOps) -> GraphRecorder:
    found = ops.recorder(CpuAttention())
    assert found is not None
    return found


def layers(ops: CpuOps) -> Callable[[torch.Tensor], torch.Tensor]:
    """Four norms and products, each into new tensors."""
    torch.manual_seed(0)
    kind, norm = ops.linear("dense"), ops.get("rms_norm")
    assert kind is not None
    assert norm is not None
    gate, silu = ops.get("silu_mul"), kind
    assert gate is not None
    ups = [kind.prepare(torch.randn(2 * WIDTH, WIDTH) / 8, None) for _ in range(4)]
    downs = [silu.prepare(torch.randn(WIDTH, WIDTH) / 8, torch.randn(WIDTH)) for _ in range(4)]
    weight = torch.rand(WIDTH)

    def run(x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(ups, downs, strict=True):
            heads = norm.fn(x.view(-1, 2, WIDTH // 2), weight[: WIDTH // 2], 1e-5).view(-1, WIDTH)
            x = kind.apply(gate.fn(kind.apply(heads, up)), down)
        return x

    return run


def test_a_replay_has_the_bits_of_the_calls(ops: CpuOps, recorder: GraphRecorder) -> None:
    run = layers(ops)
    x = torch.zeros(40, WIDTH)
    graph, out = recorder.record(lambda: run(x), 40)
    for rows in (40, 1, 17):
        inputs = torch.randn(rows, WIDTH)
        x[:rows] = inputs
        graph.replay(rows)
        assert torch.equal(out[:rows], run(inputs))


def test_kernels_run_again_after_a_recording(ops: CpuOps, recorder: GraphRecorder) -> None:
    run = layers(ops)
    inputs = torch.randn(3, WIDTH)
    before = run(inputs)
    x = torch.zeros(8, WIDTH)
    recorder.record(lambda: run(x), 8)
    assert torch.equal(run(inputs), before)


def test_buffers_are_used_again(ops: CpuOps, recorder: GraphRecorder) -> None:
    run = layers(ops)
    x = torch.zeros(8, WIDTH)
    graph, _ = recorder.record(lambda: run(x), 8)
    words, pool = graph._kept  # type: ignore[attr-defined]
    assert len(words) == 16
    assert len(pool._buffers) <= 4


@pytest.mark.parametrize(
    "step", [lambda x: x + 1, lambda x: x.float().sum(), lambda x: x[:, ::2].contiguous(), lambda x: x * 2]
)
def test_what_torch_would_compute_is_refused(
    recorder: GraphRecorder, step: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.zeros(4, WIDTH)
    with pytest.raises(RecordError, match="torch computes"):
        recorder.record(lambda: step(x), 4)


def test_other_numbers_of_rows_are_refused(ops: CpuOps, recorder: GraphRecorder) -> None:
    run, x = layers(ops), torch.zeros(8, WIDTH)
    with pytest.raises(RecordError, match="8 rows of 9"):
        recorder.record(lambda: run(x), 9)


def test_another_backends_attention_is_not_recorded(ops: CpuOps) -> None:
    assert ops.recorder(TorchAttention()) is None
