"""The built-in plugins, by the name of their module: nothing here is imported until an engine starts."""

from __future__ import annotations

__all__ = ["BUILTIN", "ESSENTIAL"]

BUILTIN = (
    "headrace.core.builtin",
    "headrace.backends.cpu.plugin",
    "headrace.backends.torch_reference.plugin",
    "headrace.models.plugin",
    "headrace.executors.plugin",
    "headrace.plugins.text_input",
    "headrace.plugins.truncate_prompt",
    "headrace.plugins.allowed_token_ids",
    "headrace.plugins.bad_words",
    "headrace.plugins.min_tokens",
    "headrace.plugins.logit_bias",
    "headrace.plugins.penalties",
    "headrace.plugins.processors",
    "headrace.plugins.speculative",
    "headrace.plugins.quantization",
    "headrace.plugins.lora",
    "headrace.plugins.engine_metrics",
    "headrace.plugins.pooling",
    "headrace.plugins.structured",
    "headrace.plugins.llguidance_backend",
    "headrace.plugins.tools",
    "headrace.plugins.reasoning",
    "headrace.plugins.http_metrics",
    "headrace.plugins.step_record",
    "headrace.plugins.admission",
    "headrace.plugins.tracing",
    "headrace.server.plugin",
)
"""In the order of loading: `attention_backend: auto` tries them in it, and logits processors run in it."""

ESSENTIAL = frozenset({"core", "torch_reference", "models", "executors", "text_input"})
"""Names of the plugins that cannot be switched off; all others can."""
