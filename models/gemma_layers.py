"""The decoder that Gemma 2 and 3 share: norms on both sides of attention and feed-forward, window and full layers.

Norm weights are stored as what is added to 1, in checkpoints of every kind; the sum, taken in float32 when the model
is built, is the weight of the common norm op. A family's own file reads the spelling of its config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import ForwardContext, ModelBuild
from headrace.models.config_fields import choice, flag, positive_float, positive_int
from headrace.models.decoder_config import read_windows
from headrace.models.layers import embedding_and_head, require_whole_model
from headrace.models.rope import Rope, cos_sin_table

__all__ = ["GemmaConfig", "GemmaModel", "read_gemma"]


@dataclass(frozen=True)
class GemmaConfig:
    """A configuration, checked."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    eps: float
    tied: bool
    bias: bool
    """Whether the products of attention have one."""
    query_scale: float
    """Multiplies scores."""
    windows: tuple[int | None, ...]
    """A layer: how many tokens its attention sees; None: all."""
    full_rope: Rope
    window_rope: Rope
    soft_cap: float | None
    """c: attention scores become c · tanh(score / c)."""
    logits_cap: float | None
    """c: so do logits."""
    qk_norm: bool
    """Whether queries and keys are normed, head by head, before they are rotated."""


def read_gemma(
    config: Mapping[str, Any],
    *,
    period: int,
    full_rope: Rope,
    window_rope: Rope,
    caps: tuple[float | None, float | None],
    qk_norm: bool,
) -> GemmaConfig:
    """Read the keys that both families spell alike.

    period: where `layer_types` does not say, every so many layers one sees everything.
    caps: of scores and logits, where the configuration does not say; null in it turns one off.
    Raises `CheckpointError` naming the field that is wrong.
    """
    num_layers = positive_int(config, "num_hidden_layers")
    num_heads = positive_int(config, "num_attention_heads")
    num_kv_heads = positive_int(config, "num_key_value_heads", 4)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads ({num_heads}) in the model's configuration must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    head_dim = positive_int(config, "head_dim", 256)
    if head_dim % 2:
        raise CheckpointError(
            f"head_dim in the model's configuration must be even, dimensions rotate in pairs; got {head_dim}"
        )
    choice(config, "hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    if flag(config, "use_bidirectional_attention", False):
        raise CheckpointError(
            "use_bidirectional_attention in the model's configuration is true: the model is an encoder, which this "
            "architecture does not build; supported: false"
        )
    default_types = [
        "full_attention" if at % period == 0 else "sliding_attention" for at in range(1, num_layers + 1)
    ]
    types = config.get("layer_types") or default_types
    return GemmaConfig(
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=positive_int(config, "hidden_size"),
        intermediate_size=positive_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=positive_int(config, "max_position_embeddings"),
        eps=positive_float(config, "rms_norm_eps", 1e-6),
        tied=flag(config, "tie_word_embeddings", True),
        bias=flag(config, "attention_bias", False),
        query_scale=positive_float(config, "query_pre_attn_scalar", 256) ** -0.5,
        windows=read_windows({"sliding_window": 4096, **config, "layer_types": types}),
        full_rope=full_rope,
        window_rope=window_rope,
        soft_cap=_cap(config, "attn_logit_softcapping", caps[0]),
        logits_cap=_cap(config, "final_logit_softcapping", caps[1]),
        qk_norm=qk_norm,
    )


def _cap(config: Mapping[str, Any], field: str, default: float | None) -> float | None:
    value = config.get(field, default)
    return None if value is None else positive_float({field: value}, field)


class _Norm:
    """RMSNorm with weights stored as what is added to 1.

    Parameters
    ----------
    name: the checkpoint's name without `.weight`.
    """

    def __init__(self, build: ModelBuild, name: str, size: int, eps: float) -> None:
        self._rms_norm = build.op("rms_norm")
        self._add_rms_norm = build.op("add_rms_norm")
        stored = build.weights.take(f"{name}.weight", (size,))
        self._weight = (stored.float() + 1).to(stored.dtype)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, …, C] -> the same, normed."""
        normed: torch.Tensor = self._rms_norm(x, self._weight, self._eps)
        return normed

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, C] twice -> (their sum, normed; their sum)."""
        normed, total = self._add_rms_norm(x, residual, self._weight, self._eps)
        return normed, total


