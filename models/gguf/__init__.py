"""GGUF checkpoints: header, encodings, names, and the loader that puts them together."""

__all__: list[str] = []
