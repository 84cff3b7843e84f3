"""The AMX products' own logic, with tiles in plain C++: layout, tails, and each row alone."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from headrace.backends.cpu.build import build_kernels, kernel_headers, load_kernels
from headrace.backends.cpu.isa import supported_tiers

CSRC = kernel_headers()[0].parent
EMULATED = Path(__file__).parent / "amx_emulated.h"


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    avx512 = next((tier for tier in supported_tiers() if tier.name == "avx512"), None)
    if avx512 is None:
        pytest.skip("the file needs AVX-512 for what surrounds the tiles")
    source = tmp_path_factory.mktemp("amx") / "emulated.cpp"
    files = (EMULATED, CSRC / "linear.cpp", CSRC / "pack.cpp")
    includes = "".join(f'#include "{file}"\n' for file in files)
    source.write_text(f"#define HEADRACE_TIER_AMX 1\n{includes}")
    return load_kernels(
        build_kernels([source], avx512, name="emulated", headers=[EMULATED, *kernel_headers()])
    )


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (100, 96), (7, 32)])
def test_products(products: ctypes.CDLL, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).bfloat16()
    panels = -(-outputs // 32) * 32
    packed, bias = torch.empty(panels * inputs, dtype=torch.bfloat16), torch.randn(panels)
    call(products, "pack_bf16", weight, outputs, inputs, inputs, packed)
    x = torch.randn(70, inputs).bfloat16()

    def product(rows: torch.Tensor) -> torch.Tensor:
        y = torch.empty(len(rows), outputs, dtype=torch.bfloat16)
        call(products, "linear_bf16", rows, len(rows), inputs, packed, outputs, inputs, bias, y, outputs)
        return y

    alone = torch.cat([product(row[None].clone()) for row in x])
    right = x.double() @ weight.double().T + bias[:outputs]
    torch.testing.assert_close(alone.double(), right, rtol=1e-2, atol=1e-2)
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 70):
        assert torch.equal(product(x[:rows].clone()), alone[:rows]), rows


def call(library: ctypes.CDLL, name: str, *given: torch.Tensor | int) -> None:
    """Call a kernel through its pointer: tensors are addresses, numbers are 64 bits."""
    values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in given]
    types = [ctypes.c_void_p if isinstance(value, torch.Tensor) else ctypes.c_int64 for value in given]
    address = ctypes.c_void_p.in_dll(library, f"hr_{name}").value
    assert address is not None
    ctypes.CFUNCTYPE(None, *types)(address)(*values)
