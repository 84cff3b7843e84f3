"""OpenTelemetry: a span `llm_request` a request, sent to the collector that `otlp_traces_endpoint` names.

Needs the extra `otel`. The request option `traceparent`, a W3C header, makes the span a child of the client's. Spans
are sent by a thread of their own: a collector that is slow or gone costs spans, not time.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from headrace.core.config import Section, option
from headrace.core.errors import ConfigError
from headrace.core.interfaces import EngineListener
from headrace.core.interfaces.build import CoreContext
from headrace.core.plugin.hookspecs import hookimpl
from headrace.core.plugin.registry import Registrar

__all__ = ["TracingSection", "headrace_api", "headrace_register", "make_tracing", "name"]

name = "tracing"
headrace_api = ">=1,<2"


class TracingSection(Section):
    """Where traces go."""

    otlp_traces_endpoint: str | None = option(
        None, "URL of an OpenTelemetry collector that takes OTLP over HTTP, such as http://localhost:4318."
    )


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the section, the request option and the listener."""
    registrar.config_section(name, TracingSection)
    registrar.request_option("traceparent", str)
    registrar.engine_listener(name, make_tracing)


def make_tracing(context: CoreContext) -> EngineListener:
    """Return what makes spans, or where nobody asked for them a listener that does not listen.

    Raises `ConfigError` for a URL that is none, and where OpenTelemetry is not installed.
    """
    url = context.config.section(name, TracingSection).otlp_traces_endpoint
    if url is None:
        return EngineListener()
    url = _with_path(url)
    try:
        from headrace.plugins.tracing.spans import RequestSpans, otlp_provider
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry, which is not installed here ({error}); run pip install "
            "'headrace[otel]', or start without otlp_traces_endpoint",
            option="otlp_traces_endpoint",
        ) from error
    return RequestSpans(otlp_provider(url), model=context.config.model)


def _with_path(url: str) -> str:
    """Return a URL as it is, or with the path that collectors listen on where it has none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"otlp_traces_endpoint must be a URL that begins with http:// or https://, such as "
            f"http://localhost:4318; got {url!r}",
            option="otlp_traces_endpoint",
        )
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/v1/traces"
