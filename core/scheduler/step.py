"""A plan while it is being made."""

from __future__ import annotations

from headrace.core.plan import Continued, NewRequest, StepPlan

__all__ = ["Step"]


class Step:
    """Entries by request, so that a victim's can be taken out again, and what is left of the budget."""

    __slots__ = ("admits", "budget", "entries", "plan", "reserved", "spare")

    def __init__(self, number: int, budget: int) -> None:
        self.plan = StepPlan(step=number)
        self.entries: dict[str, NewRequest | Continued] = {}
        self.budget = budget
        self.admits = True
        """False once somebody was preempted, or waits for blocks behind the fence: newcomers would take them."""
        self.reserved: int | None = None
        """Blocks that running requests still lack for their prompts; counted when the first is admitted."""
        self.spare = 0
        """Tokens of the budget that drafts may still take."""

    def finish(self, removed: list[str]) -> StepPlan:
        """Return the plan."""
        plan = self.plan
        for entry in self.entries.values():
            if isinstance(entry, NewRequest):
                plan.new.append(entry)
            else:
                plan.continued.append(entry)
        plan.removed = removed
        return plan
