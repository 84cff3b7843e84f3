"""Small heads on the model's hidden states draft, all tokens at once.

Head i guesses the token i + 1 places behind the one just drawn, from the hidden state h that one was drawn from: the
model's own output projection of h + silu(weight · f + bias), where f is h, or the states of tapped layers one behind
the other. A folder holds them: config.json with `architectures`, `num_heads` and perhaps `taps`, a list of layers,
and model.safetensors with `heads.0.weight` [C, F], `heads.0.bias` [C] and so on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import (
    BatchRow,
    DraftDistribution,
    LogitsRow,
    Model,
    Proposer,
    RunnerBatch,
)
from headrace.core.interfaces.build import WorkerContext
from headrace.core.plan import NewRequest, StepResult
from headrace.core.sampling_params import SamplingParams
from headrace.executors.sampler import SamplingOps
from headrace.executors.selection import Ops
from headrace.models.opening import open_checkpoint
from headrace.plugins.speculative.draft_length import DraftLengths
from headrace.plugins.speculative.draft_sampler import LOGITS_ROWS, DraftSampler
from headrace.plugins.speculative.observe import observe
from headrace.plugins.speculative.options import SpeculativeSection

__all__ = ["HeadsProposer"]


ARCHITECTURE = "DraftHeads"
"""What the folder's config.json says it holds."""


@dataclass(frozen=True)
class _Heads:
    """Weights [heads, C, F] and biases [heads, C], float32."""

    taps: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, hidden: torch.Tensor, features: torch.Tensor, count: int) -> torch.Tensor:
        """Hidden [R, C], features [R, F] -> states [R, count, C] of the first heads."""
        moved = torch.einsum("rf,hcf->rhc", features.float(), self.weight[:count]) + self.bias[:count]
        return (hidden.float().unsqueeze(1) + torch.nn.functional.silu(moved)).to(hidden.dtype)


@dataclass(frozen=True)
class _Work:
    """A request that gets drafts in this step."""

    row: BatchRow
    params: SamplingParams
    ids: list[int]
    """Confirmed."""
    state: int
    """Which of the step's hidden states the last id was drawn from."""
    num_drafts: int