class _Attention:
    """Causal self-attention with a query scale of its own, a soft cap and head norms, where the family has them."""

    def __init__(
        self, build: ModelBuild, name: str, config: GemmaConfig, window: int | None, cos_sin: torch.Tensor
    ) -> None:
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        sizes = tuple(heads * config.head_dim for heads in self._heads)
        self._cos_sin = cos_sin
        self._rotary = build.op("rotary")
        self._qkv = build.linear(
            *(f"{name}.{part}_proj" for part in "qkv"),
            in_features=config.hidden_size,
            out_features=sizes,
            bias=config.bias,
        )
        self._out = build.linear(
            f"{name}.o_proj",
            in_features=sizes[0],
            out_features=(config.hidden_size,),
            bias=config.bias,
        )
        self._norms: tuple[_Norm, _Norm] | None = None
        if config.qk_norm:
            q_norm, k_norm = (
                _Norm(build, f"{name}.{part}_norm", config.head_dim, config.eps) for part in "qk"
            )
            self._norms = q_norm, k_norm
        spec = build.attention_spec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=window,
            soft_cap=config.soft_cap,
        )
        self._layer = build.attention(name, spec, scale=config.query_scale)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """X [N, C], positions [N] -> [N, C]."""
        heads = self._qkv(x).view(-1, sum(self._heads), self._head_dim)
        q, k, v = heads.split(self._heads, dim=1)
        if self._norms is not None:
            q, k = self._norms[0](q), self._norms[1](k)
        q, k = self._rotary(positions, q, k, self._cos_sin)
        return self._out(ctx.attend(self._layer, q, k, v))


class _Layer:
    """Attention and feed-forward, each between two norms, around the residual stream.

    Parameters
    ----------
    name: the checkpoint's prefix, `model.layers.0`.
    """

    def __init__(
        self, build: ModelBuild, name: str, config: GemmaConfig, window: int | None, cos_sin: torch.Tensor
    ) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self._before_attention = _Norm(build, f"{name}.input_layernorm", size, config.eps)
        self._attention = _Attention(build, f"{name}.self_attn", config, window, cos_sin)
        self._after_attention = _Norm(build, f"{name}.post_attention_layernorm", size, config.eps)
        self._before_mlp = _Norm(build, f"{name}.pre_feedforward_layernorm", size, config.eps)
        self._gate_up = build.gated_linear(
            f"{name}.mlp.gate_proj",
            f"{name}.mlp.up_proj",
            in_features=size,
            out_features=(inner, inner),
            op="gelu_mul",
        )
        self._down = build.linear(f"{name}.mlp.down_proj", in_features=inner, out_features=(size,))
        self._after_mlp = _Norm(build, f"{name}.post_feedforward_layernorm", size, config.eps)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x, residual), both [N, C]: the hidden state is their sum, which the next norm takes.

        `residual` is None before the first layer: x is the embedding.
        """
        if residual is None:
            x, residual = self._before_attention(x), x
        else:
            x, residual = self._before_attention.add(x, residual)
        x = self._after_attention(self._attention(x, positions, ctx))
        x, residual = self._before_mlp.add(x, residual)
        return self._after_mlp(self._down(self._gate_up(x))), residual


class GemmaModel:
    """A built Gemma.

    taps: layers whose hidden states (what the next layer gets, before its norm) `forward` returns as well;
    empty unless somebody who needs them sets it.
    """

    def __init__(self, build: ModelBuild, config: GemmaConfig) -> None:
        require_whole_model(build, config.num_layers)
        self.vocab_size = config.vocab_size
        self.taps: frozenset[int] = frozenset()
        self._logits_cap = config.logits_cap
        self._embed, self._head = embedding_and_head(
            build, "model.embed_tokens", config.vocab_size, config.hidden_size, tied=config.tied
        )
        # Rounded to the type that is computed in, as when the models were trained.
        self._scale = torch.tensor(config.hidden_size**0.5, dtype=build.dtype, device=build.device)
        tables = {
            rope: cos_sin_table(rope, config.head_dim, build.max_model_len, build.device)
            for rope in {config.full_rope, config.window_rope}
        }
        self._layers = [
            _Layer(
                build,
                f"model.layers.{index}",
                config,
                window,
                tables[config.window_rope if window else config.full_rope],
            )
            for index, window in enumerate(config.windows)
        ]
        self._norm = _Norm(build, "model.norm", config.hidden_size, config.eps)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, C]."""
        return self._embed(ids) * self._scale

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """X [N, C], positions [N] -> ([N, C] after the last norm, hidden states of tapped layers)."""
        residual: torch.Tensor | None = None
        taps: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            x, residual = layer(x, residual, positions, ctx)
            if index in self.taps:
                taps[index] = x + residual
        hidden, _ = self._norm.add(x, residual)
        return hidden, taps

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, C] -> [S, V] float32."""
        scores: torch.Tensor = self._head(hidden).float()
        if self._logits_cap is None:
            return scores
        return scores.div_(self._logits_cap).tanh_().mul_(self._logits_cap)
