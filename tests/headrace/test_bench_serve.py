"""`headrace bench serve` against a small server without a model: what is sent, what is counted, what is told."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.bench.arrivals import arrival_times
from headrace.bench.streams import Answer, EventReader
from headrace.cli import main
from headrace.core.errors import ConfigError

VLLM = {
    *(
        "date",
        "backend",
        "model_id",
        "num_prompts",
        "request_rate",
        "burstiness",
        "max_concurrency",
        "duration",
    ),
    *("completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    "max_concurrent_requests",
    *(
        f"{kind}_{name}_ms"
        for kind in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    ),
}
DETAILS = {
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times"),
    *("generated_texts", "errors"),
}


def call(capsys: Any, *words: str, code: int = 0) -> str:
    """Run `headrace bench serve` in this process; return what it says, on standard error where it fails."""
    with pytest.raises(SystemExit) as exit:
        main(["bench", "serve", *words])
    captured = capsys.readouterr()
    assert (exit.value.code or 0) == code, captured
    return captured.err if code else captured.out


def run(capsys: Any, folder: Path, server: Any, *words: str) -> tuple[str, dict[str, Any]]:
    """Load the server; return what is said and all figures."""
    file = folder / "figures.json"
    text = call(capsys, "--base-url", server.url, "--output-json", str(file), "--save-detailed", *words)
    return text, json.loads(file.read_text())


def random_lengths(number: int, inputs: int, outputs: int) -> list[str]:
    return [
        "--num-prompts",
        str(number),
        "--input-len",
        str(inputs),
        "--output-len",
        str(outputs),
        "--ignore-eos",
    ]


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.json"
    requests = [{"prompt_ids": list(range(97, 97 + n)), "max_tokens": 20 - n} for n in (4, 7, 13, 19)]
    path.write_text(json.dumps(requests))
    return path


# What is sent and what comes back --------------------------------------------------------------------


def test_a_workload_of_token_ids(capsys: Any, tmp_path: Path, fake_server: Any, workload: Path) -> None:
    text, found = run(capsys, tmp_path, fake_server, "--dataset-path", str(workload), "--ignore-eos")
    assert set(found) >= VLLM | DETAILS | {"client_cpu_s", "machine", "headrace", "workload"}
    requests = json.loads(workload.read_text())
    asked = sorted((body for _, body in fake_server.behaviour.asked), key=lambda body: len(body["prompt"]))
    assert {path for path, _ in fake_server.behaviour.asked} == {"/v1/completions"}
    assert asked[0] == {
        "model": "fake",
        "prompt": requests[0]["prompt_ids"],
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }
    assert [body["prompt"] for body in asked] == [request["prompt_ids"] for request in requests]
    assert found["input_lens"] == [4, 7, 13, 19]
    assert found["output_lens"] == [16, 13, 7, 1]
    assert [len(itls) for itls in found["itls"]] == [15, 12, 6, 0]
    answer = fake_server.module.answer
    texts = ["".join(answer(r["prompt_ids"], r["max_tokens"], True)) for r in requests]
    assert found["generated_texts"] == texts
    assert found["errors"] == [""] * 4
    assert (found["completed"], found["failed"]) == (4, 0)
    assert found["model_id"] == "fake"
    assert found["request_rate"] == "inf"
    assert found["request_goodput"] is None
    assert 0 < found["client_cpu_s"] < 60
    assert f"Serving: {found['request_throughput']:.2f} requests/s" in text
    assert "Time between chunks: mean" in text


def test_chats_are_text(capsys: Any, tmp_path: Path, fake_server: Any, workload: Path) -> None:
    """The chunks that open and close a chat carry no token; the server counts its template's tokens, too."""
    _, found = run(capsys, tmp_path, fake_server, "--backend", "openai-chat", "--dataset-path", str(workload))
    paths, bodies = zip(*fake_server.behaviour.asked, strict=True)
    assert set(paths) == {"/v1/chat/completions"}
    shortest = min(bodies, key=lambda body: len(body["messages"][0]["content"]))
    assert shortest["messages"] == [{"role": "user", "content": "abcd"}]
    assert shortest["max_completion_tokens"] == 16
    assert "ignore_eos" not in shortest
    assert found["input_lens"] == [6, 9, 15, 21]
    assert [len(itls) + 1 for itls in found["itls"]] == found["output_lens"]
    answer = fake_server.module.answer
    prompts = [fake_server.module.encode(f"<{'abcdefghijklmnopqrstuvwxyz'[:n]}>") for n in (4, 7, 13, 19)]
    texts = ["".join(answer(ids, 20 - n, False)) for ids, n in zip(prompts, (4, 7, 13, 19), strict=True)]
    assert found["generated_texts"] == texts


