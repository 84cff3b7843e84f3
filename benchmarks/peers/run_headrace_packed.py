"""Headrace on the blocks of the GGUF file as they are stored; otherwise as `run_headrace.py`."""

from __future__ import annotations

import harness
from run_headrace import load

if __name__ == "__main__":
    harness.main(load, package="headrace", weights="4-bit")
