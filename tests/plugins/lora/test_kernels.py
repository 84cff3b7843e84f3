"""What adapters add, by native kernels: near the reference, and a row is that row and its adapter alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.core.errors import EngineError
from headrace.core.interfaces.wrapping import Segment
from headrace.plugins.lora.adapter import Adapter, Packed, pack_adapter, unpacked_b
from headrace.plugins.lora.files import AdapterFiles
from headrace.plugins.lora.modules import Product, Targets
from headrace.plugins.lora.ops import EXPAND, SHRINK, NativeLora, TorchLora
from headrace.plugins.lora.slots import NO_SLOT, RowPlan, Slots

MOST = 64
SIZES = (40, 7, 33)
"""Outputs of three names stacked in one product."""
INPUTS = (96, 70)


def plain(outputs: tuple[int, ...]) -> list[Segment]:
    return [Segment(0, sum(outputs), 0)]


def gated(size: int) -> list[Segment]:
    return [Segment(0, size, 0, 32), Segment(size, 2 * size, 16, 32)]


def make(targets: Targets, ranks: dict[str, int], seed: int, dtype: torch.dtype) -> Adapter:
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, rank in ranks.items():
        target = targets.get(name)
        assert target is not None
        inputs, outputs = target.shapes
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) / inputs**0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=random)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "rank_pattern": dict(ranks)}
    return pack_adapter(AdapterFiles(Path("a"), config, tensors, f"{seed:064x}"), targets, dtype, MOST)


def native() -> NativeLora:
    ops = NativeLora()
    if ops.get(SHRINK) is None:
        pytest.skip("no native kernels here")
    return ops


def test_a_machine_without_native_kernels_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CPU_ISA", "torch")
    ops = NativeLora()
    assert ops.why_not("cpu", "bfloat16") == []
    assert ops.get(SHRINK) is ops.get(EXPAND) is None
    assert ops.why_not("cuda", "float16") == [
        "device cuda (runs on: cpu)",
        "dtype float16 (computes in: bfloat16, float32)",
    ]
    assert TorchLora().get("embedding") is TorchLora().linear("dense") is None


def run(
    ops: NativeLora | TorchLora,
    x: torch.Tensor,
    sums: torch.Tensor,
    product: Product,
    slots: Slots,
    of: list[int],
) -> torch.Tensor:
    rows = RowPlan(len(slots.held), 512)
    rows.fill(np.array(of))
    shrink, expand = ops.get(SHRINK), ops.get(EXPAND)
    assert shrink is not None
    assert expand is not None
    result = sums.clone()
    h = shrink.fn(x, MOST, product, slots, rows)
    expand.fn(h, result, MOST, product, slots, rows, x.dtype)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("layout", ["plain", "gated"])
def test_native_kernels_are_near_the_reference_and_touch_no_other_row(
    dtype: torch.dtype, inputs: int, layout: str
) -> None:
    targets = Targets()
    names, outputs = ["q", "k", "v"], SIZES
    segments = plain(outputs)
    if layout == "gated":
        names, outputs = ["gate", "up"], (40, 40)
        segments = gated(40)
    product = targets.add(names, outputs, inputs, segments)
    slots = Slots(3, targets)
    first = make(targets, {names[0]: 5, names[1]: 64}, 1, dtype)
    second = make(targets, {names[-1]: 1}, 2, dtype)
    found = slots.place([first, second])
    one, two = found[first.digest], found[second.digest]
    of = [one, NO_SLOT, two, one, one, one, one, NO_SLOT, two]
    random = torch.Generator().manual_seed(0)
    x = torch.randn(len(of), inputs, generator=random).to(dtype)
    width = 96 if layout == "gated" else sum(outputs)
    sums = torch.randn(len(of), width, generator=random)
    right = run(TorchLora(), x, sums, product, slots, of)
    got = run(native(), x, sums, product, slots, of)
    torch.testing.assert_close(got, right, atol=2e-4, rtol=2e-4)
    for row, slot in enumerate(of):
        assert torch.equal(got[row], sums[row]) == (slot == NO_SLOT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_whatever_its_neighbours_its_slot_and_what_lies_in_others(
    dtype: torch.dtype,
) -> None:
    targets = Targets()
    product = targets.add(["q", "k", "v"], SIZES, 96, plain(SIZES))
    ranks = {"q": 7, "k": 16, "v": 33}
    wanted, other, third = (make(targets, ranks, seed, dtype) for seed in (1, 2, 3))
    random = torch.Generator().manual_seed(0)
    x = torch.randn(257, 96, generator=random).to(dtype)
    sums = torch.randn(257, sum(SIZES), generator=random)
    ops = native()
    alone = Slots(1, targets)
    alone.place([wanted])
    right = torch.cat(
        [run(ops, x[row : row + 1], sums[row : row + 1], product, alone, [0]) for row in range(len(x))]
    )
    for order in ([wanted, other, third], [other, third, wanted]):
        slots = Slots(4, targets)
        found = slots.place(order)
        for count in (1, 2, 3, 15, 16, 17, 64, 257):
            all_own = [found[wanted.digest]] * count
            mixed = [
                found[wanted.digest] if row % 3 else found[order[row % 2].digest] for row in range(count)
            ]
            for of in (all_own, mixed):
                got = run(ops, x[:count], sums[:count], product, slots, of)
                for row, slot in enumerate(of):
                    if slot == found[wanted.digest]:
                        assert torch.equal(got[row], right[row]), (count, row)


@pytest.mark.parametrize("ops", [TorchLora(), NativeLora()], ids=["torch", "native"])
def test_expanding_alone_is_the_second_half(ops: NativeLora | TorchLora) -> None:
    if isinstance(ops, NativeLora):
        ops = native()
    targets = Targets()
    product = targets.add(["a"], [40], 96, [Segment(0, 40, 0)])
    adapter = make(targets, {"a": 4}, 1, torch.float32)
    slots = Slots(2, targets)
    slots.place([adapter])
    rows = RowPlan(2, 8)
    rows.fill(np.array([NO_SLOT, 0, NO_SLOT]))
    h = torch.full((3, MOST), float("nan"))
    h[1, :4] = torch.tensor([1.0, -2.0, 0.5, 3.0])
    sums = torch.zeros(3, 40)
    op = ops.get(EXPAND)
    assert op is not None
    op.fn(h, sums, MOST, product, slots, rows, torch.float32)
    packed: Packed = adapter.products[product.index]
    b = packed.b[0]
    assert b is not None
    torch.testing.assert_close(sums[1], h[1, :4] @ unpacked_b(b, 40))
    assert not sums[[0, 2]].any()


def test_slots_keep_what_is_there_and_refuse_too_many() -> None:
    targets = Targets()
    targets.add(["a"], [40], 96, [Segment(0, 40, 0)])
    one, two, three = (make(targets, {"a": 4}, seed, torch.float32) for seed in (1, 2, 3))
    slots = Slots(2, targets)
    before = slots.place([one, two])
    address = slots.table.ctypes.data
    assert slots.place([three, two])[two.digest] == before[two.digest]
    assert slots.table.ctypes.data == address
    with pytest.raises(EngineError, match=r"3 adapters, and there are 2 slots \(max_loras\)"):
        slots.place([one, two, three])
    slots.drop_unused({two.digest})
    assert [held and held.digest for held in slots.held].count(None) == 1


def test_pieces_cut_segments_where_names_end() -> None:
    product = Targets().add(["gate_up"], [80], 96, gated(40))
    assert [(piece.start, piece.end, piece.first, piece.step) for piece in product.pieces] == [
        (0, 40, 0, 32),
        (40, 80, 16, 32),
    ]
    columns = torch.cat([piece.columns for piece in product.pieces])
    assert len(set(columns.tolist())) == 80
    assert columns[16] == 32
