"""The torch op set: through the kit, and against the definitions that transformers' Llama has."""

from __future__ import annotations

import pytest
import torch

from headrace.backends.torch_reference import ops
from headrace.core.interfaces import OpSet
from headrace.testing.ops import OpSetSuite


class TestTorchOps(OpSetSuite):
    def make(self) -> OpSet:
        return ops.TorchOps()


llama = pytest.importorskip("transformers.models.llama.modeling_llama")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_has_the_bits_of_llamas(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = llama.LlamaRMSNorm(576, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = torch.randn(9, 576).to(dtype)
    assert torch.equal(ops.rms_norm(x, norm.weight.data, 1e-5), norm(x).detach())


def test_rotary_has_the_bits_of_llamas() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(12, 9, 64), torch.randn(12, 3, 64)
    positions = torch.randint(100, (12,))
    angles = torch.arange(100)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    double = torch.cat([angles, angles], dim=1)[positions]
    right_q, right_k = llama.apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], double.cos()[None], double.sin()[None]
    )
    ops.rotary(positions, q, k, torch.cat([angles.cos(), angles.sin()], dim=1))
    assert torch.equal(q, right_q[0].transpose(0, 1))
    assert torch.equal(k, right_k[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul_has_the_bits_of_llamas(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 200).to(dtype)
    assert torch.equal(ops.silu_mul(x), torch.nn.functional.silu(x[:, :100]) * x[:, 100:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_mul_has_the_bits_of_gemmas(dtype: torch.dtype) -> None:
    from transformers.activations import ACT2FN

    torch.manual_seed(0)
    x = torch.randn(7, 200).to(dtype)
    assert torch.equal(ops.gelu_mul(x), ACT2FN["gelu_pytorch_tanh"](x[:, :100]) * x[:, 100:])
