"""What a server says outside of the measured time: its model, its longest request, its tokenizer."""

from __future__ import annotations

import http.client
import json
import random
import string
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import ConfigError

__all__ = ["Server", "text_ids"]

TIMEOUT = 60.0
"""Seconds that a question may take."""
SAMPLES, WORDS = 32, 60
"""Made-up texts, and words in each, from which `text_ids` learns: some thousands of ids in short requests."""


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server, asked over HTTP one question at a time.

    Every method raises `ConfigError` where it cannot be reached or does not answer as expected.
    """

    base_url: str
    """Without a slash at its end."""
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        bearer = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **bearer}

    def model(self) -> tuple[str, int | None]:
        """Return the id of the first model served, and the most tokens of a request where it says so."""
        models = self._ask("/v1/models").get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise ConfigError(
                f"{self.base_url}/v1/models names no model; name one with --model", option="model"
            )
        longest = models[0].get("max_model_len")
        return str(models[0].get("id")), longest if isinstance(longest, int) else None

    def encode(self, model: str, text: str, *, special: bool = True) -> list[int]:
        """Return a text's ids. special: with those that the model wants around a prompt."""
        body = {"model": model, "prompt": text, "add_special_tokens": special}
        tokens = self._ask("/tokenize", body).get("tokens")
        if not isinstance(tokens, list):
            raise ConfigError(f"{self.base_url}/tokenize answered without tokens", option="base_url")
        return tokens

    def decode(self, model: str, ids: list[int]) -> str:
        """Return the text that ids stand for."""
        return str(self._ask("/detokenize", {"model": model, "tokens": ids}).get("prompt"))

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base_url + path, data, self.headers)
        # What is measured does not go through a proxy, so neither does this.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=TIMEOUT) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(300).decode(errors="replace")
            raise self._wrong(path, f"HTTP {error.code}: {said}") from None
        except urllib.error.URLError as error:
            raise self._wrong(path, f"{error.reason}; is the server running?") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._wrong(path, f"{type(error).__name__}: {error}") from None
        if not isinstance(answer, dict):
            raise self._wrong(path, f"a JSON object was expected, got {answer!r:.100}")
        return answer

    def _wrong(self, path: str, why: str) -> ConfigError:
        return ConfigError(f"{self.base_url}{path}: {why} (--base-url names another)", option="base_url")


def text_ids(server: Server, model: str) -> list[int]:
    """Return ids that stand for text, in order: those that a tokenizer makes of made-up words.

    A server does not tell its vocabulary; these are some thousands of it, always the same, none of them special.
    """
    draw = random.Random(0)
    found: set[int] = set()
    for _ in range(SAMPLES):
        words = ("".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 8))) for _ in range(WORDS))
        found.update(server.encode(model, " ".join(words), special=False))
    return sorted(found)
