"""Random attention cases: a layer, some sequences, and the steps in which they are computed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from headrace.core.interfaces import AttentionBackend, AttentionSpec

__all__ = ["KINDS", "AttentionCase", "Chunk", "random_case", "served_spec"]

KINDS = ("prefill", "decode", "mixed", "chunked")
"""Of random cases: what a step holds."""


class Chunk(NamedTuple):
    """Tokens [begin, end) of one sequence, computed in one step."""

    sequence: int
    begin: int
    end: int


@dataclass(frozen=True)
class AttentionCase:
    """What a layer does, how long its sequences are, and the steps in which they are computed."""

    spec: AttentionSpec
    lengths: tuple[int, ...]
    steps: tuple[tuple[Chunk, ...], ...]
    lse: bool
    seed: int


def random_case(seed: int, kind: str) -> AttentionCase:
    """Return the case of this seed and kind (one of `KINDS`); the same on every machine."""
    rng = random.Random(f"{kind}/{seed}")
    num_kv_heads = rng.choice((1, 1, 2, 3, 4))
    dtype = rng.choice(("float32", "float32", "bfloat16"))
    spec = AttentionSpec(
        num_heads=num_kv_heads * rng.choice((1, 2, 3, 4, 8)),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice((64, 64, 64, 128, 32, 80)),
        dtype=dtype,
        kv_dtype=dtype,
        block_size=rng.choice((1, 8, 16, 16, 32)),
        window=rng.choice((None, None, rng.randint(1, 9), rng.randint(10, 40))),
        soft_cap=rng.choice((None, None, rng.uniform(1.0, 8.0))),
        sinks=rng.random() < 0.25,
    )
    most = 1 if rng.random() < 0.2 else 6
    lengths = [rng.randint(2, rng.choice((5, 20, 70))) for _ in range(rng.randint(1, most))]
    if kind == "prefill":
        steps = [[Chunk(s, 0, length) for s, length in enumerate(lengths)]]
    elif kind == "decode":
        steps = [[Chunk(s, 0, length - 1) for s, length in enumerate(lengths)]]
        steps.append([Chunk(s, length - 1, length) for s, length in enumerate(lengths)])
    else:
        steps = _in_pieces(rng, lengths, decode_share=0.5 if kind == "mixed" else 0.1)
    for step in steps:
        rng.shuffle(step)
    return AttentionCase(
        spec, tuple(lengths), tuple(tuple(step) for step in steps), rng.random() < 0.3, rng.getrandbits(30)
    )


def _in_pieces(rng: random.Random, lengths: list[int], decode_share: float) -> list[list[Chunk]]:
    """Compute all sequences in chunks of random size, some of them single tokens, some sequences sitting out."""
    done = [0] * len(lengths)
    steps = []
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        step: list[Chunk] = []
        for s, length in enumerate(lengths):
            if done[s] < length and (rng.random() < 0.8 or not step):
                count = 1 if done[s] and rng.random() < decode_share else rng.randint(1, 30)
                end = min(length, done[s] + count)
                step.append(Chunk(s, done[s], end))
                done[s] = end
        steps.append(step)
    return steps


def served_spec(backend: AttentionBackend, spec: AttentionSpec, device: str) -> AttentionSpec | list[str]:
    """Return `spec`, or what is left of it when features the backend refuses are taken away one by one.

    Where nothing is left, its reasons for refusing the plain rest.
    """
    simpler: list[dict[str, Any]] = [
        {},
        {"sinks": False},
        {"soft_cap": None},
        {"window": None},
        {"head_dim": 64},
        {"block_size": 16},
        {"dtype": "float32", "kv_dtype": "float32"},
        {"num_heads": spec.num_kv_heads},
    ]
    reasons: list[str] = []
    for changes in simpler:
        spec = replace(spec, **changes)
        reasons = backend.why_not(spec, device)
        if not reasons:
            return spec
    return reasons