def test_every_figure_follows_from_the_details(capsys: Any, tmp_path: Path, fake_server: Any) -> None:
    """Made again here with numpy, from the lists alone."""
    fake_server.behaviour.ttft, fake_server.behaviour.itl = 0.02, 0.003
    fake_server.behaviour.fault = lambda body: "cut" if body["max_tokens"] % 10 == 1 else ""
    words = [*random_lengths(40, 20, 32), "--range-ratio", "0.9", "--request-rate", "400"]
    words += ["--max-concurrency", "6", "--metric-percentiles", "50,99,99.9"]
    words += ["--goodput", "ttft:2000", "tpot:500", "e2el:150"]
    text, found = run(capsys, tmp_path, fake_server, *words)
    good = [place for place, error in enumerate(found["errors"]) if not error]
    assert 0 < found["failed"] == 40 - len(good)
    assert found["completed"] == len(good)
    inputs = [found["input_lens"][i] for i in good]
    outputs = [found["output_lens"][i] for i in good]
    duration = found["duration"]
    assert found["total_input_tokens"] == sum(inputs)
    assert found["total_output_tokens"] == sum(outputs) == sum(found["output_lens"])
    assert found["request_throughput"] == pytest.approx(len(good) / duration)
    assert found["output_throughput"] == pytest.approx(sum(outputs) / duration)
    assert found["total_token_throughput"] == pytest.approx((sum(inputs) + sum(outputs)) / duration)
    starts = np.array(found["start_times"])[good]
    ttfts = np.array(found["ttfts"])[good]
    ends = np.array([found["ttfts"][i] + sum(found["itls"][i]) for i in good])
    assert ends == pytest.approx(np.array(found["latencies"])[good])
    tpots = (ends - ttfts) / (np.array(outputs) - 1)
    itls = np.concatenate([found["itls"][i] for i in good])
    for name, values in (("ttft", ttfts), ("tpot", tpots), ("itl", itls), ("e2el", ends)):
        assert found[f"mean_{name}_ms"] == pytest.approx(1000 * values.mean())
        assert (
            found[f"median_{name}_ms"] == found[f"p50_{name}_ms"] == pytest.approx(1000 * np.median(values))
        )
        assert found[f"std_{name}_ms"] == pytest.approx(1000 * values.std())
        assert found[f"p99_{name}_ms"] == pytest.approx(1000 * np.percentile(values, 99))
        assert found[f"p99.9_{name}_ms"] == pytest.approx(1000 * np.percentile(values, 99.9))
    kept = (ttfts <= 2.0) & (tpots <= 0.5) & (ends <= 0.15)
    assert 0 < kept.sum() < len(good)
    assert found["request_goodput"] == pytest.approx(kept.sum() / duration)
    assert f"Goodput: {found['request_goodput']:.2f} requests/s within ttft 2000 ms" in text
    moments = [starts[n] + ttfts[n] + np.cumsum([0, *found["itls"][i]]) for n, i in enumerate(good)]
    seconds = np.floor(np.concatenate(moments) - starts.min()).astype(int)
    assert found["max_output_tokens_per_s"] == pytest.approx(np.bincount(seconds).max())
    at_once = [int(((starts <= t) & (t < starts + ends)).sum()) for t in starts]
    assert found["max_concurrent_requests"] == max(at_once) <= 6
    assert fake_server.behaviour.most_running == 6
    assert max(found["queue_times"]) > 0.01
    # No sooner than they were sent; when they were read depends on the machine.
    assert ttfts.min() >= 0.9 * 0.02
    assert (ends >= 0.9 * (0.02 + 0.003 * (np.array(outputs) - 1))).all()
    assert itls.max() >= 0.9 * 0.003


