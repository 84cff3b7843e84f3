"""The GGUF architectures known: what each calls its sizes and tensors, and what Hugging Face calls them.

To add a family, add an `Architecture` to `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["ARCHITECTURES", "FREQUENCY_FACTORS", "LONG_FACTORS", "SHORT_FACTORS", "Architecture"]

FREQUENCY_FACTORS = "model.rotary_emb.freq_factors"
"""GGUF's `rope_freqs.weight`, [D / 2]: what the rotary frequencies are divided by (Llama 3.1 and later). GGUF keeps
these in place of Hugging Face's `rope_scaling`; a model that does not take them would be wrong at every position."""

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""GGUF's tensors for the lists `long_factor` and `short_factor` in Hugging Face's `rope_scaling`."""


def _table(*tables: Mapping[str, str], **more: str) -> Mapping[str, str]:
    merged: dict[str, str] = {}
    for table in (*tables, more):
        merged.update(table)
    return MappingProxyType(merged)


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`. GGUF keys are written without the architecture in front."""

    model_type: str
    hf_class: str
    sizes: Mapping[str, str]
    """Whole numbers ≥ 1 it must have: config key → GGUF key."""
    tensors: Mapping[str, str]
    """Of the whole model: GGUF name → Hugging Face name."""
    layer_tensors: Mapping[str, str]
    """Of a layer: `attn_q` → `self_attn.q_proj`; `.weight` and `.bias` are kept."""
    permuted: Mapping[str, str] = field(default_factory=_table)
    """Layer tensors whose rows GGUF stores for interleaved rotation → the config key with their number of heads."""
    optional_sizes: Mapping[str, str] = field(default_factory=_table)
    """Whole numbers ≥ 1 it may have: config key → GGUF key."""
    optional_reals: Mapping[str, str] = field(default_factory=_table)
    """Numbers above 0 it may have: config key → GGUF key."""
    fixed: Mapping[str, Any] = field(default_factory=_table)
    """Config keys that every file of this architecture means."""
    rope_theta: float = 10000.0
    """Where the file has no base."""
    norms_plus_one: bool = False
    """Norm weights are stored with 1 added; Hugging Face's are not."""
    windowed: tuple[str, str] | None = None
    """(model type, class) instead, where the file says that attention has a window."""
    scale_by_hidden: frozenset[int] = frozenset()
    """Numbers of layers of the models whose query scale is the hidden size by heads, not the head size."""


_SIZES = _table(
    num_hidden_layers="block_count",
    max_position_embeddings="context_length",
    hidden_size="embedding_length",
    intermediate_size="feed_forward_length",
    num_attention_heads="attention.head_count",
)
_TENSORS = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        "rope_freqs.weight": FREQUENCY_FACTORS,
    }
)
_LAYER = _table(
    attn_norm="input_layernorm",
    attn_q="self_attn.q_proj",
    attn_k="self_attn.k_proj",
    attn_v="self_attn.v_proj",
    attn_output="self_attn.o_proj",
    attn_rot_embd="self_attn.rotary_emb.inv_freq",
    ffn_norm="post_attention_layernorm",
    ffn_gate="mlp.gate_proj",
    ffn_up="mlp.up_proj",
    ffn_down="mlp.down_proj",
)
_HEAD_NORMS = _table(attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm")
_AFTER_NORMS = _table(
    post_attention_norm="post_attention_layernorm", post_ffw_norm="post_feedforward_layernorm"
)
_GEMMA_LAYER = _table(_LAYER, _AFTER_NORMS, ffn_norm="pre_feedforward_layernorm")
_INTERLEAVED = _table(attn_q="num_attention_heads", attn_k="num_key_value_heads")
_WINDOW = _table(sliding_window="attention.sliding_window")
_CAPS = _table(
    attn_logit_softcapping="attn_logit_softcapping", final_logit_softcapping="final_logit_softcapping"
)
_GELU = MappingProxyType({"hidden_activation": "gelu_pytorch_tanh"})

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            "llama",
            "LlamaForCausalLM",
            _SIZES,
            _TENSORS,
            _LAYER,
            permuted=_INTERLEAVED,
            optional_sizes=_WINDOW,
            windowed=("mistral", "MistralForCausalLM"),
        ),
        "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _SIZES, _TENSORS, _LAYER),
        "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _SIZES, _TENSORS, _table(_LAYER, _HEAD_NORMS)),
        "gemma2": Architecture(
            "gemma2",
            "Gemma2ForCausalLM",
            _SIZES,
            _TENSORS,
            _GEMMA_LAYER,
            optional_sizes=_WINDOW,
            optional_reals=_CAPS,
            fixed=_GELU,
            norms_plus_one=True,
            scale_by_hidden=frozenset({46}),
        ),
        "gemma3": Architecture(
            "gemma3_text",
            "Gemma3ForCausalLM",
            _SIZES,
            _TENSORS,
            _table(_GEMMA_LAYER, _HEAD_NORMS),
            optional_sizes=_table(_WINDOW, sliding_window_pattern="attention.sliding_window_pattern"),
            optional_reals=_table(_CAPS, rope_local_base_freq="rope.freq_base_swa"),
            fixed=_GELU,
            rope_theta=1e6,
            norms_plus_one=True,
            scale_by_hidden=frozenset({62}),
        ),
        "phi3": Architecture(
            "phi3",
            "Phi3ForCausalLM",
            _SIZES,
            _TENSORS,
            _table(_LAYER, attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj"),
            optional_sizes=_table(
                _WINDOW, original_max_position_embeddings="rope.scaling.original_context_length"
            ),
        ),
        "granite": Architecture(
            "granite",
            "GraniteForCausalLM",
            _SIZES,
            _TENSORS,
            _LAYER,
            permuted=_INTERLEAVED,
            optional_reals=_table(
                embedding_multiplier="embedding_scale",
                residual_multiplier="residual_scale",
                attention_multiplier="attention.scale",
                logits_scaling="logit_scale",
            ),
        ),
        "olmo2": Architecture(
            "olmo2",
            "Olmo2ForCausalLM",
            _SIZES,
            _TENSORS,
            _table(_LAYER, _HEAD_NORMS, _AFTER_NORMS),
            optional_sizes=_WINDOW,
            windowed=("olmo3", "Olmo3ForCausalLM"),
        ),
        "smollm3": Architecture(
            "smollm3",
            "SmolLM3ForCausalLM",
            _SIZES,
            _TENSORS,
            _LAYER,
            permuted=_INTERLEAVED,
            fixed=MappingProxyType({"no_rope_layer_interval": 4}),
        ),
    }
)
"""By `general.architecture`."""
