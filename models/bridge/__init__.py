"""The bridge: decoder-only models of the `transformers` package on our paged KV memory and attention backends.

Nothing here imports `transformers` before it is called: the package is an extra (`pip install headrace[bridge]`).
"""

__all__: list[str] = []