@contextlib.contextmanager
def lateness() -> Iterator[list[float]]:
    """Gather by how many seconds a thread of this process wakes too late: nobody here can be on time then."""
    late: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            begun = time.perf_counter()
            time.sleep(0.01)
            late.append(time.perf_counter() - begun - 0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield late
    finally:
        over.set()
        thread.join()


def test_requests_are_sent_at_their_times(capsys: Any, tmp_path: Path, fake_server: Any) -> None:
    words = ["--request-rate", "100", "--burstiness", "0.5", "--seed", "3", *random_lengths(30, 5, 1)]
    with lateness() as machine:
        _, found = run(capsys, tmp_path, fake_server, *words)
    starts = np.array(found["start_times"])
    planned = np.array(arrival_times(30, 100, burstiness=0.5, seed=3))
    late = (starts - starts[0]) - (planned - planned[0])
    assert abs(np.median(late)) < 0.05 + sum(machine)
    assert found["duration"] > planned[-1] == pytest.approx(0.3)
    assert found["workload"]["seed"] == 3


def test_chunks_of_several_tokens(capsys: Any, tmp_path: Path, fake_server: Any, monkeypatch: Any) -> None:
    """Tokens are those of the usage; without it, chunks."""
    monkeypatch.setattr(fake_server.module, "answer", lambda ids, most, ignore: ["ab", "cd"])
    _, found = run(capsys, tmp_path, fake_server, *random_lengths(2, 5, 9))
    assert found["output_lens"] == [2, 2]
    fake_server.behaviour.usage = False
    _, found = run(capsys, tmp_path, fake_server, *random_lengths(2, 5, 9), "--random-vocab-size", "100")
    assert found["input_lens"] == [5, 5]
    assert found["output_lens"] == [2, 2]


def test_warm_ups_read_backwards(capsys: Any, tmp_path: Path, fake_server: Any, workload: Path) -> None:
    words = ["--dataset-path", str(workload), "--num-warmups", "6"]
    _, found = run(capsys, tmp_path, fake_server, *words)
    asked = [body["prompt"] for _, body in fake_server.behaviour.asked]
    requests = [request["prompt_ids"] for request in json.loads(workload.read_text())]
    backwards = [ids[::-1] for ids in requests]
    assert sorted(asked[:6]) == sorted([*backwards, *backwards[:2]])
    assert sorted(asked[6:]) == sorted(requests)
    assert found["completed"] == 4


def test_texts_are_tokenized_by_the_server(capsys: Any, tmp_path: Path, fake_server: Any) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [("a" * 10, "b" * 20), ("c" * 30, "d" * 8)]
    path.write_text(json.dumps([{"conversations": [{"value": v} for v in pair]} for pair in turns]))
    words = ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--ignore-eos"]
    _, found = run(capsys, tmp_path, fake_server, *words)
    assert sorted(zip(found["input_lens"], found["output_lens"], strict=True)) == [(10, 20), (30, 8)]


def test_made_up_prompts_are_of_ids_that_stand_for_text(
    capsys: Any, tmp_path: Path, fake_server: Any
) -> None:
    run(capsys, tmp_path, fake_server, *random_lengths(5, 200, 1))
    used = {token for _, body in fake_server.behaviour.asked for token in body["prompt"]}
    assert used == {ord(" "), *range(ord("a"), ord("z") + 1)}
    fake_server.behaviour.asked.clear()
    run(capsys, tmp_path, fake_server, *random_lengths(5, 200, 1), "--random-vocab-size", "7")
    assert {token for _, body in fake_server.behaviour.asked for token in body["prompt"]} == set(range(7))


def test_an_api_key(capsys: Any, fake_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server.behaviour.api_key = "secret"
    words = ["--base-url", f"{fake_server.url}/v1/", *random_lengths(2, 5, 2)]
    assert "/v1/models: HTTP 401" in call(capsys, *words, code=2)
    call(capsys, *words, "--api-key", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    call(capsys, *words, "--backend", "vllm")
    assert len(fake_server.behaviour.asked) == 4


# What goes wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("refuse", "HTTP 503: "),
        ("error", "the stream carries an error: {'message': 'the engine is gone'"),
        ("cut", "the stream ended without [DONE]"),
    ],
)
def test_requests_that_fail_are_told(
    capsys: Any, tmp_path: Path, fake_server: Any, workload: Path, fault: str, text: str
) -> None:
    fake_server.behaviour.fault = lambda body: fault if len(body["prompt"]) == 7 else ""
    words = ["--dataset-path", str(workload), "--ignore-eos"]
    said, found = run(capsys, tmp_path, fake_server, *words)
    assert (found["completed"], found["failed"]) == (3, 1)
    assert found["output_lens"] == [16, 0, 7, 1]
    assert found["errors"][1].startswith(text)
    assert f"1 requests failed, and are in no other figure; the first:\n  {text}" in said
    fake_server.behaviour.fault = lambda body: fault
    said = call(capsys, "--base-url", fake_server.url, *words, code=1)
    assert said.startswith(f"error: all 4 requests failed, so there is no figure; the first: {text}")
    said = call(capsys, "--base-url", fake_server.url, *words, "--num-warmups", "1", code=1)
    assert said.startswith(f"error: 1 of 1 warm-ups failed; the first: {text}")


def test_a_server_that_is_not_there(capsys: Any) -> None:
    with socket.socket() as taken:  # bound so that nobody else gets the port meanwhile; nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        words = ["--base-url", url, "--random-vocab-size", "9", *random_lengths(2, 5, 2)]
        assert "Connection refused; is the server running? (--base-url names another)" in call(
            capsys, *words, code=2
        )
        assert "all 2 requests failed" in call(capsys, *words, "--model", "fake", code=1)


def test_what_would_end_early_is_refused(capsys: Any, fake_server: Any) -> None:
    fake_server.behaviour.max_model_len = 40
    err = call(capsys, "--base-url", fake_server.url, *random_lengths(2, 30, 20), code=2)
    assert "request 0 has 30 prompt and 20 output tokens, 50 together, and max_model_len is 40" in err
    assert not fake_server.behaviour.asked


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("--backend", "openai-chats"),
            "--backend must be one of openai, vllm, openai-chat, got 'openai-chats'",
        ),
        (
            ("--base-url", "localhost:8000"),
            "--base-url must begin with http:// or https://, got 'localhost:8000'",
        ),
        (("--request-rate", "0"), "--request-rate must be above 0, or inf, got 0"),
        (("--burstiness", "nan"), "--burstiness must be above 0, or inf, got nan"),
        (("--goodput", "ttft"), "--goodput takes NAME:MILLISECONDS"),
        (("--goodput", "itl:3"), "got 'itl:3'"),
        (("ttft:3",), "'ttft:3' belongs to no flag"),
        (("--percentile-metrics", "ttft,tpott"), "got 'tpott' (did you mean 'tpot'?)"),
        (("--metric-percentiles", "50,101"), "numbers from 0 to 100, with commas between, such as 50,99"),
        (("--output-json", "nowhere/x.json"), "--output-json nowhere/x.json cannot be written"),
        (("--plot", "nowhere/x.png"), "--plot nowhere/x.png cannot be written"),
        (("--plot", "x.jpeg"), "--plot x.jpeg must end with .png or .svg or .pdf"),
        (("--save-result", "--result-dir", "nowhere"), "--result-dir nowhere must be a folder that exists"),
        (("--save-detailed",), "--save-detailed needs --output-json FILE or --save-result"),
        (("--dataset-name", "radom"), "must be one of workload, sharegpt, random, prefix_repetition"),
    ],
)
def test_wrong_calls_end_before_anything_is_sent(capsys: Any, words: tuple[str, ...], text: str) -> None:
    err = call(capsys, "--port", "9", *words, code=2)
    assert text in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("package", "words"), [("aiohttp", ()), ("matplotlib", ("--plot", "x.png"))])
