"""The options of the HTTP server: the section `server` of the configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from headrace.core.config import EngineConfig, Section, option

__all__ = ["ServerSection", "model_names"]


def _one_or_many(value: Any) -> Any:
    """A single text stands for a list of one, as people write it in a file."""
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(_one_or_many)]


class ServerSection(Section):
    """Where the server listens, who may ask, and what it does under load and at its end."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0: all.")
    port: int = option(8000, "Port to listen on; 0: any that is free.", ge=0, le=65535)
    api_key: Texts = option(
        [],
        "Keys of which a client must bring one (Bearer); better in a file than on a command line.",
        secret=True,
    )
    served_model_name: Texts = option([], "Names clients may call the model by; default: the model's.")
    api_server_count: int = option(1, "Processes that speak HTTP.", ge=1, le=64)
    dev_mode: bool = option(False, "Offer routes that help developers: /debug/steps, /reset_prefix_cache.")
    strict: bool = option(False, "Refuse requests with unknown fields, which else are named in a header.")
    drain_timeout: float = option(30.0, "Seconds running requests get to end after SIGTERM.", ge=0)
    restart_engine: int = option(0, "How often an engine that died is started again.", ge=0)
    chat_template: str | None = option(
        None, "Replaces the model's chat template: a file, or the template itself."
    )
    tool_call_parser: str | None = option(None, "How this model writes tool calls: hermes, llama3_json, …")
    auto_tool_choice: bool = option(
        True,
        "Let the model choose whether to call a tool (tool_choice auto); it needs tool_call_parser.",
        flat="enable_auto_tool_choice",
    )
    reasoning_parser: str | None = option(None, "How this model marks its thinking: think, qwen3, …")
    stream_interval: int = option(1, "Tokens of an answer in a chunk of a stream.", ge=1, le=1000)
    response_role: str = option("assistant", "Role of answers in chats.")
    max_body_bytes: int = option(32 * 2**20, "Largest body of a request.", ge=1024)
    max_prompts: int = option(1024, "Most prompts in one request.", ge=1)
    max_choices: int = option(128, "Most answers (prompts times n) in one request.", ge=1)
    metrics_prefix: str = option(
        "headrace",
        "First word of the names on /metrics; `vllm` fits dashboards made for vLLM.",
        pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$",
    )
    log_format: Literal["rich", "json"] = option("rich", "How log lines look.")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "What is logged.")
    log_requests: bool = option(
        False, "Log a line a request: id, counts, times; never its text.", flat="enable_log_requests"
    )
    log_stats_interval: float = option(
        10.0, "Seconds between lines on throughput and load, where there was any; 0: none.", ge=0
    )
    cors_origins: Texts = option([], "Origins whose pages may ask from a browser; *: all.")
    root_path: str = option("", "Path below which a proxy serves this server.")
    ssl_certfile: str | None = option(None, "Certificate, to speak HTTPS.")
    ssl_keyfile: str | None = option(None, "The certificate's key.")


def model_names(config: EngineConfig) -> list[str]:
    """Return the names clients may call the model by; the first is the one answers carry."""
    return config.section("server", ServerSection).served_model_name or [config.model]
