"""A server under abuse: 256 streams at once, 1,000 clients that vanish, and what is left of both.

    python benchmarks/serving/abuse.py [MODEL] [--output benchmarks/results/abuse.json] [-- FLAGS OF headrace serve]

It starts `headrace serve` itself. Streams are compared, each with its own answer at temperature 0 that was not
streamed: none may be lost, and none mixed up. Afterwards nothing may run, wait or hold a block, memory must be back
where it was, and a plain request as fast as before.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from served import (
    CHAT,
    COMPLETIONS,
    Checks,
    Client,
    Request,
    all_at_once,
    end,
    memory,
    settled,
    state,
    write_results,
)

from headrace.testing.serving import Server, serving

RESULTS = Path(__file__).resolve().parents[1] / "results" / "abuse.json"
FLAGS = ("--max-model-len", "2048", "--kv-cache-memory", "256MiB")
"""A pool so small that all of its pages are in use before memory is judged: they become resident one by one."""
STREAMS, TOKENS, ROUNDS = 256, 32, 3
ABORTS, ABORTING, ABORT_WITHIN = 1000, 48, 3.0
"""Clients that vanish, how many are there at once, and the most seconds after which one does."""
PLAIN, PLAIN_TOKENS = 9, 64
"""Plain requests whose median is the speed, and their tokens."""
DRAINED_WITHIN, SLOWER, GROWTH, GROWTH_BYTES = 5.0, 1.2, 0.02, 8 * 2**20
WORDS = ("river", "mill", "bridge", "boat", "weir", "heron", "flood", "well", "canal", "reed")


def requests(number: int) -> list[Request]:
    """Return questions of which no two are alike, completions and chats in turn, some with several bytes a letter."""
    found = []
    for index in range(number):
        text = f"Story {index} of the {WORDS[index % len(WORDS)]}, in naïve words 🙂 {index * index}:"
        if index % 2:
            asked = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}
            found.append(Request(CHAT, asked))
        else:
            found.append(Request(COMPLETIONS, {"prompt": text, "max_tokens": TOKENS, "ignore_eos": True}))
    return found


async def streams(server: Server, client: Client, checks: Checks, number: int = STREAMS) -> dict[str, Any]:
    """Stream all answers at once, several times over, and compare."""
    asked = requests(number)
    expected = await all_at_once(client.ask, asked, most=32)
    rounds, rss, lost, wrong = [], [memory(server)], [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        answers = await all_at_once(client.stream, asked)
        rounds.append(time.perf_counter() - started)
        lost += [answer.error for answer in answers if answer.error]
        wrong += [
            {"request": index, "expected": text, "got": answer.text}
            for index, (text, answer) in enumerate(zip(expected, answers, strict=True))
            if not answer.error and answer.text != text
        ]
        await settled(server)
        rss.append(memory(server))
    count = ROUNDS * number
    checks.add("streams lost", len(lost), f"0 of {count}", not lost)
    checks.add("streams that differ from their own answer", len(wrong), f"0 of {count}", not wrong)
    # The first round is what makes room; after it, each may use what is there.
    base, after = rss[1]["total"], rss[-1]["total"]
    most = base * (1 + GROWTH) + GROWTH_BYTES
    checks.add("memory after the last round, MiB", after >> 20, f"at most {int(most) >> 20}", after <= most)
    left = state(server)
    checks.add("KV cache in use", left["kv_cache_usage_perc"], "0", left["kv_cache_usage_perc"] == 0)
    return {
        "streams": number,
        "round_seconds": rounds,
        "rss": rss,
        "lost": lost[:5],
        "wrong": wrong[:5],
    }


async def aborts(server: Server, client: Client, checks: Checks, number: int = ABORTS) -> dict[str, Any]:
    """Let clients vanish at random moments: before the first token, in the middle, or never."""
    before = await speed(client)
    draw = random.Random(0)
    asked = requests(number)
    ended = []

    async def vanish(request: Request) -> None:
        try:
            async with asyncio.timeout(draw.uniform(0.0, ABORT_WITHIN)):
                answer = await client.stream(request)
            ended.append(answer.error)
        except TimeoutError:
            pass

    await all_at_once(vanish, asked, most=ABORTING)
    started = time.perf_counter()
    await settled(server)
    drained = time.perf_counter() - started
    errors = [error for error in ended if error]
    checks.add("answers that failed and were not aborted", len(errors), "0", not errors)
    checks.add(
        "seconds until drained", round(drained, 2), f"at most {DRAINED_WITHIN:g}", drained <= DRAINED_WITHIN
    )
    left = state(server)
    quiet = {name: value for name, value in left.items() if name != "generation_tokens_total"}
    checks.add("running, waiting, KV cache in use", list(quiet.values()), "all 0", not any(quiet.values()))
    after = await speed(client)
    slower = after / before
    checks.add("a plain request, after by before", round(slower, 3), f"at most {SLOWER}", slower <= SLOWER)
    return {
        "aborts": number - len(ended),
        "completed": len(ended),
        "errors": errors[:5],
        "drained_seconds": drained,
        "plain_seconds_before": before,
        "plain_seconds_after": after,
        "rss_after": memory(server),
    }


async def speed(client: Client) -> float:
    """Return the median seconds of a plain request, each of them the same and alone."""
    asked = Request(COMPLETIONS, {"prompt": "The mill", "max_tokens": PLAIN_TOKENS, "ignore_eos": True})
    seconds = []
    for _ in range(PLAIN):
        started = time.perf_counter()
        await client.ask(asked)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


async def abuse(server: Server, checks: Checks) -> dict[str, Any]:
    """Do both, one after the other."""
    client = Client.open(server)
    async with client.session:
        found = {"streams": await streams(server, client, checks)}
        return {**found, "aborts": await aborts(server, client, checks)}


def main() -> None:
    """Start a server, abuse it, write what it came to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of headrace serve, behind --")
    arguments = parser.parse_args()
    flags = [*FLAGS, *arguments.flags]
    checks = Checks()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), *flags, model=arguments.model) as server,
    ):
        found = asyncio.run(abuse(server, checks))
        ended = end(server)
    checks.add("exit status after SIGTERM", ended, "0", ended == 0)
    write_results(arguments.output, checks.all, {"model": arguments.model, "flags": flags, **found})


if __name__ == "__main__":
    main()
