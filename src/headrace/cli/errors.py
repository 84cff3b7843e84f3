"""How a command ends badly: one `error:` line on standard error, and an exit status that says whose fault it was."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.core.errors import ConfigError, HeadraceError, PluginLoadError, RequestError

__all__ = ["RUNTIME", "USAGE", "clean_exit"]

USAGE = 2
"""What was asked for is wrong: options, configuration, plugins, a request."""
RUNTIME = 1
"""What was asked for is right, and failed."""
INTERRUPTED = 130


@contextmanager
def clean_exit() -> Iterator[None]:
    """End with one line instead of a traceback for errors that Headrace raises on purpose, and for Ctrl-C.

    `HEADRACE_TRACEBACK=1` shows the traceback. Other exceptions are faults of ours and keep theirs.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        raise SystemExit(INTERRUPTED) from None
    except HeadraceError as error:
        if os.environ.get("HEADRACE_TRACEBACK") == "1":
            raise
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        asked_wrong = isinstance(error, (ConfigError, RequestError, PluginLoadError))
        raise SystemExit(USAGE if asked_wrong else RUNTIME) from None
