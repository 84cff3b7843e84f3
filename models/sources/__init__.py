"""Model sources: where a name's files come from."""

__all__: list[str] = []
