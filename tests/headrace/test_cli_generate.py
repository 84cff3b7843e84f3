"""`headrace generate` as users call it, and the flags that all commands which ask a model share."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cli import main, requests
from headrace.cli.sampling import HELP, Sampling, sampling_flags
from headrace.core.errors import ConfigError, RequestError
from headrace.core.sampling_params import SamplingParams
from headrace.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

RUN = [sys.executable, "-c", "from headrace.cli import main; main()"]


def run(*words: str, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*RUN, *words], input=stdin, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    return done


def refused(capsys: Any, *words: str) -> str:
    with pytest.raises(SystemExit) as exit:
        main(words)
    out, err = capsys.readouterr()
    assert exit.value.code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def flags(**values: Any) -> Sampling:
    """Pass flags' text through the decorator, as typer does."""
    found: list[Sampling] = []

    def command(args: None, sampling: Sampling) -> None:
        found.append(sampling)

    sampling_flags(command)(None, **dict.fromkeys([*HELP, "option"]) | values)
    return found[0]


def output(*answers: CompletionOutput, prompt: int = 3, cached: int = 0) -> RequestOutput:
    return RequestOutput("r", "text", list(range(prompt)), RequestMetrics(0.0), list(answers), cached)


def test_every_field_has_a_flag() -> None:
    assert set(HELP) == set(SamplingParams.model_fields) - {"detokenize"}


def test_only_given_flags_are_passed() -> None:
    assert flags().given == {}
    assert flags().params(max_tokens=None).max_tokens is None
    assert flags(max_tokens="3").params(max_tokens=None).max_tokens == 3
    got = flags(
        temperature="0.5",
        top_k="4",
        stop=["a", "["],
        stop_token_ids=["7", "8"],
        logprob_token_ids=["9"],
        logprobs_mode="processed_logprobs",
        ignore_eos=False,
        logit_bias='{"5": 2}',
        option=["depth=3", 'word="x=y"'],
    )
    assert got.given == {
        "temperature": 0.5,
        "top_k": 4,
        "stop": ["a", "["],
        "stop_token_ids": [7, 8],
        "logprob_token_ids": [9],
        "logprobs_mode": "processed_logprobs",
        "ignore_eos": False,
        "logit_bias": {"5": 2},
        "depth": 3,
        "word": "x=y",
    }
    assert got.params().logit_bias == {5: 2.0}
    assert got.params().options == {"depth": 3, "word": "x=y"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--temperature", "warm"), "temperature: Input should be a valid number, got 'warm'"),
        (("--top-p", "1.5"), "top_p: Input should be less than or equal to 1, got 1.5"),
        (("--stop-token-ids", "x"), "stop_token_ids.0"),
        (("--stop", ""), "a stop string must not be empty"),
        (("--max-tokens", "2", "--min-tokens", "3"), "min_tokens (3) must not exceed max_tokens (2)"),
        (("--logit-bias", "5"), "logit_bias"),
        (("--logit-bias", "{"), "--logit-bias must be JSON"),
        (("--option", "depth"), "--option must be NAME=JSON, got 'depth'"),
        (("--option", "depth=x"), "--option depth must be JSON"),
        (("--option", "top-k=3"), "top_k has its own flag --top-k"),
        (("--option", "d=3", "--option", "d=4"), "--option d is given twice"),
        (("--logprobs", "2"), "--logprobs is shown with --json only"),
        (("--logprob-token-ids", "2"), "--logprob-token-ids is shown with --json only"),
        (("--logprob-token-ids", "x"), "logprob_token_ids.0"),
        (
            ("--logprobs-mode", "cooked"),
            "logprobs_mode: Input should be 'raw_logprobs', 'processed_logprobs'",
        ),
        (("-p", "-", "-p", "-"), "-p - is given twice"),
        (("--model", "other"), "model is given twice"),
    ],
)
def test_wrong_parameters(capsys: Any, words: tuple[str, ...], text: str) -> None:
    assert text in refused(capsys, "generate", "smollm2", "-p", "x", *words)


