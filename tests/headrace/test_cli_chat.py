"""`headrace chat`: the loop with a fake model, and the real command on a terminal and off it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.conversation import Conversation, Message, talk
from headrace.cli.requests import Streamed, interrupts, stream_out
from headrace.core.errors import EngineError, RequestError
from headrace.outputs import CompletionDelta

RUN = [sys.executable, "-c", "from headrace.cli import main; main()", "chat"]


class Fake:
    """Answers with the number of messages; more than `limit` of them do not fit."""

    def __init__(self, limit: int = 99) -> None:
        self.limit = limit
        self.asked: list[list[Message]] = []
        self.reason: str | None = "stop"

    def __call__(self, messages: list[Message]) -> Streamed:
        if len(messages) > self.limit:
            raise RequestError("too long", param="prompt")
        self.asked.append(messages)
        return Streamed(f"answer {len(messages)}", 3, [1.0, 1.5, 2.0], self.reason)


def lines(*given: Any) -> Callable[[], str]:
    rest = iter(given)

    def read() -> str:
        item = next(rest, EOFError())
        if isinstance(item, BaseException):
            raise item
        return str(item)

    return read


def start(fake: Any, system: str | None = None) -> tuple[Conversation, list[str]]:
    said: list[str] = []
    return Conversation(fake, said.append, system), said


def test_turns_are_kept() -> None:
    fake = Fake()
    conversation, _ = start(fake, "be kind")
    assert talk(conversation, lines("one", "  ", "//two"), keeps_going=False)
    assert [message["content"] for message in fake.asked[1]] == ["be kind", "one", "answer 2", "/two"]
    assert [message["role"] for message in fake.asked[1]] == ["system", "user", "assistant", "user"]


def test_commands() -> None:
    fake = Fake()
    conversation, said = start(fake, "be kind")
    given = (
        "/stats",
        "one",
        "/stats",
        "/reset",
        "two",
        "/system be brief",
        "three",
        "/system",
        "four",
        "/help",
    )
    assert talk(conversation, lines(*given, "/quit", "five"), keeps_going=True)
    assert [len(messages) for messages in fake.asked] == [2, 2, 2, 1]
    assert fake.asked[2][0]["content"] == "be brief"
    assert said[0] == "there is no answer yet"
    assert said[1] == "3 tokens; the first after 0.50 s, then 4.0 tok/s"
    assert "/reset" in said[-1]


def test_a_full_context_drops_the_older_half_of_the_turns() -> None:
    fake = Fake(limit=8)
    conversation, said = start(fake, "be kind")
    talk(conversation, lines("1", "2", "3", "4"), keeps_going=True)
    assert not said
    conversation.ask("5")  # 1 + 2·3 + 1 messages fit, 4 turns and this one do not
    assert [m["content"] for m in fake.asked[-1] if m["role"] != "assistant"] == ["be kind", "3", "4", "5"]
    assert said == [
        "note: the conversation no longer fits the model's context; the 2 oldest turns were dropped"
    ]
    assert [asked for asked, _ in conversation.turns] == ["3", "4", "5"]


def test_a_question_that_never_fits_leaves_the_conversation_alone() -> None:
    fake = Fake()
    conversation, said = start(fake)
    talk(conversation, lines("1", "2"), keeps_going=True)
    fake.limit = 0
    talk(conversation, lines("3"), keeps_going=True)
    assert said == ["error: too long"]
    assert [asked for asked, _ in conversation.turns] == ["1", "2"]
    with pytest.raises(RequestError, match="too long"):
        talk(conversation, lines("3"), keeps_going=False)


def test_other_ends_of_an_answer() -> None:
    fake = Fake()
    conversation, said = start(fake)
    fake.reason = "length"
    conversation.ask("1")
    assert "max_tokens or the model's context" in said[-1]
    conversation.reply = lambda messages: Streamed("par", 1, [0.0], "error", "no luck")
    assert not talk(conversation, lines("2"), keeps_going=False)
    assert said[-1] == "error: no luck"
    assert len(conversation.turns) == 1


def test_what_ends_the_loop() -> None:
    conversation, said = start(Fake())
    talk(conversation, lines(KeyboardInterrupt(), "/rest", "one"), keeps_going=True)
    assert said[0] == ""
    assert "unknown command '/rest' (did you mean '/reset'?)" in said[1]
    assert len(conversation.turns) == 1
    with pytest.raises(KeyboardInterrupt):
        talk(conversation, lines(KeyboardInterrupt()), keeps_going=False)
    with pytest.raises(RequestError, match="unknown command"):
        talk(conversation, lines("/rest"), keeps_going=False)

    def stopped(messages: list[Message]) -> Streamed:
        raise EngineError("stopped")

    conversation.reply = stopped
    with pytest.raises(EngineError):
        talk(conversation, lines("x"), keeps_going=True)


def test_ctrl_c_stops_a_stream_between_two_steps() -> None:
    closed, wrote = [], []

    def deltas() -> Iterator[CompletionDelta]:
        try:
            for word in ("a", "b", "c"):
                if word == "b":
                    signal.raise_signal(signal.SIGINT)
                yield CompletionDelta(0, word, [1])
        finally:
            closed.append(True)

    before = signal.getsignal(signal.SIGINT)
    with interrupts() as stopped:
        answer = stream_out(deltas(), stopped, time.perf_counter, wrote.append)
        assert closed == [True]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert wrote == ["a", "b"]
    assert (answer.text, answer.num_tokens, answer.finish_reason) == ("ab", 2, None)


@pytest.mark.weights
@pytest.mark.usefixtures("smollm2_path")
def test_paris() -> None:
    question = "What is the capital of France?"
    words = ["smollm2", "-p", question, "--max-tokens", "24", "--temperature", "0", "--json"]
    done = subprocess.run(
        [*RUN, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])


@pytest.mark.weights
@pytest.mark.usefixtures("smollm2_path")
def test_lines_of_standard_input_are_turns() -> None:
    turns = "What is the capital of France?\nWhat is the capital of Italy?\n"
    done = subprocess.run(
        [*RUN, "smollm2", "--max-tokens=16", "--temperature=0", "--json", "--no-show-report"],
        input=turns,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second = map(json.loads, done.stdout.splitlines())
    assert "Paris" in first["text"]
    assert "Rome" in second["text"]
    assert second["usage"]["prompt_tokens"] > first["usage"]["total_tokens"]
    assert second["usage"]["cached_tokens"] > 0


def test_a_model_without_template(tmp_path: Path, tiny_gguf: Any) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    for words in (["-p", "hello"], []):
        done = subprocess.run(
            [*RUN, str(path), *words, "--no-show-report", "--num-kv-blocks=16"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: this model has no chat template")
        assert done.stderr.count("\n") == 1


class Terminal:
    """A child on a pseudo-terminal, and all it wrote."""

    def __init__(self, words: list[str]) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(words[0], words, {**os.environ, "TERM": "dumb", "COLUMNS": "200"})
        self.text = ""
        self._seen = 0

    def read(self, timeout: float) -> bool:
        """Read what there is; False at its end."""
        ready, _, _ = select.select([self._fd], [], [], timeout)
        if not ready:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # what Linux says when the other side is closed
            return False
        self.text += data.decode(errors="replace")
        return bool(data)

    def wait_for(self, pattern: str, timeout: float = 60) -> str:
        """Wait for new text with the pattern and return it; what follows it is new the next time."""
        deadline = time.monotonic() + timeout
        while (match := re.search(pattern, self.text[self._seen :])) is None:
            more = time.monotonic() < deadline and self.read(0.2)
            assert more, f"{pattern!r} did not come: {self.text[self._seen :]!r}"
        found = self.text[self._seen :][: match.end()]
        self._seen += match.end()
        return found

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for_sleep(self, timeout: float = 60) -> None:
        """Wait until its main thread sleeps, as it does in a wait for keys."""
        deadline = time.monotonic() + timeout
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline, "it never sleeps"
            time.sleep(0.01)

    def end(self) -> int:
        """Read to the end and return the exit status."""
        while self.read(30):
            pass
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.weights
@pytest.mark.usefixtures("smollm2_path")
def test_a_conversation_on_a_terminal() -> None:
    # Answers go on until they are stopped, however late that is.
    words = ["--temperature=0", "--ignore-eos", "--no-show-report"]
    terminal = Terminal([*RUN, "smollm2", *words])
    try:
        terminal.wait_for(r"Ctrl-D ends\s+> ")
        # Python's readline does not see a signal that comes between its prompt and its wait for keys.
        terminal.send("half a line")
        terminal.wait_for("half a line")
        terminal.wait_for_sleep()
        terminal.send("\x03")
        terminal.wait_for("\n> ")
        terminal.send("Write a very long story about the sea.\n")
        terminal.wait_for(r"sea\.\s+\S+ \S+ \S+ ")
        terminal.send("\x03")
        terminal.wait_for("\n> ")
        assert "context is used up" not in terminal.text
        terminal.send("/stats\n")
        count = int(re.findall(r"(\d+) tokens?; the first", terminal.wait_for(r"tok/s\s+> "))[0])
        assert 3 <= count < 8000  # of the 8,192 that the context holds
        # Only the first turn speaks of the sea.
        terminal.send("What was the story about?\n")
        assert re.search("sea|ocean|sail|ship", terminal.wait_for(r"about\?\s+\S[^\n]*\n"))
        terminal.send("\x03")
        terminal.wait_for("\n> ")
        terminal.send("\x04")
        assert terminal.end() == 0, terminal.text
        assert "Traceback" not in terminal.text
    except BaseException:
        os.kill(terminal.pid, signal.SIGKILL)
        raise
