"""Spans of requests: what they say, whose children they are, and that a collector really gets them."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from headrace import LLM, SamplingParams
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.interfaces import EngineListener
from headrace.core.interfaces.build import CoreContext
from headrace.core.plugin.registry import Registry
from headrace.core.request import EngineRequest
from headrace.plugins.tracing import TracingSection, make_tracing, spans
from headrace.plugins.tracing.spans import RequestSpans
from headrace.testing.simulation import Simulation

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Traced:
    """A simulation whose spans are kept in memory."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.listener = RequestSpans(provider, model="tiny")
        self.sim = Simulation(listeners=[self.listener], **options)

    def add(self, name: str, *, age: float = 0.0, **params: Any) -> None:
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=[1, 2, 3, len(self.sim.requests)],
            params=SamplingParams(**{"max_tokens": 5} | params),
            arrival_time=time.time() - age,
        )
        self.sim.requests[name] = request
        self.sim.tokens[name] = []
        self.sim.engine.add(request)

    def spans(self) -> dict[str, ReadableSpan]:
        return {
            str((span.attributes or {})["gen_ai.request.id"]): span
            for span in self.exporter.get_finished_spans()
        }


def test_a_span_says_what_a_request_came_to() -> None:
    traced = Traced()
    traced.add("a", age=3, temperature=0.5, top_p=0.9)
    traced.sim.run()
    span = traced.spans()["a"]
    assert span.name == "llm_request"
    attributes = dict(span.attributes or {})
    latencies = {name: attributes.pop(name) for name in list(attributes) if ".latency." in name}
    assert attributes == {
        "gen_ai.request.id": "a",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.prompt_tokens": 4,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
    }
    seconds = {name.removeprefix("gen_ai.latency."): value for name, value in latencies.items()}
    assert 3 <= seconds["time_in_queue"] <= seconds["time_to_first_token"] <= seconds["e2e"] < 30
    assert seconds["time_in_queue"] + seconds["time_in_model_inference"] == pytest.approx(seconds["e2e"])
    assert seconds["time_in_model_prefill"] + seconds["time_in_model_decode"] == pytest.approx(
        seconds["time_in_model_inference"]
    )
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(seconds["e2e"], abs=1e-3)
    assert span.status.status_code is StatusCode.UNSET


def test_a_span_is_the_child_of_the_clients() -> None:
    traced = Traced()
    traced.add("child", traceparent=TRACEPARENT)
    for i, header in enumerate(("", "nonsense", f"00-{'0' * 32}-{PARENT}-01", "x" * 5000)):
        traced.add(f"root{i}", traceparent=header)
    traced.add("plain")
    traced.sim.run()
    spans = traced.spans()
    child = spans.pop("child")
    assert child.context is not None
    assert f"{child.context.trace_id:032x}" == TRACE
    assert child.parent is not None
    assert f"{child.parent.span_id:016x}" == PARENT
    traces = {span.context.trace_id for span in spans.values() if span.context is not None}
    assert len(traces) == len(spans) == 5
    assert all(span.parent is None for span in spans.values())


def test_requests_that_fail_or_never_run_have_spans_too() -> None:
    traced = Traced(max_num_seqs=1, raise_at=frozenset({2}))
    traced.add("fails", max_tokens=50)
    traced.add("waits")
    for _ in range(3):
        traced.sim.step()
        if traced.sim.num_steps == 1:
            traced.sim.abort("waits")
    traced.sim.run()
    spans = traced.spans()
    assert spans["fails"].status.status_code is StatusCode.ERROR
    waited = spans["waits"].attributes or {}
    assert waited["gen_ai.response.finish_reasons"] == ("abort",)
    assert waited["gen_ai.latency.time_in_queue"] == waited["gen_ai.latency.e2e"]
    assert "gen_ai.latency.time_to_first_token" not in waited
    assert "gen_ai.latency.time_in_model_inference" not in waited
    assert not traced.listener._before_first
    assert not traced.listener._first_token


def test_no_token_is_in_a_span() -> None:
    traced = Traced()
    traced.add("a", stop_token_ids=[424242])
    traced.sim.run()
    span = traced.spans()["a"]
    # Times and random ids may spell any number, so tokens are looked for in what was written down.
    tokens = {*traced.sim.tokens["a"]} - {*traced.sim.requests["a"].prompt_token_ids}
    assert tokens
    for name, value in (span.attributes or {}).items():
        if ".latency." not in name:
            words = {*re.findall(r"\d+", str(value))}
            assert not words & {str(token) for token in (*tokens, 424242)}, name
    assert not span.events