def test_no_prompt(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert "no prompt: give one with -p TEXT" in refused(capsys, "generate", "smollm2")


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" two\nlines\n\n")))
    assert requests.read_prompts(["a", "-"]) == ["a", " two\nlines\n"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    with pytest.raises(RequestError, match=r"not UTF-8 text: .* at byte 2"):
        requests.read_stdin()


def test_chat_template_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--chat-template .*none.* cannot be read: No such file"):
        requests.start_llm(SimpleNamespace(), tmp_path / "none")  # type: ignore[arg-type]


def test_ctrl_c_that_a_library_swallows_is_not_lost() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), requests._kept_interrupt(), contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_text_of_several(capsys: Any) -> None:
    one = CompletionOutput(0, "a", [1], "stop")
    requests.write_text([output(one)])
    assert capsys.readouterr().out == "a\n"
    requests.write_text([output(one), output(one, CompletionOutput(1, "b", [1], "stop"))])
    assert (
        capsys.readouterr().out
        == "== prompt 0 ==\na\n== prompt 1, answer 0 ==\na\n== prompt 1, answer 1 ==\nb\n"
    )


def test_json_of_several_answers_and_logprobs() -> None:
    answers = [
        CompletionOutput(
            0, "a", [1, 2], "stop", "x", [{1: Logprob(-0.5, 1, "a"), 9: Logprob(-2.0, 2, "b")}], -0.5
        ),
        CompletionOutput(1, "", [], "error", error="no luck"),
    ]
    line = requests.json_line(4, output(*answers, cached=2))
    assert line["index"] == 4
    assert line["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "cached_tokens": 2,
    }
    assert line["choices"][0]["logprobs"] == [
        [
            {"token_id": 1, "token": "a", "logprob": -0.5, "rank": 1},
            {"token_id": 9, "token": "b", "logprob": -2.0, "rank": 2},
        ]
    ]
    assert line["choices"][0]["stop_reason"] == "x"
    assert line["choices"][1]["error"] == "no luck"


def test_a_failed_answer_decides_the_status(capsys: Any) -> None:
    good, bad = CompletionOutput(0, "a", [1], "stop"), CompletionOutput(0, "", [], "error", error="no\nluck")
    assert requests.failed([output(good)]) == 0
    assert requests.failed([output(good), output(bad)]) == 1
    assert capsys.readouterr().err == "error: prompt 1: no luck\n"


def test_characters_the_terminal_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    requests.emit("a…b\n")
    assert raw.getvalue() == b"a?b\n"


@pytest.mark.weights
@pytest.mark.usefixtures("smollm2_path")
def test_json_is_all_there_is_on_standard_output() -> None:
    done = run(
        "generate", "smollm2", "-p", "The capital of France is", "-p", "1, 2, 3,", "--temperature=0", "--json"
    )
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert [first["index"], second["index"]] == [0, 1]
    assert "Paris" in first["text"]
    assert second["text"].startswith(" 4, 5")
    for line in (first, second):
        assert line["finish_reason"] == "length"
        assert line["usage"]["completion_tokens"] == len(line["token_ids"]) == 16
    assert first["usage"]["prompt_tokens"] == 5
    assert "KV cache" in done.stderr
    assert "prompts:" not in done.stderr


@pytest.mark.weights
@pytest.mark.usefixtures("smollm2_path")
def test_a_piped_prompt_gives_just_the_text() -> None:
    done = run(
        "generate", "smollm2", "--temperature=0", "--max-tokens=3", "--no-show-report", stdin="1, 2, 3,\n"
    )
    assert done.stdout == " 4,\n"
    assert done.stderr == ""


INTERRUPTED = """
import os, signal, sys

def press(event, args):
    if event == "mmap.__new__":
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(press)
from headrace.cli import main
main()
"""
"""The command, with Ctrl-C when the weights are opened: a signal from outside may come too late."""


@pytest.mark.weights
@pytest.mark.usefixtures("smollm2_path")
def test_ctrl_c_while_loading() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "generate", "smollm2", "-p", "x", "--max-tokens=8000"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")
