"""How many tokens are worth drafting: by how many were accepted, and by what a row of a step costs.

A draft costs a row in the next step, and gives a token if it and those before it are accepted: with the chance p that
a draft is accepted, the j-th of a request gives p^j tokens. It is worth its time while that is more than its price:
the time of a row over the time the engine takes for a token now. One request alone waits for memory, so rows are
nearly free; the more requests share a step, the more a row costs, up to as much as a token. Then nothing is drafted.

Both are measured as the engine runs. Now and then a step is left without drafts, to see what it takes, and where
nothing is drafted, now and then one token is: times change, and texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["DraftLengths"]

_EXPECTED = 0.5
"""Chance of acceptance where nothing is known."""
_MEMORY = 0.85
"""What is left of an observation after the next one of its request."""
_GENERAL_MEMORY = 0.98
_GENERAL_WEIGHT = 2.0
"""So many drafts of a request weigh as much as what others came to."""
_FIRST_PROBE, _LAST_PROBE = 16, 128
"""After so many chances not taken one token is drafted; twice as many each time that fails."""
_BASE_ROWS = 20
"""Before it is measured: a step takes the time of so many rows, and that of its rows."""
_FIRST_PLAIN = 2
_PLAIN_EVERY = 64
"""Steps with drafts behind which there is one without."""
_RATE = 0.2
"""Share of what a step tells that goes into the estimate."""


@dataclass
class _Acceptance:
    """Drafts verified and accepted; each counts until one of its request was rejected."""

    accepted: float = 0.0
    tried: float = 0.0

    def add(self, drafted: int, accepted: int, memory: float) -> None:
        self.accepted = self.accepted * memory + accepted
        self.tried = self.tried * memory + min(drafted, accepted + 1)


@dataclass
class _Request:
    """What is known of a request."""

    acceptance: _Acceptance
    sureness: int = 0
    """Of the drafts under way."""
    passed: int = 0
    """Chances not taken since the last draft."""
    probe_after: int = _FIRST_PROBE


@dataclass
class _Cost:
    """What steps of so many requests take, in seconds."""

    base: float
    """Without drafts."""
    row: float
    """A draft more."""
    num_plain: int = 0
    """Steps without drafts that were seen."""
    since_plain: int = 0
    """Steps with drafts since the last one without."""

    @property
    def due(self) -> bool:
        """Whether a step without drafts is to be seen."""
        return self.num_plain < _FIRST_PLAIN or self.since_plain >= _PLAIN_EVERY

    def observe(self, rows: int, seconds: float) -> None:
        """Take in a step with so many drafts; one that took much longer was held up by something else."""
        expected = self.base + self.row * rows
        error = max(-expected / 2, min(expected, seconds - expected))
        if rows:
            self.since_plain += 1
            self.row = max(self.base * 1e-3, self.row + _RATE * error / rows)
        else:
            self.num_plain += 1
            self.since_plain = 0
            self.base += _RATE * error


class DraftLengths:
    """Decides a request's draft length; it never touches which tokens come, only how fast.

    Parameters
    ----------
    most: tokens drafted at once.
    adaptive: False: always `most`.
    """

    def __init__(self, most: int, *, adaptive: bool = True) -> None:
        self._most = most
        self._adaptive = adaptive
        self._requests: dict[str, _Request] = {}
        self._general: dict[int, _Acceptance] = {}
        """By sureness, over all requests."""
        self._costs: dict[int, _Cost] = {}
        """By requests in a step."""

    def forget(self, request_id: str) -> None:
        """A request left."""
        self._requests.pop(request_id, None)

    def verified(self, request_id: str, drafted: int, accepted: int) -> None:
        """So many drafts of a request were verified, of which the first `accepted` stayed."""
        request = self._requests.get(request_id)
        if request is None:
            return
        request.acceptance.add(drafted, accepted, _MEMORY)
        general = self._general.setdefault(request.sureness, _Acceptance())
        general.add(drafted, accepted, _GENERAL_MEMORY)
        if accepted:
            request.probe_after = _FIRST_PROBE

    def step_took(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """A step of decodes alone, with so many drafts in it, took so long, drafting them included."""
        cost = self._costs.get(num_requests)
        if cost is None:
            cost = self._costs[num_requests] = self._first_cost(num_requests, num_drafts, seconds)
        cost.observe(num_drafts, seconds)

    def _first_cost(self, num_requests: int, num_drafts: int, seconds: float) -> _Cost:
        """Start from the nearest number of requests that is known, or from a rule of thumb."""
        if not self._costs:
            row = seconds / (_BASE_ROWS + num_requests + num_drafts)
            return _Cost(row * (_BASE_ROWS + num_requests), row)
        nearest = min(self._costs, key=lambda known: abs(known - num_requests))
        known = self._costs[nearest]
        more = (num_requests - nearest) * known.row
        return _Cost(max(known.base + more, known.base / 2), known.row)

    def price(self, num_requests: int) -> float:
        """What a draft costs in a step of so many requests, in tokens."""
        cost = self._costs.get(num_requests)
        if cost is None:
            return num_requests / (_BASE_ROWS + num_requests)
        return cost.row * num_requests / cost.base

    def chance(self, request_id: str, sureness: int) -> float:
        """How likely the next draft of a request is accepted, where that of the ones before it is given."""
        general = self._general.get(sureness, _Acceptance())
        expected = (general.accepted + _EXPECTED) / (general.tried + 1)
        request = self._requests.get(request_id)
        own = request.acceptance if request is not None else _Acceptance()
        return (own.accepted + _GENERAL_WEIGHT * expected) / (own.tried + _GENERAL_WEIGHT)

    def pays(self, request_id: str, num_requests: int) -> bool:
        """Whether drafting for a request is worth its time now, as far as is known."""
        return not self._adaptive or self._worth(self.chance(request_id, 0), self.price(num_requests)) > 0

    def choose(self, request_id: str, num_requests: int, sureness: int = 0) -> int:
        """Return how many tokens to draft for a request now, in a step of so many.

        sureness: a kind of draft whose acceptance is its own, such as how well a place matched.
        """
        if not self._adaptive:
            return self._most
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request(_Acceptance())
        cost = self._costs.get(num_requests)
        if cost is None or cost.due:
            return 0
        length = self._worth(self.chance(request_id, sureness), self.price(num_requests))
        request.sureness = sureness
        if length:
            request.passed = 0
            return length
        request.passed += 1
        if request.passed < request.probe_after:
            return 0
        request.passed, request.probe_after = 0, min(2 * request.probe_after, _LAST_PROBE)
        return 1

    def _worth(self, chance: float, price: float) -> int:
        """Return how many drafts give more than they cost: the largest j with chance^j above the price."""
        if chance <= price or price >= 1:
            return 0
        if chance >= 1 or price <= 0:
            return self._most
        return min(self._most, int(math.log(price) / math.log(chance)))
