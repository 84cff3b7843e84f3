"""The GGUF weight loader: a file becomes a checkpoint whose tensors are read when asked for."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import CheckpointTensor
from headrace.models.gguf.architectures import LONG_FACTORS, SHORT_FACTORS, Architecture
from headrace.models.gguf.config import model_config
from headrace.models.gguf.dequantize import decode_blocks
from headrace.models.gguf.names import architecture_of, tensor_name
from headrace.models.gguf.reader import MAGIC, ArrayValue, TensorInfo, read_header

__all__ = ["GGUFCheckpoint", "GGUFLoader", "GGUFTensor", "TokenizerKeys"]

_SAMPLING = (
    ("temperature", "temp", float),
    ("top_k", "top_k", int),
    ("top_p", "top_p", float),
    ("min_p", "min_p", float),
    ("repetition_penalty", "penalty_repeat", float),
)
"""generation_config key, GGUF key below `general.sampling.`, type."""


class GGUFTensor:
    """One tensor of a GGUF file; see `headrace.core.interfaces.CheckpointTensor`.

    heads: where the rows are those of so many heads, stored for interleaved rotation (pairs are neighbours);
    they are given back in Hugging Face's order (pairs are half a head apart).
    added: what the stored numbers have too much: `decode` takes it off, `read` gives them as stored.
    """

    def __init__(
        self,
        checkpoint: GGUFCheckpoint,
        info: TensorInfo,
        name: str,
        heads: int | None,
        added: float = 0.0,
    ) -> None:
        self._checkpoint = checkpoint
        self._info = info
        self._heads = heads
        self._added = added
        self.name = name
        self.shape = info.shape
        self.encoding = info.encoding.name

    def __repr__(self) -> str:
        return f"GGUFTensor({self.name!r}, {list(self.shape)}, {self.encoding})"

    def read(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return the encoded bytes of some rows: uint8 [rows, bytes a row], a copy.

        A vector has one number a row, a scalar one row.
        """
        return torch.from_numpy(np.array(self._encoded(rows)))

    def decode(self, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """Return some rows decoded to `dtype`, through float32; a fresh tensor."""
        encoded = self._encoded(rows)
        shape = (len(encoded), *self.shape[1:]) if self.shape else ()
        if self._added:
            wide = decode_blocks(self._info.encoding, encoded, torch.float32)
            return wide.sub_(self._added).to(dtype).reshape(shape)
        return decode_blocks(self._info.encoding, encoded, dtype).reshape(shape)

    def _encoded(self, rows: slice) -> npt.NDArray[np.uint8]:
        """[rows, bytes a row], contiguous; a view of the file where no row had to move."""
        data = self._checkpoint.bytes_of(self._info)
        count = self.shape[0] if self.shape else 1
        table = data.reshape(count, len(data) // count if count else 0)
        if self._heads is None:
            return np.ascontiguousarray(table[rows])
        # Row (head, half, i) of ours is row (head, i, half) of the file's.
        order = np.arange(count).reshape(self._heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return table[order[rows]]


class GGUFCheckpoint:
    """An opened GGUF file; see `headrace.core.interfaces.Checkpoint`."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self._data: mmap.mmap | None = data
        header = read_header(path, data)
        metadata = header.metadata
        if metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{path}: the model is split into {metadata['split.count']} files, which is not supported; "
                "join them into one first (gguf-split --merge)"
            )
        architecture = architecture_of(path, metadata)
        config = model_config(path, header, architecture)
        self.config: Mapping[str, Any] = config
        self.generation_config: Mapping[str, Any] = _generation_config(metadata)
        template = metadata.get("tokenizer.chat_template")
        self.chat_template: str | None = template if isinstance(template, str) else None
        kind = metadata.get("tokenizer.ggml.model")
        has_words = kind not in (None, "none", "no_vocab")
        self.tokenizer: Mapping[str, Any] | None = TokenizerKeys(self, metadata, kind) if has_words else None
        tensors = {
            tensor.name: tensor for tensor in (self._tensor(info, architecture) for info in header.tensors)
        }
        if LONG_FACTORS in tensors and SHORT_FACTORS in tensors:
            long, short = (tensors.pop(name).decode(torch.float32) for name in (LONG_FACTORS, SHORT_FACTORS))
            config["rope_scaling"] = {
                "rope_type": "longrope",
                "long_factor": long.tolist(),
                "short_factor": short.tolist(),
            }
        self.tensors: Mapping[str, CheckpointTensor] = tensors

    def _tensor(self, info: TensorInfo, architecture: Architecture) -> GGUFTensor:
        name, heads_key = tensor_name(architecture, info.name)
        heads = self.config[heads_key] if heads_key else None
        if heads is not None and (not info.shape or info.shape[0] % (2 * heads)):
            raise CheckpointError(
                f"{self.path}: tensor {info.name!r} of shape {list(info.shape)} must have a multiple of "
                f"{2 * heads} rows, for {heads} heads ({heads_key}) of pairs"
            )
        plus_one = architecture.norms_plus_one and name.endswith("norm.weight")
        return GGUFTensor(self, info, name, heads, 1.0 if plus_one else 0.0)

    def data(self, what: str) -> mmap.mmap:
        """Return the mapped file. Raises `CheckpointError` naming `what` it was wanted for once it is closed."""
        if self._data is None:
            raise CheckpointError(f"{self.path} was closed before {what} was read")
        return self._data

    def bytes_of(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes as they lie in the file: a read-only view."""
        data = self.data(f"tensor {info.name!r}")
        return (
            np.frombuffer(data, np.uint8, info.nbytes, info.start) if info.nbytes else np.empty(0, np.uint8)
        )

    def close(self) -> None:
        """Let go of the file; tensors decoded before stay valid."""
        # Dropped, not closed: the map goes with the last view of it, and a reader in another thread may hold one.
        self._data = None


class TokenizerKeys(Mapping[str, Any]):
    """The keys below `tokenizer.ggml.`; `"kind"`: `gguf_` and the file's own word for it; `"path"`, for errors.

    Arrays are read from the file when they are first asked for.
    """

    def __init__(self, checkpoint: GGUFCheckpoint, metadata: Mapping[str, Any], kind: Any) -> None:
        prefix = "tokenizer.ggml."
        self._checkpoint = checkpoint
        self._values = {
            key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
        }
        self._values |= {"kind": f"gguf_{kind}", "path": str(checkpoint.path)}

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, ArrayValue):
            value = self._values[key] = value.load(self._checkpoint.data(f"the key {value.key!r}"))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class GGUFLoader:
    """Opens GGUF files, and folders that hold exactly one."""

    name = "gguf"

    def claims(self, path: Path) -> bool:
        """Whether `path` is a GGUF file by its first bytes or its name, or a folder with such names."""
        try:
            if path.is_dir():
                return any(path.glob("*.gguf"))
            with path.open("rb") as file:
                return file.read(len(MAGIC)) == MAGIC or path.suffix.lower() == ".gguf"
        except OSError:
            return False

    def open(self, path: Path) -> GGUFCheckpoint:
        """Open it. Raises `CheckpointError` naming the file and what is wrong."""
        if path.is_dir():
            files = sorted(path.glob("*.gguf"))
            if len(files) != 1:
                found = ", ".join(file.name for file in files) or "none"
                raise CheckpointError(
                    f"{path} must hold one GGUF file, or the path must name one; found: {found}"
                )
            path = files[0]
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise CheckpointError(f"{path} is empty; it is not a GGUF file") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        return GGUFCheckpoint(path, data)


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the file says about generating: end tokens, the start token, recommended sampling."""
    found: dict[str, Any] = {}
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if type(end) is int))
    if unique:
        found["eos_token_id"] = unique
    if type(metadata.get("tokenizer.ggml.bos_token_id")) is int:
        found["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    for ours, theirs, kind in _SAMPLING:
        value = metadata.get(f"general.sampling.{theirs}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[ours] = kind(value)
    return found
