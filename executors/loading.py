"""From a checkpoint to a model that can run: definition, ops, weights, attention backend."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.core.errors import ConfigError
from headrace.core.interfaces import (
    AttentionBackend,
    AttentionLayer,
    AttentionSpec,
    GraphRecorder,
    KVCacheLayout,
    KVCacheSpec,
    LinearWrapper,
    Model,
)
from headrace.core.interfaces.build import ExecutorBuild
from headrace.core.kv.layout import layout_for
from headrace.executors.build import Builder
from headrace.executors.quantizing import choose_quantization
from headrace.executors.sampler import SamplingOps
from headrace.executors.scoring import score
from headrace.executors.selection import Ops, choose_attention, torch_dtype
from headrace.models.bridge.choose import definition_for
from headrace.models.bridge.definition import BridgeDefinition
from headrace.models.opening import open_checkpoint, reading_configuration
from headrace.models.weights import CheckpointWeights

__all__ = ["LoadedModel", "kv_layout", "kv_specs", "load_model"]


@dataclass
class LoadedModel:
    """A model with its attention backend, before it has KV memory."""

    model: Model
    config: Mapping[str, Any]
    backend: AttentionBackend
    layers: Mapping[str, tuple[AttentionLayer, AttentionSpec]]
    device: str
    recorder: GraphRecorder | None
    """What records passes of this model; None: they run as they are."""
    sampling: SamplingOps
    report: dict[str, Any]
    """Facts for the start-up report."""
    wrappers: Sequence[LinearWrapper] = ()
    """What stands around its products."""


def load_model(
    build: ExecutorBuild, device: str, layer_prefix: str = "", wrappers: Sequence[LinearWrapper] = ()
) -> LoadedModel:
    """Open, check, build and load the model. Raises `CheckpointError` or `ConfigError`.

    layer_prefix: goes before the names of its attention layers; a second model beside another needs one.
    wrappers: stand around its products.
    """
    started = time.perf_counter()
    checkpoint = build.checkpoint or open_checkpoint(build.model_path, build.registry)
    with reading_configuration(checkpoint):
        definition, _ = definition_for(checkpoint.config, build.registry, build.config.model_impl)
    ops = Ops(build.registry, device, build.dtype)
    with reading_configuration(checkpoint):
        method = choose_quantization(build.registry, build.config.quantization, checkpoint)
    weights = CheckpointWeights(checkpoint, torch_dtype(build.dtype))
    builder = Builder(
        config=checkpoint.config,
        weights=weights,
        ops=ops,
        device=device,
        max_model_len=build.max_model_len,
        block_size=build.config.cache.block_size,
        layer_prefix=layer_prefix,
        kv_dtype=build.config.cache.kv_cache_dtype,
        wrappers=wrappers,
        quantizer=None if method is None else method.begin(checkpoint),
    )
    with torch.inference_mode():
        model = definition.build(builder)
    weights.check_all_taken()
    specs = list(dict.fromkeys(spec for _, spec in builder.layers.values()))
    backend, refused = choose_attention(build.registry, build.config.attention.backend, specs, device)
    recorder = ops.recorder(backend)
    sampling = SamplingOps(ops.find("draw"), ops.find("score") or score)
    report = {
        "architecture": checkpoint.config["architectures"][0],
        "parameters": sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()),
        "weights_bytes": weights.bytes,
        "quantization": None if method is None else method.name,
        "linear_formats": ops.linear_formats,
        "dtype": build.dtype,
        "kv_dtype": specs[0].kv_dtype,
        "device": device,
        "attention_backend": backend.name,
        "attention_refused": refused,
        "op_sets": ops.names_used,
        "op_sets_refused": ops.refused,
        "causal": all(spec.causal for spec in specs),
        # What the bridge computes outside of products and attention is transformers' and promises nothing.
        "row_invariant": backend.row_invariant
        and ops.row_invariant
        and not isinstance(definition, BridgeDefinition),
        "fingerprint": _fingerprint(build, backend, ops),
        "load_seconds": time.perf_counter() - started,
    }
    return LoadedModel(
        model, checkpoint.config, backend, builder.layers, device, recorder, sampling, report, wrappers
    )


def _fingerprint(build: ExecutorBuild, backend: AttentionBackend, ops: Ops) -> str:
    """Name everything that decides the last bit of a logit, in 12 hexadecimal digits."""
    facts = (
        torch.__version__,  # views, lookups and sums between ops are torch's
        backend.name,
        backend.numerics,
        ops.numerics,
        sorted(set(ops.used)),
        build.config.quantization,
        build.config.cache.kv_cache_dtype,
        build.dtype,
        build.config.cache.block_size,
        build.config.parallel.tensor_parallel_size,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def kv_specs(loaded: LoadedModel, block_size: int) -> dict[str, KVCacheSpec]:
    """Return what a model's attention layers keep, by name."""
    return {
        name: KVCacheSpec(
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=spec.kv_dtype,
            bytes_per_token=-(-loaded.backend.layout(spec).page_bytes // block_size),
            window=spec.window,
        )
        for name, (_, spec) in loaded.layers.items()
    }


def kv_layout(loaded: LoadedModel, drafting: Mapping[str, KVCacheSpec], block_size: int) -> KVCacheLayout:
    """Lay out the pages of the model's layers, and those of a proposer's (`drafting`) beside them.

    Raises `ConfigError` where two layers have one name.
    """
    clash = loaded.layers.keys() & drafting.keys()
    if clash:
        raise ConfigError(
            f"the proposer calls layers as the model does: {sorted(clash)}; they need other names"
        )
    specs = {**kv_specs(loaded, block_size), **drafting}
    page_bytes = {name: spec.bytes_per_token * block_size for name, spec in drafting.items()}
    for name, (_, attention) in loaded.layers.items():
        page_bytes[name] = loaded.backend.layout(attention).page_bytes
    # Pages serve layers of one shape and one owner.
    storage = {
        name: (name in drafting, spec.num_kv_heads, spec.head_dim, spec.dtype) for name, spec in specs.items()
    }
    return layout_for(specs, page_bytes, block_size, storage)
