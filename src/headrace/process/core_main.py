"""The engine core's process, `python -m headrace.process.core_main`: a front end or `headrace serve` starts it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import setproctitle
import zmq

from headrace.core.errors import EngineError, HeadraceError
from headrace.process.child import ParentLine
from headrace.process.collecting import keep_what_started
from headrace.process.launch import LaunchSpec, started_from
from headrace.process.logs import LogChoice, set_up_logs

__all__ = ["CoreWork", "main"]


class CoreWork(msgspec.Struct):
    """What a core process is told."""

    launch: LaunchSpec
    folder: str
    """Holds the socket; the process removes it where its parent can no longer."""
    address: str
    index: int
    """Its number among the engines of a server."""
    logs: LogChoice


def main() -> int:
    """Build the engine, say so, serve until told to stop; returns the exit status."""
    parent = ParentLine()
    work = msgspec.json.decode(parent.work(), type=CoreWork)
    setproctitle.setproctitle(f"headrace-core-{work.index}")
    set_up_logs(work.logs)
    stops: list[CoreServer] = []

    def on_order(order: object) -> None:
        # Before the engine is there, nothing is lost by going at once.
        if order == "stop" and stops:
            stops[0].stop()

    parent.listen(on_order, lambda: shutil.rmtree(Path(work.folder), ignore_errors=True))
    # Imported here: with it comes torch, and a parent that dies meanwhile is to be noticed.
    from headrace.process.core_server import CoreServer
    from headrace.progress import download_progress

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with download_progress() as progress:
            server = CoreServer(started_from(work.launch), context, work.address, progress)
    except HeadraceError as error:
        parent.failed(error)
        return 1
    keep_what_started()
    stops.append(server)
    parent.ready(str(server.report))
    try:
        server.run()
    except EngineError:
        return 1  # said where it happened
    finally:
        context.term()
    return 0


if __name__ == "__main__":
    sys.exit(main())
