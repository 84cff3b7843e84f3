"""`headrace serve`."""

from __future__ import annotations

import typer

from headrace.cli.options import EngineArgs, engine_command

__all__ = ["serve"]


@engine_command(serves=True)
def serve(args: EngineArgs) -> None:
    """Serve a model over HTTP, with OpenAI's protocol.

    Clients set their base URL to http://HOST:PORT/v1. SIGTERM ends the server in order: running requests get
    --drain-timeout seconds; a second signal ends it at once.
    """
    from headrace.server.supervisor import serve as run

    raise typer.Exit(run(args.start()))
