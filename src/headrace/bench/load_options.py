"""How a server is loaded and what is told of it: options of `bench serve`, checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from headrace.core.errors import ConfigError, nearest

__all__ = [
    "BACKENDS",
    "FORMATS",
    "GOALS",
    "METRICS",
    "Traffic",
    "read_backend",
    "read_base_url",
    "read_goals",
    "read_names",
    "read_percentages",
]

BACKENDS = {"openai": "openai", "vllm": "openai", "openai-chat": "openai-chat"}
"""By what `--backend` takes: the name of the API."""
FORMATS = (".png", ".svg", ".pdf")
"""What a plot can be."""
METRICS = ("ttft", "tpot", "itl", "e2el")
"""Times of which mean, median, standard deviation and percentiles can be told."""
GOALS = ("ttft", "tpot", "e2el")
"""Those that a request can be held to."""


@dataclass(frozen=True)
class Traffic:
    """How requests are sent; told in the results. Raises `ConfigError` for numbers that make no sense."""

    request_rate: float
    """Requests a second; infinite: all at once."""
    burstiness: float
    """As `arrival_times` takes it."""
    max_concurrency: int | None
    num_warmups: int
    ignore_eos: bool
    temperature: float

    def __post_init__(self) -> None:
        for option in ("request_rate", "burstiness"):
            value = getattr(self, option)
            if math.isnan(value) or value <= 0:
                flag = option.replace("_", "-")
                raise ConfigError(f"--{flag} must be above 0, or inf, got {value:g}", option=option)

    @property
    def body_options(self) -> dict[str, Any]:
        """Fields of every request."""
        # OpenAI's own API does not know ignore_eos and refuses what it does not know.
        return {"temperature": self.temperature, **({"ignore_eos": True} if self.ignore_eos else {})}

    @property
    def facts(self) -> dict[str, Any]:
        """All of it, for JSON, which has no infinite numbers."""
        return {
            name: str(value) if isinstance(value, float) and math.isinf(value) else value
            for name, value in asdict(self).items()
        }


def read_base_url(given: str | None, host: str, port: int) -> str:
    """Return where the server is, without a slash at the end. Raises `ConfigError` for what is no address."""
    url = (given or f"http://{host}:{port}").rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"--base-url must begin with http:// or https://, got {given!r}; for example http://127.0.0.1:8000",
            option="base_url",
        )
    return url.removesuffix("/v1")


def read_backend(name: str) -> str:
    """Return the name of the API that `--backend` means. Raises `ConfigError`."""
    if name not in BACKENDS:
        raise ConfigError(
            f"--backend must be one of {', '.join(BACKENDS)}, got {name!r}{nearest(name, BACKENDS)}",
            option="backend",
        )
    return BACKENDS[name]


def read_goals(words: Iterable[str] | None, more: Iterable[str] | None) -> dict[str, float]:
    """Return the most milliseconds of each goal, from words such as `ttft:200`.

    more: words behind the flag's first one, which stand alone on the command line.
    Raises `ConfigError`.
    """
    if more and not words:
        raise ConfigError(
            f"{' '.join(more)!r} belongs to no flag; goals stand behind --goodput", option="goodput"
        )
    goals: dict[str, float] = {}
    for word in (part for text in [*(words or ()), *(more or ())] for part in text.replace(",", " ").split()):
        name, _, number = word.partition(":")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if name not in GOALS or not value > 0:
            raise ConfigError(
                f"--goodput takes NAME:MILLISECONDS with a name of {', '.join(GOALS)} and a number above 0, such as "
                f"ttft:200, got {word!r}{nearest(name, GOALS)}",
                option="goodput",
            )
        goals[name] = value
    return goals


def read_names(text: str) -> list[str]:
    """Return the metrics that a list with commas names. Raises `ConfigError`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise ConfigError(
                f"--percentile-metrics takes names of {', '.join(METRICS)}, with commas between, got {name!r}"
                f"{nearest(name, METRICS)}",
                option="percentile_metrics",
            )
    return names


def read_percentages(text: str) -> list[float]:
    """Return the percentiles that a list with commas names. Raises `ConfigError`."""
    try:
        values = [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        values = [math.nan]
    if not values or not all(0 <= value <= 100 for value in values):
        raise ConfigError(
            f"--metric-percentiles takes numbers from 0 to 100, with commas between, such as 50,99, got {text!r}",
            option="metric_percentiles",
        )
    return values
