"""`headrace batch`: OpenAI's batch format, and runs that are ended anywhere and continued."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from headrace.batch.journal import Journal, open_journal
from headrace.batch.lines import check_lines, read_lines
from headrace.batch.run import Summary, run_lines
from headrace.cli import batch as cli_batch
from headrace.cli import main
from headrace.core.errors import ConfigError, EngineError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def request(custom_id: Any, url: str = COMPLETIONS, **rest: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"prompt": f"p {custom_id}"},
        **rest,
    }


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")]


class Echo:
    """A handler that answers with what it was asked; it counts."""

    def __init__(self, status: Callable[[str], int] = lambda prompt: 200, seconds: float = 0.0) -> None:
        self.status = status
        self.seconds = seconds
        self.prompts: list[str] = []
        self.running = self.most_running = 0

    async def __call__(self, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.prompts.append(body["prompt"])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        return self.status(body["prompt"]), {"id": f"cmpl-{body['prompt']}", "url": url, "text": "é\u2028 \n"}


def run(source: Path, output: Path, handler: Any, max_concurrency: int = 4) -> Summary:
    with open_journal(output, check_lines(source)) as journal:
        return asyncio.run(run_lines(source, journal, handler, max_concurrency=max_concurrency))


# One run ---------------------------------------------------------------------------------------------


def test_a_batch(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request("a"), request("b", CHAT), request("c")])
    output = tmp_path / "out.jsonl"
    handler = Echo(lambda prompt: 404 if prompt == "p c" else 200)
    assert run(source, output, handler) == Summary(answered=2, refused=1)
    found = {entry["custom_id"]: entry for entry in results(output)}
    assert set(found["a"]) == {"id", "custom_id", "response", "error"}
    assert found["a"]["error"] is None
    assert found["a"]["response"] == {
        "status_code": 200,
        "request_id": "cmpl-p a",
        "body": {"id": "cmpl-p a", "url": COMPLETIONS, "text": "é\u2028 \n"},
    }
    assert found["b"]["response"]["body"]["url"] == CHAT
    assert found["c"]["response"]["status_code"] == 404
    assert len({entry["id"] for entry in found.values()}) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("most", [1, 3, 50])
def test_so_many_at_a_time(tmp_path: Path, most: int) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(f"r{n}") for n in range(20)])
    handler = Echo(seconds=0.01)
    run(source, tmp_path / "out.jsonl", handler, most)
    assert handler.most_running == min(most, 20)
    assert sorted(handler.prompts) == sorted(f"p r{n}" for n in range(20))


BAD_LINES = [
    ("{", "it is not JSON"),
    ("[1]", "it must be a JSON object, got [1]"),
    ('{"custom_id": NaN}', "it is not JSON"),
    (request(7), "custom_id must be a text that is not empty, got 7"),
    (request(""), "custom_id must be a text that is not empty, got ''"),
    (request("x1", method="GET"), "method must be POST, got 'GET'"),
    (
        request("x2", "/v1/embeddings"),
        "url must be one of /v1/chat/completions, /v1/completions, got '/v1/emb",
    ),
    (request("x3", body=None), "body must be a JSON object, got None"),
    (request("x4", body={"stream": True}), "body.stream must be false or left out"),
]


def test_lines_that_are_no_requests(tmp_path: Path) -> None:
    """Each says why, and none stops the others; the next run does not say it again."""
    lines = [
        "\ufeff" + json.dumps(request("first")),
        "",
        "   ",
        *(line for line, _ in BAD_LINES),
        request("last"),
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    handler = Echo()
    assert run(source, output, handler) == Summary(answered=2, invalid=len(BAD_LINES))
    assert handler.prompts == ["p first", "p last"]
    wrong = [entry for entry in results(output) if entry["error"]]
    assert [entry["error"]["line"] for entry in wrong] == list(range(4, 4 + len(BAD_LINES)))
    assert [entry["custom_id"] for entry in wrong] == [None] * 5 + ["x1", "x2", "x3", "x4"]
    for entry, (_, text) in zip(wrong, BAD_LINES, strict=True):
        assert entry["response"] is None
        assert entry["error"]["code"] == "invalid_line"
        assert entry["error"]["message"].startswith(text)
    before = output.read_bytes()
    assert run(source, output, handler) == Summary()
    assert output.read_bytes() == before


def test_repeated_ids_are_named(tmp_path: Path) -> None:
    ids = ["a", "b", "a", "c", "b", "d", "d", "d"]
    source = write_lines(tmp_path / "in.jsonl", ["", *map(request, ids)])
    with pytest.raises(ConfigError) as error:
        check_lines(source)
    assert "there is 'a' on lines 2 and 4, 'b' on lines 3 and 6, 'd' on lines 7 and 8 and 1 more" in str(
        error.value
    )


def test_files_that_hold_no_request(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        list(read_lines(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ConfigError, match="holds no request"):
        check_lines(write_lines(tmp_path / "in.jsonl", ["", ""]))


# Runs that are ended ---------------------------------------------------------------------------------


def test_continued_wherever_it_was_cut(tmp_path: Path) -> None:
    """Cut anywhere, a file is completed: whole lines stay as they are, the rest is done again."""
    lines = [request("a"), "no JSON", request("b"), request("c")]
    source = write_lines(tmp_path / "in.jsonl", lines)
    whole = tmp_path / "whole.jsonl"
    run(source, whole, Echo(), 1)
    data = whole.read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == ord("\n")]
    output = tmp_path / "out.jsonl"
    around = {place for end in ends for place in (end - 2, end - 1, end, end + 1) if place < len(data)}
    for cut in sorted({*range(0, len(data), 11), *around}):
        output.write_bytes(data[:cut])
        handler = Echo()
        run(source, output, handler)
        # A line that lacks only its newline is whole.
        kept = sum(end - 1 <= cut for end in ends)
        assert output.read_bytes().startswith(data[: ends[kept - 1] if kept else 0])
        assert len(handler.prompts) == 3 - len({0, 2, 3} & set(range(kept)))
        ids = collections.Counter(entry["custom_id"] for entry in results(output))
        assert ids == {"a": 1, None: 1, "b": 1, "c": 1}


def test_what_the_server_failed_on_is_done_again(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(name) for name in "abcde"])
    output = tmp_path / "out.jsonl"
    statuses = {"p a": 200, "p b": 500, "p c": 400, "p d": 429, "p e": 503}
    assert run(source, output, Echo(statuses.__getitem__)) == Summary(answered=1, refused=1, failed=3)
    assert len(results(output)) == 5
    kept = {entry["custom_id"]: entry for entry in results(output) if entry["custom_id"] in "ac"}
    handler = Echo()
    assert run(source, output, handler) == Summary(answered=3)
    assert sorted(handler.prompts) == ["p b", "p d", "p e"]
    found = {entry["custom_id"]: entry for entry in results(output)}
    assert len(results(output)) == 5
    assert found | kept == found
    assert {entry["response"]["status_code"] for entry in found.values()} == {200, 400}


def test_a_handler_that_raises_ends_the_run(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(f"r{n}") for n in range(9)])
    output = tmp_path / "out.jsonl"
    cancelled = []

    async def handler(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["prompt"] == "p r4":
            await asyncio.sleep(0.01)
            raise EngineError("it is gone")
        if body["prompt"] in ("p r3", "p r5"):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(body["prompt"])
                raise
        return 200, {}

    with pytest.raises(EngineError, match="it is gone"):
        run(source, output, handler, 3)
    assert sorted(cancelled) == ["p r3", "p r5"]
    assert sorted(entry["custom_id"] for entry in results(output)) == ["r0", "r1", "r2"]
    assert run(source, output, Echo()) == Summary(answered=6)
    assert len(results(output)) == 9


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("dear diary", "its line 1 is no result of a batch"),
        ('{"id":"batch_req_1","custom_id":"a","response":null,"error":null}\n\n', "its line 2 is no result"),
        ('{"id": "batch_req_1", "custom_id"\n', "its line 1 is no result"),
        (
            '{"id":"batch_req_1","custom_id":"z","response":null,"error":null}\n',
            "it holds a result for 'z', which",
        ),
        (
            '{"id":"batch_req_1","custom_id":null,"response":null,"error":{"line":3}}\n',
            "it holds a result for line 3, which is not in the input file",
        ),
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str, text: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request("a")])
    output = tmp_path / "out.jsonl"
    output.write_text(content)
    with pytest.raises(ConfigError, match=text):
        run(source, output, Echo())
    assert output.read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request("a")])
    output = tmp_path / "out.jsonl"
    with (
        open_journal(output, check_lines(source)),
        pytest.raises(ConfigError, match="another run is writing it"),
    ):
        run(source, output, Echo())
    assert run(source, output, Echo()) == Summary(answered=1)


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request("a")])
    with FileIO("/dev/full", "w") as full:
        journal = Journal(Path("out.jsonl"), full, set())
        with pytest.raises(ConfigError, match=r"out\.jsonl: it cannot be written: No space left on device"):
            asyncio.run(run_lines(source, journal, Echo(), max_concurrency=2))
    assert not journal.done


SLOW = """
import asyncio, itertools, sys
from contextlib import asynccontextmanager
from headrace.cli import batch, main

