"""A server's processes: how they come, how they end, and what happens when one is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.testing.serving import Open, Server, serving

pytestmark = pytest.mark.weights

LONG = {"prompt": "The river", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as server:
        yield server


def begin_streams(server: Server, count: int) -> list[Open]:
    opened = [server.begin(**LONG, stream=True) for _ in range(count)]
    server.wait_running(count)
    return opened


def alive(server: Server) -> None:
    status, answer = server.complete(prompt="one two three", max_tokens=4)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 4


def end(server: Server, number: int = signal.SIGTERM, status: int = 0, seconds: float = 30) -> None:
    """Send a signal; everything must go."""
    pids = server.pids()
    server.process.send_signal(number)
    assert server.process.wait(seconds) == status, server.log.read_text()
    server.check_gone(pids)


def test_titles_health_and_readiness(server: Server) -> None:
    [core], [api] = server.children("core"), server.children("api")
    assert core.cmdline()[0] == "headrace-core-0"
    assert api.cmdline()[0] == "headrace-api-0"
    assert server.get("/health") == (
        200,
        {"status": "ok", "engines": [{"pid": core.pid, "alive": True}]},
    )
    assert server.get("/ready") == (200, {"status": "ready"})
    assert server.get("/load") == (200, {"server_load": 0})
    assert server.get("/ping")[0] == 200
    assert server.post("/reset_prefix_cache", {})[0] == 404  # not without --dev-mode
    maps = Path(f"/proc/{api.pid}/maps").read_text()
    assert "libtorch" not in maps, "an API process needs no torch"
    log = server.log.read_text()
    assert "batch-invariant: yes" in log
    assert f"serving smollm2 on http://127.0.0.1:{server.port}" in log
    alive(server)
    end(server)


def test_a_killed_engine_fails_every_request_and_the_health(server: Server) -> None:
    """Source: vllm-project/vllm#39863."""
    [core] = server.children("core")
    streams, plain = begin_streams(server, 3), server.begin(**LONG)
    server.wait_running(4)
    core.kill()
    cause = f"the engine core process (pid {core.pid}) was killed by signal 9"
    for opened in [*streams, plain]:
        assert cause in opened.wait().body
    for opened in streams:
        assert opened.body.rstrip().endswith("data: [DONE]")
        assert '"error"' in opened.body
    assert plain.status in (500, 503)
    status, health = server.get("/health")
    assert status == 503
    assert health["engines"] == [{"pid": core.pid, "alive": False}]
    status, refused = server.complete(prompt="a")
    assert status == 503
    assert cause in refused["error"]["message"]
    assert server.get("/ready")[0] == server.get("/metrics")[0] == 503
    end(server)


def test_sigterm_before_all_api_processes_are_there_lets_running_requests_end(tmp_path: Path) -> None:
    with serving(tmp_path, "--api-server-count", "2", wait=False) as server:
        parent = psutil.Process(server.process.pid)

        def api_processes() -> list[psutil.Process]:
            return [child for child in parent.children() if "api" in " ".join(child.cmdline())]

        server.wait_until(lambda: len(api_processes()) == 2)
        api_processes()[1].suspend()
        server.wait_until(server.is_ready, 120)
        opened = server.begin(prompt="The river", max_tokens=400, ignore_eos=True, stream=True)
        server.wait_running(1)
        assert not server.is_announced(), "the second process was there before it was stopped"
        end(server, seconds=60)
        assert opened.wait().body.endswith("data: [DONE]\n\n"), opened
        assert opened.body.count("data: ") > 400


def test_sigterm_waits_for_nobody_while_the_only_api_process_is_replaced(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-timeout", "600") as server:
        parent = psutil.Process(server.process.pid)
        [killed] = server.children("api")
        killed.kill()

        def others() -> list[psutil.Process]:
            return [
                child
                for child in parent.children()
                if child.pid != killed.pid and "api" in " ".join(child.cmdline())
            ]

        server.wait_until(others)
        others()[0].suspend()
        end(server)


def engine_of(server: Server) -> int | None:
    """The process of the engine that answers."""
    status, health = server.get("/health")
    return int(health["engines"][0]["pid"]) if status == 200 else None


def test_an_engine_is_started_again_where_that_is_asked_for(tmp_path: Path) -> None:
    with serving(tmp_path, "--restart-engine", "1") as server:
        [core] = server.children("core")
        core.kill()
        # Whoever looks seldom sees no moment without an engine: the next one has another number.
        server.wait_until(lambda: engine_of(server) not in (None, core.pid), 60)
        alive(server)
        [again] = server.children("core")
        assert again.pid == engine_of(server) != core.pid
        again.kill()
        server.wait_until(lambda: server.get("/health")[0] == 503)
        end(server)


def test_a_killed_api_process_is_replaced_and_its_requests_end(tmp_path: Path) -> None:
    with serving(tmp_path, "--api-server-count", "2") as server:
        first, second = server.children("api")
        streams = begin_streams(server, 6)
        first.kill()
        second.kill()
        for opened in streams:
            opened.wait()
            assert opened.error or not opened.body.endswith("[DONE]\n\n"), "it was cut off"
        server.wait_until(lambda: len(server.children("api")) == 2 and server.is_ready())
        server.wait_drained()
        alive(server)
        end(server)


def test_two_api_processes_serve_one_engine_and_tell_the_same_metrics(tmp_path: Path) -> None:
    with serving(tmp_path, "--api-server-count", "2") as server:
        before = {child.pid: child.cpu_times().user for child in server.children("api")}
        assert len(before) == 2
        answers = {str(server.complete(prompt="The river", max_tokens=8)[1]["choices"]) for _ in range(40)}
        assert len(answers) == 1

        def have_worked() -> bool:
            # Which of them gets a connection is chance, and their times are told in hundredths of a second.
            server.get("/version")
            return all(child.cpu_times().user > before[child.pid] for child in server.children("api"))

        server.wait_until(have_worked)
        told = [server.metric("generation_tokens_total") for _ in range(10)]
        assert set(told) == {40.0 * 8}
        end(server)


def test_a_killed_parent_leaves_nothing(server: Server, tmp_path: Path) -> None:
    """Source: vllm-project/vllm#55510."""
    begin_streams(server, 2)
    pids = server.pids()
    server.process.kill()
    server.process.wait()
    server.check_gone(pids)


def test_a_port_in_use_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    """Source: vllm-project/vllm#28498. The model cannot be loaded: whoever tried that first would tell of it."""
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\3\0\0\0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "headrace", "serve", str(tmp_path / "broken.gguf"), "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}: Address already in use")


