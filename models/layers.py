"""The parts most decoder models share: causal self-attention, the gated feed-forward, and their blocks.

Each part fetches its ops, products and weights once, when it is built; a call only computes. N tokens of
any requests go through as [N, C]; which of them see each other is the attention context's business. What families
do differently is put together of parts: `Normed` and `Scaled` stand around an attention or feed-forward, and a block
norms what goes into them (`DecoderLayer`) or leaves it as it is (`PlainLayer`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import Embedding, ForwardContext, Linear, ModelBuild

__all__ = [
    "AttentionShape",
    "DecoderLayer",
    "GatedMLP",
    "Normed",
    "PlainLayer",
    "QKNorms",
    "Rotation",
    "Scaled",
    "SelfAttention",
    "embedding_and_head",
    "require_whole_model",
    "set_aside",
    "set_tied_aside",
    "stacked_names",
]

logger = logging.getLogger("headrace")

Part = Callable[..., torch.Tensor]
"""An attention (x, positions, ctx) or a feed-forward (x): [N, C] -> [N, C]."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a self-attention."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies Q·K."""
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None
    """How many tokens a token sees, itself included; None: all."""


def stacked_names(
    build: ModelBuild, prefix: str, whole: str, parts: tuple[str, ...], out_features: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return names and outputs of weights to stack: `PREFIX.WHOLE` where the checkpoint did that, or its parts."""
    if f"{prefix}.{whole}.weight" in build.weights:
        return (f"{prefix}.{whole}",), (sum(out_features),)
    return tuple(f"{prefix}.{part}" for part in parts), out_features


class Rotation:
    """Turns queries and keys by their positions.

    Parameters
    ----------
    cos_sin: [P, R] float32, see `headrace.models.rope.cos_sin_table`; shared by layers. R < D: only the first R
        dimensions of a head turn.
    """

    def __init__(self, build: ModelBuild, cos_sin: torch.Tensor) -> None:
        self._rotary = build.op("rotary")
        self._cos_sin = cos_sin

    def __call__(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Q [N, H, D] and k [N, K, D] -> the same, turned; in place."""
        turned: tuple[torch.Tensor, torch.Tensor] = self._rotary(positions, q, k, self._cos_sin)
        return turned


class QKNorms:
    """RMSNorm of queries and keys before they turn: of each head with weights all heads share, or of all at once.

    Parameters
    ----------
    name: the checkpoint's prefix, `model.layers.0.self_attn`.
    q_size, k_size: how many numbers are normed together; D, or H·D and K·D.
    """

    def __init__(self, build: ModelBuild, name: str, *, q_size: int, k_size: int, eps: float) -> None:
        self._rms_norm = build.op("rms_norm")
        self._q_weight = build.weights.take(f"{name}.q_norm.weight", (q_size,))
        self._k_weight = build.weights.take(f"{name}.k_norm.weight", (k_size,))
        self._eps = eps

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Q [N, H, D] and k [N, K, D] -> the same, normed."""
        return self._apply(q, self._q_weight), self._apply(k, self._k_weight)

    def _apply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._rms_norm(x.view(x.shape[0], -1, weight.shape[0]), weight, self._eps)
        return normed.view(x.shape)


class SelfAttention:
    """Causal self-attention with grouped query heads.

    Parameters
    ----------
    name: the checkpoint's prefix, `model.layers.0.self_attn`.
    rotation: None in a layer that knows no positions.
    norms: None where queries and keys are not normed.
    """

    def __init__(
        self,
        build: ModelBuild,
        name: str,
        shape: AttentionShape,
        *,
        rotation: Rotation | None,
        norms: QKNorms | None = None,
    ) -> None:
        self._heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        self._head_dim = shape.head_dim
        self._sizes = tuple(heads * shape.head_dim for heads in self._heads)
        self._rotation = rotation
        self._norms = norms
        names, outputs = stacked_names(build, name, "qkv_proj", ("q_proj", "k_proj", "v_proj"), self._sizes)
        self._qkv = build.linear(
            *names, in_features=shape.hidden_size, out_features=outputs, bias=shape.qkv_bias
        )
        self._out = build.linear(
            f"{name}.o_proj",
            in_features=self._sizes[0],
            out_features=(shape.hidden_size,),
            bias=shape.out_bias,
        )
        spec = build.attention_spec(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
        )
        self._layer = build.attention(name, spec, scale=shape.scale)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """X [N, C], positions [N] -> [N, C]."""
        heads = self._qkv(x).view(-1, sum(self._heads), self._head_dim)
        q, k, v = heads.split(self._heads, dim=1)
        if self._norms is not None:
            q, k = self._norms(q, k)
        if self._rotation is not None:
            q, k = self._rotation(positions, q, k)
        return self._out(ctx.attend(self._layer, q, k, v))


class GatedMLP:
    """down(silu(gate(x)) · up(x)), as one product of gate and up.

    Parameters
    ----------
    name: the checkpoint's prefix, `model.layers.0.mlp`.
    """

    def __init__(
        self, build: ModelBuild, name: str, *, hidden_size: int, intermediate_size: int, bias: bool = False
    ) -> None:
        sizes = (intermediate_size, intermediate_size)
        names, outputs = stacked_names(build, name, "gate_up_proj", ("gate_proj", "up_proj"), sizes)
        self._gate_up = build.gated_linear(
            *names, in_features=hidden_size, out_features=outputs, op="silu_mul", bias=bias
        )
        self._down = build.linear(
            f"{name}.down_proj", in_features=intermediate_size, out_features=(hidden_size,), bias=bias
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, C]."""
        return self._down(self._gate_up(x))


class Normed:
    """A part whose result is normed before it joins the residual stream.

    Parameters
    ----------
    name: the checkpoint's name of the norm, `model.layers.0.post_attention_layernorm`.
    """

    def __init__(self, build: ModelBuild, name: str, part: Part, *, hidden_size: int, eps: float) -> None:
        self._part = part
        self._rms_norm = build.op("rms_norm")
        self._weight = build.weights.take(f"{name}.weight", (hidden_size,))
        self._eps = eps

    def __call__(self, *inputs: Any) -> torch.Tensor:
        """Return [N, C] for the part's own inputs."""
        normed: torch.Tensor = self._rms_norm(self._part(*inputs), self._weight, self._eps)
        return normed


class Scaled:
    """A part whose result is multiplied by a number before it joins the residual stream."""

    def __init__(self, build: ModelBuild, part: Part, factor: float) -> None:
        self._scale = build.op("scale")
        self._part = part
        self._factor = factor

    def __call__(self, *inputs: Any) -> torch.Tensor:
        """Return [N, C] for the part's own inputs."""
        scaled: torch.Tensor = self._scale(self._part(*inputs), self._factor)
        return scaled


class DecoderLayer:
    """Norm, attention, norm, feed-forward, each pair around the residual stream.

    Parameters
    ----------
    name: the checkpoint's prefix, `model.layers.0`.
    """

    def __init__(
        self, build: ModelBuild, name: str, *, attention: Part, mlp: Part, hidden_size: int, eps: float
    ) -> None:
        self._attention = attention
        self._mlp = mlp
        self._eps = eps
        self._rms_norm = build.op("rms_norm")
        self._add_rms_norm = build.op("add_rms_norm")
        self._input_norm = build.weights.take(f"{name}.input_layernorm.weight", (hidden_size,))
        self._post_norm = build.weights.take(f"{name}.post_attention_layernorm.weight", (hidden_size,))

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x, residual), both [N, C]: the hidden state is their sum, which the next norm takes.

        `residual` is None before the first layer: x is the embedding.
        """
        if residual is None:
            x, residual = self._rms_norm(x, self._input_norm, self._eps), x
        else:
            x, residual = self._add_rms_norm(x, residual, self._input_norm, self._eps)
        x = self._attention(x, positions, ctx)
        x, residual = self._add_rms_norm(x, residual, self._post_norm, self._eps)
        return self._mlp(x), residual


class PlainLayer:
    """Attention and feed-forward on the residual stream as it is: what norms there are stand behind them."""

    def __init__(self, build: ModelBuild, *, attention: Part, mlp: Part) -> None:
        self._add = build.op("add")
        self._attention = attention
        self._mlp = mlp

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLayer`."""
        hidden = x if residual is None else self._add(x, residual)
        hidden = self._add(hidden, self._attention(hidden, positions, ctx))
        return self._mlp(hidden), hidden


