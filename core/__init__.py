"""Floor 0: what every other room stands on.

Core knows requests, tokens, blocks and plans. It imports neither torch nor numpy, no plugin, no
model and no backend, and it has no word for any single feature.
"""
