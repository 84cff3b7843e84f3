"""Tokenizers from tokenizer.json, by the library that defined the format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from headrace.core.errors import CheckpointError
from headrace.models.tokenizers.gguf_bpe import byte_alphabet

__all__ = ["TokenizerJson", "build_json_tokenizer"]

HIDDEN = "\0\0"
"""In front of a piece, keeps it from being found. A very low score would not do: unknown characters cost more than
the lowest score there is."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece spells a space."""


def build_json_tokenizer(data: Mapping[str, Any]) -> TokenizerJson:
    """Build it from `Checkpoint.tokenizer`. Raises `CheckpointError` naming the file."""
    path = str(data["path"])
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        # Two of them, since how special spellings are read is a setting of the object.
        return TokenizerJson(Tokenizer.from_str(text), Tokenizer.from_str(_without_specials(text)), data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:
        # The library raises plain `Exception` for whatever is wrong with a file.
        raise CheckpointError(f"{path} is damaged or of an unknown kind: {error}") from error


def _without_specials(text: str) -> str:
    """Let a Unigram model no longer find the spellings of special tokens in plain text; others do not."""
    file = json.loads(text)
    if file["model"].get("type") != "Unigram":
        return text
    special = {token["content"] for token in file["added_tokens"] if token["special"]}
    file["model"]["vocab"] = [
        [HIDDEN + piece if piece in special else piece, score] for piece, score in file["model"]["vocab"]
    ]
    return json.dumps(file)


class TokenizerJson:
    """See `headrace.core.interfaces.Tokenizer`."""

    def __init__(self, trusted: Tokenizer, plain: Tokenizer, data: Mapping[str, Any]) -> None:
        plain.encode_special_tokens = True
        for engine in (trusted, plain):
            # Files of sentence encoders ask for texts to be filled up, or cut, to one length.
            engine.no_padding()
            engine.no_truncation()
        self._trusted, self._plain = trusted, plain
        self.vocab_size: int = trusted.get_vocab_size(with_added_tokens=True)
        added = trusted.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        settings = data.get("settings", {})
        self.bos_token_id = _id_of(trusted, settings.get("bos_token"), data.get("bos_token_id"))
        named = _id_of(trusted, settings.get("eos_token"), None)
        ends = [*data.get("eos_token_ids", ()), *(() if named is None else (named,))]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self._to_byte = {ord(character): byte for character, byte in byte_alphabet().items()}
        self._byte_level = "ByteLevel" in str(trusted.decoder)

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """Return ids; the file's own rule says which special tokens are added."""
        engine = self._trusted if parse_special else self._plain
        ids: list[int] = engine.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; none for an id beyond the vocabulary."""
        token = self._added.get(token_id)
        if token is not None:
            return token.encode()
        token = self._trusted.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return token.translate(self._to_byte).encode("latin-1")
            except UnicodeEncodeError:  # not in the alphabet: spelt as it is
                return token.encode()
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _id_of(engine: Tokenizer, token: Any, fallback: int | None) -> int | None:
    """Return the id of a token as tokenizer_config.json names it: a text, or an object with `content`."""
    text = token.get("content") if isinstance(token, Mapping) else token
    found: int | None = engine.token_to_id(text) if isinstance(text, str) else None
    return fallback if found is None else found
