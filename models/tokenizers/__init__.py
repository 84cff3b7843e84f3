"""Tokenizers built from what a checkpoint brings along."""

__all__: list[str] = []
