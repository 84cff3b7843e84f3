"""A server under mixed traffic for half an hour: does its memory stay where it is?

    python benchmarks/serving/soak.py [MODEL] [--minutes 30] [--output benchmarks/results/soak.json]
                                      [-- FLAGS OF headrace serve]

It starts `headrace serve` itself. Chats, long prompts, clients that vanish and bad requests come all the time; every
ten seconds the memory of all its processes is noted. The slope of a line through these, after a time to warm up, is
the result, beside a plot of the same name.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from served import CHAT, COMPLETIONS, Checks, Client, Request, end, memory, settled, state, write_results

from headrace.testing.serving import Server, serving

RESULTS = Path(__file__).resolve().parents[1] / "results" / "soak.json"
FLAGS = ("--max-model-len", "2048", "--kv-cache-memory", "256MiB")
"""A pool so small that all of its pages are in use before memory is judged: they become resident one by one."""
INTERVAL = 10.0
"""Seconds between looks at memory."""
WARM_UP = 0.2
"""Of the time, whose samples are in no line."""
GROWTH = 0.01
"""What the line may rise by from its beginning to its end, as a share of the mean."""
CLIENTS = {"chat": 8, "long": 2, "vanish": 4, "bad": 2}
"""How many of each kind ask, one request after another."""
WORDS = (
    "river",
    "mill",
    "bridge",
    "boat",
    "weir",
    "heron",
    "flood",
    "well",
    "canal",
    "reed",
    "naïve",
    "水車",
    "🙂",
)
LONG = 150
"""Words of each half of a long prompt."""
BAD: tuple[tuple[str, Any], ...] = (
    (COMPLETIONS, b"{"),
    (COMPLETIONS, b"\xff\xfe"),
    (COMPLETIONS, []),
    (COMPLETIONS, {"prompt": None}),
    (COMPLETIONS, {"prompt": [-1]}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}),
    (COMPLETIONS, {"prompt": "x", "temperature": "hot"}),
    (COMPLETIONS, {"prompt": "x", "stop": ["s"] * 1000}),
    (COMPLETIONS, {"prompt": "x " * 50_000}),
    (COMPLETIONS, {"prompt": "x", "model": "another"}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"content": "x"}]}),
    (CHAT, {"messages": "x"}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 0}),
    ("/v1/nothing", {}),
)
"""What is answered by a status from 400 to 499."""


@dataclass
class Traffic:
    """All who ask, and what they got."""

    client: Client
    counts: Counter[str] = field(default_factory=Counter)
    """By kind and outcome."""
    surprises: list[str] = field(default_factory=list)

    async def run(self, until: float, clients: Mapping[str, int]) -> None:
        """Ask until a moment on the clock of `time.monotonic`."""
        kinds: dict[str, Callable[[random.Random], Awaitable[str]]] = {
            "chat": self.chat,
            "long": self.long,
            "vanish": self.vanish,
            "bad": self.bad,
        }

        async def ask(kind: str, seed: int) -> None:
            draw = random.Random(f"{kind} {seed}")
            while time.monotonic() < until:
                wrong = await kinds[kind](draw)
                self.counts[f"{kind} {'wrong' if wrong else 'right'}"] += 1
                if wrong:
                    self.surprises.append(f"{kind}: {wrong}")
                    await asyncio.sleep(1)  # a server that is gone is not asked as fast as one can

        await asyncio.gather(*(ask(kind, seed) for kind, number in clients.items() for seed in range(number)))

    async def chat(self, draw: random.Random) -> str:
        """A short question, streamed."""
        text = f"Tell me of the {' and the '.join(draw.choices(WORDS, k=3))}."
        asked = {"messages": [{"role": "user", "content": text}], "max_tokens": draw.randint(8, 64)}
        return (await self.client.stream(Request(CHAT, {**asked, "temperature": 0.8}))).error

    async def long(self, draw: random.Random) -> str:
        """A long prompt, half of it shared by all, and a short answer that is not streamed."""
        shared = " ".join(WORDS[index % len(WORDS)] for index in range(LONG))
        text = f"{shared} {' '.join(draw.choices(WORDS, k=LONG))}"
        try:
            await self.client.ask(Request(COMPLETIONS, {"prompt": text, "max_tokens": 8}))
        except RuntimeError as error:
            return str(error)
        return ""

    async def vanish(self, draw: random.Random) -> str:
        """A client that is gone before its answer is complete."""
        asked = Request(COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 256, "ignore_eos": True})
        try:
            async with asyncio.timeout(draw.uniform(0.0, 2.0)):
                return (await self.client.stream(asked)).error
        except TimeoutError:
            return ""

    async def bad(self, draw: random.Random) -> str:
        """A request that is wrong."""
        url, body = draw.choice(BAD)
        status, data = await self.client.post(url, body)
        await asyncio.sleep(0.2)
        return "" if 400 <= status < 500 else f"{body!r:.80}: HTTP {status}: {data[:100]!r}"


async def sample(server: Server, until: float, interval: float) -> list[dict[str, Any]]:
    """Note memory and load until a moment on the clock of `time.monotonic`."""
    started, samples = time.monotonic(), []
    while True:
        noted = await asyncio.to_thread(lambda: {"rss": memory(server), **state(server)})
        samples.append({"seconds": time.monotonic() - started, **noted})
        if time.monotonic() + interval > until:
            return samples
        await asyncio.sleep(interval)


def line(samples: Sequence[Mapping[str, Any]], warm_up: float = WARM_UP) -> dict[str, float]:
    """Return the least-squares line through total memory after the warm-up.

    `slope` is in bytes a second, `growth` its rise from first to last sample as a share of the mean.
    """
    first = warm_up * samples[-1]["seconds"]
    kept = [sample for sample in samples if sample["seconds"] >= first]
    seconds = [sample["seconds"] for sample in kept]
    total = [float(sample["rss"]["total"]) for sample in kept]
    slope, start = statistics.linear_regression(seconds, total)
    mean = statistics.fmean(total)
    return {
        "slope": slope,
        "start": start,
        "from_second": seconds[0],
        "mean": mean,
        "growth": slope * (seconds[-1] - seconds[0]) / mean,
    }


def write_plot(samples: Sequence[Mapping[str, Any]], found: Mapping[str, float], path: Path) -> None:
    """Draw memory by process, and the line. Raises `ImportError` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(9, 5), layout="constrained")
    minutes = [sample["seconds"] / 60 for sample in samples]
    for name in samples[-1]["rss"]:
        panel.plot(minutes, [sample["rss"].get(name, 0) / 2**20 for sample in samples], label=name)
    ends = (found["from_second"], samples[-1]["seconds"])
    heights = [(found["start"] + found["slope"] * second) / 2**20 for second in ends]
    rise = found["slope"] * 3600 / 2**20
    panel.plot([second / 60 for second in ends], heights, "k--", label=f"{rise:+.2f} MiB an hour")
    panel.set_xlabel("minutes")
    panel.set_ylabel("resident memory, MiB")
    panel.set_ylim(bottom=0)
    panel.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


