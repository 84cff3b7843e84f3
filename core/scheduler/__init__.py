"""The unified token scheduler, its queue and the built-in policies."""