# Whether, and where to ----------------------------------------------------------------------------------


def make(url: str | None) -> EngineListener:
    config = EngineConfig(model="tiny", sections={"tracing": TracingSection(otlp_traces_endpoint=url)})
    return make_tracing(CoreContext(config, Registry(), threading.Event().set))


def test_without_an_endpoint_nothing_listens() -> None:
    assert type(make(None)) is EngineListener


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://collector:4317", "", "http://"])
def test_an_endpoint_must_be_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint must be a URL that begins with http://"):
        make(url)


def test_without_opentelemetry_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headrace.plugins.tracing.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"run pip install 'headrace\[otel\]'") as caught:
        make("http://localhost:4318")
    assert caught.value.option == "otlp_traces_endpoint"


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.services: set[str] = set()
        self.spans: list[Span] = []
        self.came = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                message = ExportTraceServiceRequest()
                message.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                collector.take(self.path, message)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def take(self, path: str, message: ExportTraceServiceRequest) -> None:
        self.paths.add(path)
        for of_resource in message.resource_spans:
            names = {pair.key: pair.value.string_value for pair in of_resource.resource.attributes}
            self.services.add(names["service.name"])
            for scope in of_resource.scope_spans:
                with self.came:
                    self.spans += scope.spans
                    self.came.notify_all()

    def wait(self, count: int) -> None:
        """Until so many spans came."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.spans) >= count, 60)

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Callable[..., Path]) -> str:
    return str(tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.mark.parametrize(("engine_process", "path"), [(False, ""), (True, "/v1/traces"), (False, "/else")])
def test_a_collector_gets_the_spans_of_an_engine(
    tiny: str, collector: Collector, engine_process: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process what is left is sent when the engine ends, however slow the machine is just now; another
    process waits two seconds at most, so there spans are sent before."""
    monkeypatch.setattr(spans, "CLOSE_SECONDS", 60)
    if engine_process:
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    params = SamplingParams(max_tokens=4, n=2, seed=1, traceparent=TRACEPARENT)
    with LLM(
        tiny, otlp_traces_endpoint=collector.url + path, engine_process=engine_process, show_report=False
    ) as llm:
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
        llm.generate([[4, 5]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        if engine_process:
            collector.wait(3)
    assert collector.paths == {path or "/v1/traces"}
    assert collector.services == {"headrace"}
    assert [span.name for span in collector.spans] == ["llm_request"] * 3
    children = [span for span in collector.spans if span.trace_id.hex() == TRACE]
    assert [span.parent_span_id.hex() for span in children] == [PARENT] * 2
    (other,) = [span for span in collector.spans if span not in children]
    told = {pair.key: pair.value for pair in other.attributes}
    assert told["gen_ai.usage.completion_tokens"].int_value == 3
    assert told["gen_ai.latency.e2e"].double_value > 0


def still_sending() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "last-spans"]


def test_a_collector_that_is_gone_holds_nobody_up(
    tiny: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders: list[int] = []
    export = OTLPSpanExporter.export

    def noted(self: OTLPSpanExporter, batch: Any) -> Any:
        senders.append(threading.get_ident())
        return export(self, batch)

    monkeypatch.setattr(OTLPSpanExporter, "export", noted)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    with caplog.at_level(logging.CRITICAL, logger="opentelemetry"):
        with LLM(tiny, otlp_traces_endpoint="http://127.0.0.1:9", show_report=False) as llm:
            for _ in range(20):
                llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
        for thread in still_sending():  # what it logs is no business of the next test's
            thread.join(60)
    assert senders
    assert threading.get_ident() not in senders


def test_a_collector_that_does_not_answer_holds_no_end_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    class Deaf(SpanExporter):
        def export(self, batch: Any) -> SpanExportResult:
            answers.wait(60)
            return SpanExportResult.SUCCESS

    monkeypatch.setattr(spans, "CLOSE_SECONDS", 0.1)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Deaf()))
    listener = RequestSpans(provider, model="tiny")
    sim = Simulation(listeners=[listener])
    sim.add("a", [1, 2, 3])
    sim.run()
    listener.close()
    (sending,) = still_sending()
    answers.set()
    sending.join(60)
    assert not sending.is_alive()
