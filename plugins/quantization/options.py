"""The options of the plugin `quantization`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Options"]


class Options(BaseModel):
    """How checkpoints are quantized while they are loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: Literal[32, 64, 128] | None = Field(
        default=None,
        description="int4: inputs that share a scale. Default: the first of 32, 64, 128 that divides all.",
    )
    ignore: list[str] = Field(
        default=[],
        description="Layers to leave as they are: names, parts of names, or patterns behind `re:`.",
    )
