"""What drafts came to, counted in the core half: how many were verified, and how many of them were right."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.core.interfaces import EngineListener
from headrace.core.interfaces.build import CoreContext
from headrace.core.metrics import Metric, series_name
from headrace.core.plan import StepPlan, StepResult
from headrace.plugins.speculative.options import SpeculativeSection

__all__ = ["DESCRIBED", "DraftMetrics"]

DESCRIBED: Mapping[str, Metric] = {
    "spec_decode_num_drafts": Metric("counter", "Times that drafts of a request were verified."),
    "spec_decode_num_draft_tokens": Metric("counter", "Tokens drafted that were verified."),
    "spec_decode_num_accepted_tokens": Metric("counter", "Tokens drafted that were accepted."),
    "spec_decode_num_accepted_tokens_per_pos": Metric(
        "counter", "Tokens drafted that were accepted, by their place in a draft, from 0 on."
    ),
}
"""vLLM's names."""


class DraftMetrics(EngineListener):
    """Counts drafts of whoever drafts. Those that a step had no room for were not verified and do not count."""

    name = "speculative"

    def __init__(self, context: CoreContext) -> None:
        section = context.config.section("speculative", SpeculativeSection)
        self._drafts = self._draft_tokens = self._accepted = 0
        self._by_position = [0] * section.num_speculative_tokens

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """Count a step."""
        for entry in plan.continued:
            if not entry.num_drafts:
                continue
            tokens = result.requests[entry.request_id].tokens
            if not tokens:
                continue  # the request failed, or the plan was sent before a rollback was known
            accepted = min(entry.num_drafts, len(tokens) - 1)
            self._drafts += 1
            self._draft_tokens += entry.num_drafts
            self._accepted += accepted
            more = accepted - len(self._by_position)
            if more > 0:
                self._by_position += [0] * more
            for position in range(accepted):
                self._by_position[position] += 1

    def metrics(self) -> Mapping[str, float]:
        """Series by Prometheus name."""
        told: dict[str, float] = {
            "spec_decode_num_drafts": self._drafts,
            "spec_decode_num_draft_tokens": self._draft_tokens,
            "spec_decode_num_accepted_tokens": self._accepted,
        }
        for position, count in enumerate(self._by_position):
            told[series_name("spec_decode_num_accepted_tokens_per_pos", position=str(position))] = count
        return told