def test_a_package_that_is_not_there(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, package: str, words: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    err = call(capsys, "--port", "9", *words, code=2)
    assert f"needs the package {package}, which is not installed: pip install 'headrace[bench]'" in err


def test_help_imports_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "aiohttp", "matplotlib", "tokenizers", "tqdm")
    code = (
        "import sys\n"
        "from headrace.cli import main\n"
        "try: main(['bench', 'serve', '--help'])\n"
        f"finally: print(*(m for m in {heavy} if m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.split() == []
    assert "--request-rate" in done.stdout


# Files -----------------------------------------------------------------------------------------------


def test_files(capsys: Any, tmp_path: Path, fake_server: Any) -> None:
    words = [
        "--base-url",
        fake_server.url,
        "--save-result",
        "--result-dir",
        str(tmp_path),
        "--max-concurrency",
        "2",
    ]
    call(capsys, *words, *random_lengths(3, 5, 4), "--plot", str(tmp_path / "run.png"))
    (saved,) = tmp_path.glob("openai-infqps-concurrency2-fake-*.json")
    found = json.loads(saved.read_text())
    assert set(found) >= VLLM
    assert not DETAILS & set(found)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


# The parts -------------------------------------------------------------------------------------------


def token(text: str, **rest: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **rest}


EVENTS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    token("a"),
    token('"choices":[] "role": "delta":{} data: [DONE]\n\n'),
    token("role", usage=None),
    token("", logprobs=None),
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "é🙂"}}], "usage": None},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6}},
]


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_events_wherever_they_are_cut(compact: bool, line_end: str) -> None:
    separators = (",", ":") if compact else None
    events = [f"data: {json.dumps(e, separators=separators, ensure_ascii=compact)}" for e in EVENTS]
    events.insert(2, f": ping{line_end}event: token{line_end}{events.pop(2)}")
    stream = "".join(f"{event}{line_end * 2}" for event in [*events, ": bye", "data: [DONE]"]).encode()
    for size in (1, 2, 3, 7, 50, 10_000):
        answer = Answer(start_time=10.0, queue_time=0.0, prompt_tokens=1)
        reader = EventReader(answer, keep_chunks=True)
        for place in range(0, len(stream), size):
            reader.feed(stream[place : place + size], 11.0 + place)
        assert reader.done
        assert (answer.prompt_tokens, answer.output_tokens, answer.error) == (3, 6, "")
        assert answer.text == 'a"choices":[] "role": "delta":{} data: [DONE]\n\nroleé🙂'
        assert len(answer.times) == 5
        assert answer.ttft == answer.times[0] - 10.0
        assert answer.latency == pytest.approx(answer.ttft + sum(answer.itls))


