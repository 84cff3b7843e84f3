"""Tokenizers from tokenizer.json, by the library that defined the format."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer

from headrace.core.errors import CheckpointError, RequestError
from headrace.models.tokenizers.encoding import encode_ids
from headrace.models.tokenizers.json_spelling import speller

__all__ = ["TokenizerJson", "build_json_tokenizer"]


def build_json_tokenizer(data: Mapping[str, Any]) -> TokenizerJson:
    """Build it from `Checkpoint.tokenizer`. Raises `CheckpointError` naming the file."""
    path = str(data["path"])
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
        file = json.loads(text)
        spell = speller(file)
        # Two of them, since how special spellings are read is a setting of the object.
        trusted = Tokenizer.from_str(text)
        plain = Tokenizer.from_str(json.dumps(file) if _hide_specials(file) else text)
        return TokenizerJson(trusted, plain, spell, data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:
        # The library raises plain `Exception` for whatever is wrong with a file.
        raise CheckpointError(f"{path} is damaged or of an unknown kind: {error}") from error


def _hide_specials(file: dict[str, Any]) -> bool:
    """Change a parsed file so that its model no longer finds special tokens in plain text; return whether it had to.

    A model that looks up whole words finds them although their spellings are not parsed. They get names that no text
    has, there and among the added tokens, so that every token keeps its id. (A very low score in a Unigram model
    would not do: unknown characters cost more than the lowest score there is.)
    """
    model = file["model"]
    if (model.get("type") or "BPE") == "BPE" and not model.get("ignore_merges"):
        return False
    needed = {model.get("unk_token")}
    for merge in model.get("merges") or ():
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        needed |= {left, right, left + right}
    secret = secrets.token_hex(16)
    names = {
        token["content"]: f"\0{secret}{token['content']}"
        for token in file["added_tokens"]
        if token["special"] and token["content"] not in needed
    }
    vocab = model["vocab"]
    words = set(vocab) if isinstance(vocab, dict) else {piece for piece, _ in vocab}
    if words.isdisjoint(names):
        return False
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): at for piece, at in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    for token in file["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    return True


class TokenizerJson:
    """See `headrace.core.interfaces.Tokenizer`.

    trusted, plain: the engine that parses spellings of special tokens, and the one that does not.
    spell: gives the bytes of a token that was not added to the vocabulary.
    """

    def __init__(
        self, trusted: Tokenizer, plain: Tokenizer, spell: Callable[[str], bytes], data: Mapping[str, Any]
    ) -> None:
        self._trusted, self._plain, self._spell = trusted, plain, spell
        self.vocab_size: int = trusted.get_vocab_size(with_added_tokens=True)
        added = trusted.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        settings = data.get("settings", {})
        self.bos_token_id = _id_of(trusted, settings.get("bos_token"), data.get("bos_token_id"))
        named = _id_of(trusted, settings.get("eos_token"), None)
        ends = [*data.get("eos_token_ids", ()), *(() if named is None else (named,))]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        plain.encode_special_tokens = True
        for engine in (trusted, plain):
            # Files of sentence encoders ask for texts to be filled up, or cut, to one length.
            engine.no_padding()
            engine.no_truncation()

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """Return ids; the file's own rule says which special tokens are added.

        `add_bos_token` of tokenizer_config.json has no say; transformers does not ask it either, beside such a file.
        A start token is added once: not where the text's own ids begin with it. Raises `RequestError` for text that
        is no Unicode (half of a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: half of a surrogate pair ({text[error.start]!r}) at character "
                f"{error.start}",
                param="prompt",
            ) from error
        engine = self._trusted if parse_special else self._plain
        ids = encode_ids(engine, text, add_special_tokens=add_special_tokens)
        start = [self.bos_token_id]
        if add_special_tokens and ids[:1] == ids[1:2] == start:
            own = encode_ids(engine, text, add_special_tokens=False)
            if ids[1 : 1 + len(own)] == own:
                del ids[0]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; none for an id beyond the vocabulary."""
        token = self._added.get(token_id)
        if token is not None:
            return token.encode()
        token = self._trusted.id_to_token(token_id) if token_id >= 0 else None
        return b"" if token is None else self._spell(token)


def _id_of(engine: Tokenizer, token: Any, fallback: int | None) -> int | None:
    """Return the id of a token as tokenizer_config.json names it: a text, or an object with `content`."""
    text = token.get("content") if isinstance(token, Mapping) else token
    found: int | None = engine.token_to_id(text) if isinstance(text, str) else None
    return fallback if found is None else found
