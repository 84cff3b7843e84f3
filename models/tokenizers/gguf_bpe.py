"""Byte-level BPE from a GGUF file (`tokenizer.ggml.model` is `gpt2`): GPT-2, Llama 3, Qwen 2, SmolLM.

The vocabulary is spelt in an alphabet that gives each of the 256 bytes a printable character. How text is cut into
words before the merges apply is named by `tokenizer.ggml.pre`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from headrace.core.errors import CheckpointError, nearest
from headrace.models.tokenizers.encoding import encode_ids
from headrace.models.tokenizers.gguf import CONTROL, GGUFTokenizer, Vocabulary, strings

__all__ = ["WORDS", "WordRule", "build_bpe_tokenizer", "byte_alphabet"]

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class WordRule:
    """How text is cut into words."""

    patterns: tuple[str, ...]
    """Applied in turn: each match becomes a word of its own, and so does what lies between."""
    whole_words: bool = False
    """A word that is a token is taken as it is, whatever the merges say."""
    nfc: bool = False
    """Characters are composed first (NFC)."""
    add_bos: bool = False
    """A start token is added where the file does not say."""


WORDS: Mapping[str, WordRule] = MappingProxyType(
    {
        "default": WordRule(_GPT2),
        "gpt-2": WordRule(_GPT2),
        "smollm": WordRule((r"\p{N}", *_GPT2)),
        "llama-bpe": WordRule((_MODERN.replace("DIGITS", "{1,3}"),), whole_words=True, add_bos=True),
        "qwen2": WordRule((_MODERN.replace("DIGITS", ""),), nfc=True),
    }
)
"""By `tokenizer.ggml.pre`."""


def byte_alphabet() -> dict[str, int]:
    """Character → byte: printable bytes stand for themselves, the others for 256, 257, …"""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def build_bpe_tokenizer(data: Mapping[str, Any]) -> GGUFTokenizer:
    """Build it from the keys below `tokenizer.ggml.`. Raises `CheckpointError` naming file and key."""
    path = str(data.get("path", "the checkpoint"))
    kind = data.get("pre", "default")
    rule = WORDS.get(kind) if isinstance(kind, str) else None
    if rule is None:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre is {kind!r}{nearest(str(kind), WORDS)}; known: {', '.join(WORDS)}"
        )
    vocabulary = Vocabulary.read(data, add_bos=rule.add_bos)
    engine = Tokenizer(_merging(vocabulary, strings(data, "merges"), rule))
    if rule.nfc:
        engine.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    engine.pre_tokenizer = pre_tokenizers.Sequence(steps)
    to_byte = {ord(character): byte for character, byte in byte_alphabet().items()}

    def encode_text(text: str) -> list[int]:
        return encode_ids(engine, text, add_special_tokens=False)

    def spell(token: str) -> bytes:
        try:
            return token.translate(to_byte).encode("latin-1")
        except UnicodeEncodeError:  # not in the alphabet: a token added by hand and not marked so
            return token.encode()

    return GGUFTokenizer(vocabulary, encode_text, spell)


def _merging(vocabulary: Vocabulary, merges: Sequence[str], rule: WordRule) -> models.BPE:
    """Return the merge model. Raises `CheckpointError` for a merge whose parts or result are no tokens."""
    ids = {token: at for at, token in enumerate(vocabulary.tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    needed = {left for left, _ in pairs}
    needed.update(right for _, right in pairs)
    needed.update([left + right for left, right in pairs])
    if not needed <= ids.keys():
        unknown = min(needed - ids.keys())
        raise CheckpointError(
            f"{vocabulary.path}: tokenizer.ggml.merges needs the token {unknown!r}, which tokenizer.ggml.tokens lacks"
        )
    # Plain text never becomes a control token, not even where whole words are looked up.
    for at, kind in enumerate(vocabulary.types):
        if kind == CONTROL and vocabulary.tokens[at] not in needed:
            ids.pop(vocabulary.tokens[at], None)
    return models.BPE(ids, pairs, ignore_merges=rule.whole_words)
