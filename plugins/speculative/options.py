"""The options of speculative decoding: the section `speculative` of the configuration."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from headrace.core.config import Section, option
from headrace.core.interfaces.build import WorkerContext

__all__ = ["SpeculativeSection", "asked_for"]


class SpeculativeSection(Section):
    """Who guesses the next tokens, and how many at once."""

    aliases: ClassVar[tuple[str, ...]] = ("speculative_config",)

    method: str | None = option(
        None,
        "Who drafts tokens: ngram, draft_model, heads, or a plugin's proposer. Default: nobody.",
        flat="speculative_method",
    )
    num_speculative_tokens: int = option(5, "Most tokens drafted at once for a request.", ge=1, le=64)
    adaptive: bool = option(
        True, "Draft fewer tokens, or none, while that does not pay.", flat="adaptive_drafts"
    )
    prompt_lookup_max: int = option(4, "ngram: ids that two places need to have in common at best.", ge=1)
    prompt_lookup_min: int = option(2, "ngram: ids that they need to have in common at least.", ge=1)
    model: str | None = option(
        None,
        "draft_model, heads: the model that drafts, or the folder with the heads.",
        flat="speculative_model",
    )
    draft_sampling: Literal["same", "greedy"] = option(
        "same",
        "draft_model, heads: draw drafts as the model's own tokens are drawn, or take the likeliest.",
    )
    acceptance: Literal["same", "rejection"] = option(
        "same",
        "draft_model, heads: a draft stays if it is the token that a run without drafts draws (same), or by "
        "rejection sampling: tokens are then distributed alike, but NOT the same as without drafts, nor twice "
        "(rejection).",
        flat="draft_acceptance",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        given = sorted(self.model_fields_set - {"method"})
        if self.method is None and given:
            raise ValueError(
                f"{', '.join(given)} without a method: set speculative_method as well, to ngram for one"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must not exceed prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        needed = {"draft_model": True, "heads": True, "ngram": False}.get(self.method or "")
        if needed is not None and needed != (self.model is not None):
            raise ValueError(
                f"speculative_method is {self.method!r} and speculative_model {self.model!r}: draft_model and heads "
                "need a model, ngram takes none"
            )
        if self.method == "ngram" and self.acceptance == "rejection":
            raise ValueError(
                "draft_acceptance 'rejection' is for draft_model and heads: ngram's drafts are not drawn, and "
                "stay as often with 'same'"
            )
        return self


def asked_for(context: WorkerContext, method: str) -> SpeculativeSection | None:
    """Return the section where `method` is to draft, else None."""
    section = context.config.section("speculative", SpeculativeSection)
    return section if section.method == method else None
