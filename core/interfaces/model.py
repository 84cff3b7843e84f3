"""The model contract: how an architecture is built and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from headrace.core.interfaces.attention import AttentionLayer, AttentionSpec

__all__ = [
    "Embedding",
    "ForwardContext",
    "Linear",
    "Model",
    "ModelBuild",
    "ModelDefinition",
    "Parallel",
    "Weights",
]


@dataclass(frozen=True)
class Parallel:
    """This rank's place. At size 1 nothing is split and no collective is called."""

    rank: int = 0
    tensor_size: int = 1
    tensor_rank: int = 0
    first_layer: int = 0
    end_layer: int | None = None
    """Own layers are [first_layer, end_layer); None: all that follow."""
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    all_gather: Callable[[torch.Tensor], torch.Tensor] | None = None


class Linear(Protocol):
    """A matrix product with its weights, bound at build time."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        ...


class Embedding(Protocol):
    """A lookup of rows."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, C]."""
        ...


class Weights(Protocol):
    """A checkpoint's tensors as a model takes them. What is never taken is reported by name after the build."""

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        ...

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor in the model's dtype. Raises `CheckpointError` if missing or of another shape."""
        ...


@runtime_checkable
class ModelBuild(Protocol):
    """What a model is built from."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The checkpoint's configuration."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type to compute in."""
        ...

    @property
    def device(self) -> str:
        """Where tensors live."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens a request will have: how far tables of positions must reach."""
        ...

    @property
    def weights(self) -> Weights:
        """The checkpoint's tensors."""
        ...

    @property
    def parallel(self) -> Parallel:
        """This rank's place."""
        ...

    def op(self, name: str) -> Callable[..., Any]:
        """Return an op of the op set in use; see `headrace.core.interfaces.ops` for names and signatures."""
        ...

    def linear(
        self, *names: str, in_features: int, out_features: tuple[int, ...], bias: bool = False
    ) -> Linear:
        """Build a product from `NAME.weight` [out, in] of each name, stacked over outputs.

        With `bias`, `NAME.bias` too. The quantization method and `wrap_linear` plugins have their say here.
        """
        ...

    def gated_linear(
        self, *names: str, in_features: int, out_features: tuple[int, ...], op: str, bias: bool = False
    ) -> Linear:
        """Build activation(gate(x)) · up(x) from the named weights, as `linear` takes them: the gate's rows first.

        op: which activation, `silu_mul` or `gelu_mul`. The product has half as many outputs as its weights together.
        """
        ...

    def lm_head(self, name: str, vocab_size: int, hidden_size: int) -> Linear:
        """Build the output projection from `NAME.weight` [V, C]; it gives float32."""
        ...

    def tied_embedding(self, name: str, vocab_size: int, hidden_size: int) -> tuple[Embedding, Linear]:
        """Return the lookup and the output projection that share the weight `NAME.weight` [V, C]; it is held once.

        The projection gives float32.
        """
        ...

    def embedding(self, name: str, lookup: Embedding, shape: tuple[int, int]) -> Embedding:
        """Return the lookup in `NAME.weight` of `shape` [V, C] to use: `lookup`, or what plugins put around it."""
        ...

    def attention(self, name: str, spec: AttentionSpec, *, scale: float) -> AttentionLayer:
        """Declare an attention layer: it gets KV memory, and a handle for `ForwardContext.attend`."""
        ...

    def attention_spec(self, **changes: Any) -> AttentionSpec:
        """Return a spec with dtype, KV dtype and block size filled in."""
        ...


class ForwardContext(Protocol):
    """What a forward pass may use besides its inputs; passed, never global."""

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Write k, v [N, K, D] to the cache, attend with q [N, H, D]; return [N, H·D].

        Rows of q, k and v may lie apart: views of a stacked product.
        """
        ...


@runtime_checkable
class Model(Protocol):
    """A built model. Nothing a forward reads changes its address between steps."""

    vocab_size: int

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, C]."""
        ...

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """Return ([N, C] hidden, taps): hidden states after the last norm, and those of tapped layers.

        positions are [N], or [k, N] for models with k position axes.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, C] -> [S, V] float32."""
        ...


class ModelDefinition(Protocol):
    """An architecture, as registered."""

    architectures: tuple[str, ...]
    """Names in a config's `architectures` that it serves."""

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` naming the field, where the configuration is not one it can build."""
        ...

    def max_model_len(self, config: Mapping[str, Any]) -> int:
        """Tokens the architecture was made for."""
        ...

    def build(self, build: ModelBuild) -> Model:
        """Build and load the model."""
        ...