class HeadsProposer(Proposer):
    """Drafts as many tokens as there are heads, at most.

    Raises `CheckpointError` where the folder does not hold heads of this model.
    """

    name = "heads"

    def __init__(
        self, context: WorkerContext, section: SpeculativeSection, lengths: DraftLengths | None = None
    ) -> None:
        self._model: Model = context.model
        self._heads = _read(Path(section.model or "").expanduser(), context)
        self.taps = self._heads.taps
        most = min(section.num_speculative_tokens, self._heads.weight.shape[0])
        self._lengths = lengths or DraftLengths(most, adaptive=section.adaptive)
        draw = Ops(context.registry, context.device, context.dtype).find("draw")
        self.token_equal = section.acceptance == "same"
        self._sampler = DraftSampler(context, SamplingOps(draw), section)
        self._params: dict[str, SamplingParams] = {}
        self._spent = 0.0
        """Seconds the last call took: they are a part of what its drafts cost."""

    def on_add(self, request: NewRequest) -> None:
        """Begin."""
        if request.params.max_tokens != 0:
            self._params[request.request_id] = self._sampler.add(request)

    def on_remove(self, request_id: str) -> None:
        """Forget a request."""
        self._params.pop(request_id, None)
        self._sampler.remove(request_id)
        self._lengths.forget(request_id)

    def distributions(self, request_id: str) -> Sequence[DraftDistribution]:
        """What drafts were drawn from, where rejection sampling was chosen."""
        return self._sampler.distributions(request_id)

    def propose(
        self, batch: RunnerBatch, hidden: torch.Tensor, taps: Mapping[int, torch.Tensor], result: StepResult
    ) -> Mapping[str, Sequence[int]]:
        """Draft behind each token that was drawn."""
        begun = time.perf_counter()
        num_drawing = observe(self._lengths, batch, result, begun - batch.started + self._spent)
        works: list[_Work] = []
        first = 0
        for row in batch.rows:
            tokens = result.requests[row.request_id].tokens
            params = self._params.get(row.request_id)
            count = self._lengths.choose(row.request_id, num_drawing) if tokens and params else 0
            if count and params:
                ids = [*np.asarray(row.tokens[: row.num_confirmed]).tolist(), *tokens]
                state = first + len(ids) - 2 - row.start
                works.append(_Work(row, params, ids, state, count))
            first += row.count
        drafts = self._draft(works, hidden, taps) if works else {}
        self._spent = time.perf_counter() - begun
        return drafts

    def _draft(
        self, works: Sequence[_Work], hidden: torch.Tensor, taps: Mapping[int, torch.Tensor]
    ) -> dict[str, list[int]]:
        places = [work.state for work in works]
        last = hidden[places]
        features = torch.cat([taps[tap][places] for tap in self.taps], dim=1) if self.taps else last
        most = max(work.num_drafts for work in works)
        states = self._heads(last, features, most)
        drafts: dict[str, list[int]] = {}
        for first in range(0, len(works), LOGITS_ROWS // most):
            part = slice(first, first + LOGITS_ROWS // most)
            logits = self._model.logits(states[part].flatten(0, 1))
            drafts |= self._draw(works[part], logits.view(-1, most, logits.shape[1]))
        return drafts

    def _draw(self, works: Sequence[_Work], logits: torch.Tensor) -> dict[str, list[int]]:
        """Draw from logits [R, drafts, V], place by place: penalties and masks look at the drafts before."""
        drafts: list[list[int]] = [[] for _ in works]
        for place in range(logits.shape[1]):
            going = [i for i, work in enumerate(works) if len(drafts[i]) == place < work.num_drafts]
            if not going:
                break
            rows = [_row(works[i], drafts[i]) for i in going]
            for i, token in zip(going, self._sampler.draw(rows, logits[going, place]), strict=True):
                if token is not None:
                    drafts[i].append(token)
        return {work.row.request_id: own for work, own in zip(works, drafts, strict=True)}


def _row(work: _Work, drafts: Sequence[int]) -> LogitsRow:
    ids = np.array([*work.ids, *drafts], np.int64)
    tokens: Any = ids
    return LogitsRow(
        work.row.request_id,
        work.params,
        work.row.stash,
        work.row.num_prompt_tokens,
        len(ids),
        tokens,
        len(work.ids),
    )


def _read(path: Path, context: WorkerContext) -> _Heads:
    """Read heads from a folder."""
    checkpoint = open_checkpoint(path, context.registry)
    try:
        config = checkpoint.config
        if config.get("architectures") != [ARCHITECTURE]:
            raise CheckpointError(
                f"{path}: architectures in config.json must be [{ARCHITECTURE!r}], got "
                f"{config.get('architectures')!r:.100}: this folder holds no heads"
            )
        count, taps = config.get("num_heads"), config.get("taps", [])
        if type(count) is not int or not 0 < count <= 64:
            raise CheckpointError(
                f"{path}: num_heads in config.json must be from 1 to 64, got {count!r:.100}"
            )
        layers = int(context.model_config.get("num_hidden_layers", 0))
        if not isinstance(taps, list) or not all(type(tap) is int and 0 <= tap < layers for tap in taps):
            raise CheckpointError(
                f"{path}: taps in config.json must be a list of layers from 0 to {layers - 1}, got {taps!r:.100}"
            )
        size = int(context.model_config["hidden_size"])
        shapes = {"weight": (size, size * max(1, len(taps))), "bias": (size,)}
        found: dict[str, list[torch.Tensor]] = {}
        for part, shape in shapes.items():
            for name in (f"heads.{i}.{part}" for i in range(count)):
                tensor = checkpoint.tensors.get(name)
                if tensor is None or tuple(tensor.shape) != shape:
                    got = "it is missing" if tensor is None else f"it is {list(tensor.shape)}"
                    raise CheckpointError(f"{path}: tensor {name!r} must be {list(shape)}, {got}")
                found.setdefault(part, []).append(tensor.decode(torch.float32).to(context.device))
    finally:
        checkpoint.close()
    return _Heads(tuple(taps), torch.stack(found["weight"]), torch.stack(found["bias"]))
