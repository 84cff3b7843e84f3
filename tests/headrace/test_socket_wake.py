"""What the engine loop sleeps on when requests come through a socket."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from headrace.process.wake import SocketWake


@pytest.fixture
def socket() -> Iterator[zmq.Socket[Any]]:
    context: zmq.Context[zmq.Socket[Any]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind("inproc://wake")
    yield socket
    context.destroy(linger=0)


def test_set_from_another_thread_wakes_and_clear_forgets(socket: zmq.Socket[Any]) -> None:
    wake = SocketWake(socket)
    threading.Timer(0.05, wake.set).start()
    assert wake.wait(30)
    wake.clear()
    assert not wake.wait(0)
    wake.close()


def test_a_message_wakes_until_it_is_read(socket: zmq.Socket[Any]) -> None:
    wake = SocketWake(socket)
    client = socket.context.socket(zmq.DEALER)
    client.connect("inproc://wake")
    client.send(b"hello")
    assert wake.wait(30)
    wake.clear()
    assert wake.wait(0)
    socket.recv_multipart()
    assert not wake.wait(0)
    client.close()
    wake.close()


def test_a_set_more_than_the_pipe_holds_is_no_error(socket: zmq.Socket[Any]) -> None:
    wake = SocketWake(socket)
    for _ in range(70_000):  # a pipe holds 65,536 bytes
        wake.set()
    assert wake.wait(0)
    wake.clear()
    wake.close()


def test_set_after_the_end_reaches_no_file_that_came_after(socket: zmq.Socket[Any]) -> None:
    """Whoever stops an engine says so first and wakes it then; the loop may have ended between the two."""
    wake = SocketWake(socket)
    wake.close()
    pipes = [os.pipe() for _ in range(4)]  # these take the numbers of the closed one
    wake.set()
    wake.close()
    for read, write in pipes:
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
        os.close(read)
        os.close(write)


def test_one_thread_may_set_while_another_closes(socket: zmq.Socket[Any]) -> None:
    for _ in range(200):
        wake = SocketWake(socket)
        failed: list[BaseException] = []

        def hammer(wake: SocketWake = wake, failed: list[BaseException] = failed) -> None:
            until = time.monotonic() + 0.002
            try:
                while time.monotonic() < until:
                    wake.set()
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=hammer)
        thread.start()
        wake.close()
        thread.join()
        assert not failed
