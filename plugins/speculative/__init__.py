"""Speculative decoding: somebody guesses the next tokens, and one step verifies them all.

    LLM("smollm2", speculative={"method": "ngram", "num_speculative_tokens": 5})

Verification is the runner's, and the plain draw decides: ids are those of a run without drafts, at every temperature.
Here are those who guess, how many guesses are worth their time, and what is told of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.core.plugin.hookspecs import hookimpl
from headrace.plugins.speculative.metrics import DESCRIBED, DraftMetrics
from headrace.plugins.speculative.options import SpeculativeSection, asked_for

if TYPE_CHECKING:
    from headrace.core.interfaces import Proposer
    from headrace.core.interfaces.build import WorkerContext
    from headrace.core.plugin.registry import Registrar

__all__ = ["headrace_api", "headrace_register", "name"]

name = "speculative"
headrace_api = ">=1,<2"


def _ngram(context: WorkerContext) -> Proposer | None:
    section = asked_for(context, "ngram")
    if section is None:
        return None

    from headrace.plugins.speculative.ngram import NgramProposer

    return NgramProposer(section)


def _draft_model(context: WorkerContext) -> Proposer | None:
    section = asked_for(context, "draft_model")
    if section is None:
        return None

    from headrace.plugins.speculative.draft_model import DraftModelProposer

    return DraftModelProposer(context, section)


def _heads(context: WorkerContext) -> Proposer | None:
    section = asked_for(context, "heads")
    if section is None:
        return None

    from headrace.plugins.speculative.heads import HeadsProposer

    return HeadsProposer(context, section)


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the section, the proposers, and what is counted."""
    registrar.config_section(name, SpeculativeSection)
    registrar.proposer("ngram", _ngram)
    registrar.proposer("draft_model", _draft_model)
    registrar.proposer("heads", _heads)
    registrar.engine_listener(name, DraftMetrics)
    for metric in DESCRIBED:
        registrar.metric(metric, partial(DESCRIBED.__getitem__, metric))