def require_whole_model(build: ModelBuild, num_layers: int) -> None:
    """Raise `CheckpointError` unless this rank holds every layer, unsplit."""
    parallel = build.parallel
    if parallel.tensor_size != 1:
        raise CheckpointError(
            f"this architecture runs on one rank, tensor_parallel_size is {parallel.tensor_size}; use 1"
        )
    end = num_layers if parallel.end_layer is None else parallel.end_layer
    if (parallel.first_layer, end) != (0, num_layers):
        raise CheckpointError(
            f"this architecture runs as a whole, a rank was given layers [{parallel.first_layer}, {end}) of "
            f"{num_layers}; use pipeline_parallel_size 1"
        )


def embedding_and_head(
    build: ModelBuild, name: str, vocab_size: int, hidden_size: int, *, tied: bool
) -> tuple[Embedding, Linear]:
    """Build the lookup from `NAME.weight` and the output projection: from the same where they are tied."""
    shape = (vocab_size, hidden_size)
    lookup: Embedding
    if tied:
        if "lm_head.weight" in build.weights:
            weight = build.weights.take(f"{name}.weight", shape)
            set_tied_aside(build, "lm_head.weight", f"{name}.weight", weight)
        lookup, head = build.tied_embedding(name, vocab_size, hidden_size)
    else:
        lookup = _Lookup(build, build.weights.take(f"{name}.weight", shape))
        head = build.lm_head("lm_head", vocab_size, hidden_size)
    return build.embedding(name, lookup, shape), head


class _Lookup:
    """Rows of a weight that is nothing but an embedding."""

    def __init__(self, build: ModelBuild, weight: torch.Tensor) -> None:
        self._op = build.op("embedding")
        self._weight = weight

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, C]."""
        x: torch.Tensor = self._op(ids, self._weight)
        return x


def set_aside(build: ModelBuild, name: str, shape: tuple[int, ...]) -> None:
    """Take a tensor the checkpoint may carry and the model has no use for, so that it does not count as unknown."""
    if name in build.weights:
        build.weights.take(name, shape)


def set_tied_aside(build: ModelBuild, name: str, twin: str, tensor: torch.Tensor) -> None:
    """Take a tensor the checkpoint may carry although it says that it is `tensor`, which is called `twin`.

    It is not used; where it differs, who made the checkpoint may have meant otherwise, and a warning says so.
    """
    if name not in build.weights:
        return
    own = build.weights.take(name, tuple(tensor.shape))
    if not torch.equal(own.to(tensor.device), tensor):
        logger.warning(
            "the checkpoint's %s is not used: the model's configuration says that it is %s (tie_word_embeddings), "
            "from which it differs",
            name,
            twin,
        )