async def soak(
    server: Server,
    checks: Checks,
    seconds: float,
    interval: float = INTERVAL,
    clients: Mapping[str, int] = CLIENTS,
) -> dict[str, Any]:
    """Run traffic for so long, and judge what it left."""
    client = Client.open(server)
    async with client.session:
        traffic = Traffic(client)
        until = time.monotonic() + seconds
        samples, _ = await asyncio.gather(sample(server, until, interval), traffic.run(until, clients))
        await settled(server)
    found = line(samples)
    left = state(server)
    quiet = {name: value for name, value in left.items() if name != "generation_tokens_total"}
    wrong = len(traffic.surprises)
    checks.add("requests that got another answer than they should", wrong, "0", not wrong)
    checks.add(
        "growth of memory", f"{found['growth']:.3%}", f"at most {GROWTH:.0%}", found["growth"] <= GROWTH
    )
    checks.add(
        "running, waiting, KV cache in use at the end", list(quiet.values()), "all 0", not any(quiet.values())
    )
    return {
        "seconds": seconds,
        "clients": dict(clients),
        "counts": dict(sorted(traffic.counts.items())),
        "surprises": traffic.surprises[:10],
        "line": {**found, "mib_an_hour": found["slope"] * 3600 / 2**20},
        "samples": samples,
    }


def main() -> None:
    """Start a server, let traffic at it, write what it came to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of headrace serve, behind --")
    arguments = parser.parse_args()
    flags = [*FLAGS, *arguments.flags]
    checks = Checks()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), *flags, model=arguments.model) as server,
    ):
        found = asyncio.run(soak(server, checks, 60 * arguments.minutes))
        ended = end(server)
    checks.add("exit status after SIGTERM", ended, "0", ended == 0)
    write_plot(found["samples"], found["line"], arguments.output.with_suffix(".png"))
    write_results(arguments.output, checks.all, {"model": arguments.model, "flags": flags, **found})


if __name__ == "__main__":
    main()
