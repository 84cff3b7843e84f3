"""Proves a parser of answers: however a text is cut, its events merge to the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headrace.core.interfaces import (
    CallArguments,
    CallStart,
    Content,
    Reasoning,
    ReasoningParser,
    ToolParser,
)

__all__ = ["Parsed", "parsed", "replay"]

NUM_RANDOM = 20
"""Random cuts into 3 to 7 pieces."""


@dataclass
class Parsed:
    """An answer's events, merged as a client merges deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name, and arguments as text."""


def parsed(parser: ToolParser | ReasoningParser, pieces: Iterable[str]) -> Parsed:
    """Give a new parser an answer in pieces, and return what it made of it."""
    answer = Parsed()
    events = [event for piece in pieces for event in parser.push(piece)]
    for event in [*events, *parser.finish()]:
        match event:
            case Content(text):
                answer.content += text
            case Reasoning(text):
                answer.reasoning += text
            case CallStart(name):
                answer.calls.append((name, ""))
            case CallArguments(text):
                name, begun = answer.calls[-1]
                answer.calls[-1] = (name, begun + text)
    return answer


def replay(make: Callable[[], ToolParser | ReasoningParser], text: str) -> Parsed:
    """Parse an answer whole, in two pieces at every place, character by character, and cut at random.

    make: returns a new parser. Returns what the whole is. Raises `AssertionError` naming the first cut that differs.
    """
    whole = parsed(make(), [text])
    draw = random.Random(text)
    cuts = [[at] for at in range(len(text) + 1)]
    cuts.append(list(range(1, len(text))))
    cuts += [sorted(draw.choices(range(len(text) + 1), k=draw.randint(2, 6))) for _ in range(NUM_RANDOM)]
    for cut in cuts:
        pieces = [text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)]
        got = parsed(make(), pieces)
        if got != whole:
            raise AssertionError(f"cut into {pieces}: {got}; whole: {whole}")
    return whole
