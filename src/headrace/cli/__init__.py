"""The command line: `headrace COMMAND …`. A command's module is imported when the command is called.

app       the table of commands, and `main`
options   engine options as flags, for commands that build or describe an engine
flags     flags' text to values
errors    how errors look: one line, no traceback
"""

from __future__ import annotations

from headrace.cli.app import main

__all__ = ["main"]