def test_arrivals() -> None:
    assert arrival_times(3, float("inf")) == [0.0, 0.0, 0.0]
    assert arrival_times(4, 8.0, burstiness=float("inf")) == [0.125, 0.25, 0.375, 0.5]
    spread = []
    for burstiness in (0.25, 1.0, 16.0):
        times = arrival_times(4000, 20.0, burstiness=burstiness, seed=1)
        assert times == sorted(times) == arrival_times(4000, 20.0, burstiness=burstiness, seed=1)
        assert times != arrival_times(4000, 20.0, burstiness=burstiness, seed=2)
        assert times[-1] == pytest.approx(200.0)
        gaps = np.diff(times)
        spread.append(statistics.pstdev(gaps) / gaps.mean())
    # Of a gamma distribution it is the root of 1 / shape.
    assert spread == pytest.approx([2.0, 1.0, 0.25], rel=0.1)


def test_a_server_that_answers_otherwise(fake_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.bench.remote import Server

    server = Server(fake_server.url)
    assert server.model() == ("fake", 100_000)
    assert server.decode("fake", server.encode("fake", "Grüße")) == "Grüße"
    with pytest.raises(ConfigError, match="/v1/models: a JSON object was expected, got 7"):
        monkeypatch.setattr("headrace.bench.remote.json.load", lambda response: 7)
        server.model()
    with pytest.raises(ConfigError, match="names no model; name one with --model"):
        monkeypatch.setattr("headrace.bench.remote.json.load", lambda response: {"data": []})
        server.model()
    with pytest.raises(ConfigError, match="/tokenize answered without tokens"):
        server.encode("fake", "x")
