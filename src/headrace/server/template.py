"""The chat template that the server's options name."""

from __future__ import annotations

from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.server.options import ServerSection

__all__ = ["chosen_template"]


def chosen_template(options: ServerSection) -> str | None:
    """Return the template that was given, read from its file where it names one; None: the model's own.

    Raises `ConfigError` for a file that cannot be read.
    """
    given = options.chat_template
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"chat_template {given!r} cannot be read: {why}; it must be a Jinja file, or a template itself",
            option="chat_template",
        ) from None
