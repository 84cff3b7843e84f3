"""Plugins: how they register (`registry`), where they are found and judged (`manager`)."""
