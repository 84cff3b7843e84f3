"""Floor 1: models, and what they are read from.

sources/     a name becomes local files
gguf/        files become a checkpoint of lazy tensors
tokenizers/  a checkpoint's text side becomes a tokenizer
opening      the three steps above for one name: resolve, open, find the architecture
weights      a checkpoint's tensors as a model takes them
plugin       what of this room an engine can choose, by name

Importing this package imports nothing else.
"""

__all__: list[str] = []
