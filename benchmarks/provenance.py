"""Where and from what figures were taken: told in every file of results."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path
from typing import Any

from headrace.bench.facts import machine_facts

__all__ = ["provenance"]


def provenance() -> dict[str, Any]:
    """Return date, commit, whether files differ from it, and the machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "machine": machine_facts(),
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
