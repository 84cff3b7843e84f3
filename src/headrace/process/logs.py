"""Logging of Headrace's processes: set up once in each process that is ours, never in a process of a user's."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

import msgspec

__all__ = ["LogChoice", "LogFormat", "set_up_logs"]

LogFormat = Literal["rich", "json"]


class LogChoice(msgspec.Struct, frozen=True):
    """How a process logs."""

    format: LogFormat = "rich"
    level: str = "INFO"


class _JsonLines(logging.Formatter):
    """A JSON object a line; what is given as `extra={"fields": {…}}` stands beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up_logs(choice: LogChoice) -> None:
    """Send this process's log records to standard error. For processes that Headrace owns."""
    handler: logging.Handler
    if choice.format == "json":
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_JsonLines())
    elif not sys.stderr.isatty():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    else:
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(
            console=Console(stderr=True), show_path=False, rich_tracebacks=False, log_time_format="[%X]"
        )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(choice.level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # what it does is said by who runs it