def test_a_model_that_cannot_load_is_one_line_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\3\0\0\0")
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "serve", str(tmp_path / "broken.gguf"), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "broken.gguf" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_sigterm_lets_running_requests_end_and_refuses_others(tmp_path: Path) -> None:
    """Source: vllm-project/vllm#24885."""
    with serving(tmp_path, "--max-num-seqs", "4", "--drain-timeout", "120") as server:
        pids = server.pids()
        # They must still run when all the others wait, the signal has come, and a late one has asked.
        body = {"prompt": "The river", "max_tokens": 400, "ignore_eos": True}
        streams = [server.begin(**body, stream=True) for _ in range(2)]
        plain = [server.begin(**body) for _ in range(2)]
        server.wait_running(4)
        waiting = [server.begin(**body) for _ in range(5)]
        server.wait_until(lambda: server.metric("num_requests_waiting") == 5)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: not server.is_ready())
        late = server.complete(prompt="a")
        assert server.process.wait(150) == 0, server.log.read_text()
        for opened in streams:
            assert opened.wait().body.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length"' in opened.body
            assert '"error"' not in opened.body
        for opened in plain:
            assert opened.wait().status == 200, opened.body
        assert [opened.wait().status for opened in waiting] == [503] * 5
        assert late[0] == 503
        server.check_gone(pids)


def test_what_does_not_end_in_time_ends_with_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-timeout", "0.5") as server:
        streams, plain = begin_streams(server, 1), server.begin(**LONG)
        server.wait_running(2)
        end(server)  # in its time, and long before 2,000 tokens are there
        [stream] = streams
        assert "the server is shutting down" in stream.wait().body
        assert stream.body.endswith("data: [DONE]\n\n")
        assert plain.wait().status in (500, 503)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(server: Server, second: int) -> None:
    begin_streams(server, 2)
    pids = server.pids()
    server.process.send_signal(signal.SIGTERM)
    server.wait_until(lambda: not server.is_ready())  # two signals that wait to be taken may be one
    server.process.send_signal(second)
    assert server.process.wait(20) == 128 + second  # the status of one that did not let requests end
    server.check_gone(pids)


def test_ctrl_c_in_a_terminal_ends_everything(server: Server) -> None:
    """Source: flagos-ai/vllm-plugin-FL#531; huggingface/transformers PR#40479."""
    idle = socket.create_connection(("127.0.0.1", server.port))
    idle.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"200" in idle.recv(1000)
    streams = begin_streams(server, 2)
    end(server, signal.SIGINT)
    for opened in streams:
        assert "the server is shutting down" in opened.wait().body, "it did not wait for 2,000 tokens"
    assert "Traceback" not in server.log.read_text()
    idle.close()


@pytest.mark.parametrize("after", [0.0, 0.4, 1.0, 1.8])
def test_ctrl_c_while_it_starts(tmp_path: Path, after: float) -> None:
    with serving(tmp_path, wait=False) as server:
        server.wait_until(lambda: psutil.Process(server.process.pid).children())
        time.sleep(after)
        pids = server.pids()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) in (0, 128 + signal.SIGINT)
        server.check_gone(pids)
        assert "Traceback" not in server.log.read_text()


def test_a_client_that_vanishes_frees_its_blocks(server: Server) -> None:
    """Source: vllm-project/vllm#9428, #54947."""
    for stream in (True, False):
        before = server.metric("generation_tokens_total")
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            body = (
                b'{"prompt": "a", "max_tokens": 3000, "ignore_eos": true, "stream": %s}'
                % str(stream).lower().encode()
            )
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            server.wait_running(1)
        server.wait_drained()
        assert server.metric("generation_tokens_total") - before < 2000
    alive(server)
    end(server)


def test_a_program_without_signals_of_its_own_can_stop_it_from_a_thread(server: Server) -> None:
    threading.Thread(target=os.kill, args=(server.process.pid, signal.SIGTERM)).start()
    assert server.process.wait(20) == 0