asked = itertools.count(1)

@asynccontextmanager
async def open_handler(args):
    async def handler(url, body):
        with open(sys.argv[1], "a") as log:
            log.write(body["prompt"] + "\\n")
        await asyncio.sleep(3600 if next(asked) > int(sys.argv[2]) else 0.02)
        return 200, {"text": body["prompt"] * 500}
    yield handler

batch.open_handler = open_handler
main(sys.argv[3:])
"""
"""A batch whose handler answers so many requests, and then no more: however late it is ended, it is not done."""


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_ended_is_continued(tmp_path: Path, ended_by: signal.Signals) -> None:
    """Whatever ends it: no line is lost, none is there twice, and none that is finished is done again."""
    count = 120
    source = write_lines(tmp_path / "in.jsonl", [request(f"r{n}") for n in range(count)])
    output, log = tmp_path / "out.jsonl", tmp_path / "log"
    words = ["batch", "x", "-i", str(source), "-o", str(output), "--max-concurrency", "5"]

    def command(most: int) -> list[str]:
        return [sys.executable, "-c", SLOW, str(log), str(most), *words]

    finished: set[str] = set()
    for least, most in ((10, 35), (40, 60)):  # of the first run there are fewer than the second waits for
        process = subprocess.Popen(command(most), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        deadline = time.monotonic() + 60
        while not output.exists() or output.read_bytes().count(b"\n") < least:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(ended_by)
        process.communicate(timeout=60)
        assert process.returncode != 0
        whole = output.read_bytes().rpartition(b"\n")[0].splitlines()
        now = {json.loads(line)["custom_id"] for line in whole}
        assert least <= len(now) == len(whole) < count
        assert finished < now
        finished = now
        asked_before = collections.Counter(log.read_text().split("\n"))
    done = subprocess.run(command(count), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (
        f"{count} requests: {len(finished)} were there already, {count - len(finished)} answered"
        in done.stdout
    )
    assert sorted(entry["custom_id"] for entry in results(output)) == sorted(f"r{n}" for n in range(count))
    assert all(e["response"]["body"]["text"] == f"p {e['custom_id']}" * 500 for e in results(output))
    asked = collections.Counter(log.read_text().split("\n"))
    assert all(asked[f"p {name}"] == asked_before[f"p {name}"] for name in finished)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith((".partial", ".lock"))]


# The command -----------------------------------------------------------------------------------------


def call(capsys: Any, *words: str, code: int = 0) -> str:
    """Run a command in this process; return what it says, on standard error where it fails."""
    with pytest.raises(SystemExit) as exit:
        main(["batch", *words])
    captured = capsys.readouterr()
    assert (exit.value.code or 0) == code, captured
    return captured.err if code == 2 else captured.out


def test_the_command(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    handler = Echo(lambda prompt: 500 if prompt == "p b" else 200)

    @asynccontextmanager
    async def open_handler(args: Any) -> AsyncIterator[Any]:
        started.append((args.model, args.flags))
        yield handler
        started.append("closed")

    monkeypatch.setattr(cli_batch, "open_handler", open_handler)
    source = write_lines(tmp_path / "in.jsonl", [request("a"), request("b"), "{"])
    words = ["some-model", "-i", str(source), "--output-file", str(tmp_path / "out.jsonl")]
    out = call(capsys, *words, "--max-num-seqs", "3", code=1)
    assert out == (
        "3 requests: 0 were there already, 1 answered, 0 refused, 1 failed, 1 no requests\n"
        "the same call does those that failed again\n"
    )
    assert started == [("some-model", {"max_num_seqs": 3}), "closed"]
    handler.status = lambda prompt: 200
    assert "2 were there already, 1 answered" in call(capsys, *words)
    started.clear()
    assert call(capsys, *words) == "all 3 requests were there already\n"
    assert not started


def test_wrong_calls(capsys: Any, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request("a"), request("a")])
    output = str(tmp_path / "out.jsonl")
    assert "'a' on lines 1 and 2" in call(capsys, "m", "-i", str(source), "-o", output, code=2)
    write_lines(source, [request("a")])
    assert "is the input file" in call(capsys, "m", "-i", str(source), "-o", str(source), code=2)
    assert "nowhere/o cannot be written" in call(capsys, "m", "-i", str(source), "-o", "nowhere/o", code=2)
    assert "cannot be read" in call(capsys, "m", "-i", "nowhere", "-o", output, code=2)
    assert "it must be a file" in call(capsys, "m", "-i", str(source), "-o", os.devnull, code=2)
    assert not Path(output).exists()
