"""What is around the compute routes: models, tokens, keys, names of requests, pages elsewhere, plugins' routes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import openai
import pytest

import headrace
from headrace import AsyncLLM, SamplingParams
from headrace.core.errors import PluginLoadError
from headrace.server.app import build_app
from headrace.server.options import ServerSection

TEXTS = [
    "The river runs",
    " a  b\n\n\tc ",
    "źdźbło 🙂 漢字 ďábel",
    "<|im_start|>user",
    "🙂" * 700,
    "\x00\u2028 e\u0301",
]


@pytest.mark.weights
def test_models(server: Any) -> None:
    listed = server.ask("GET", "/v1/models").json
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert model.pop("created") > 1_700_000_000
    assert model == {
        "id": "smollm2",
        "object": "model",
        "owned_by": "headrace",
        "root": "smollm2",
        "parent": None,
        "max_model_len": server.engine.front.max_model_len,
    }
    assert server.ask("GET", "/v1/models/smollm2").json["id"] == "smollm2"
    client = server.client()
    assert [model.id for model in client.models.list()] == ["smollm2"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")


@pytest.mark.weights
def test_version_needs_nothing(server: Any) -> None:
    assert server.ask("GET", "/version").json == {"version": headrace.__version__}


@pytest.mark.weights
@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_tokens_go_there_and_back(server: Any, text: str) -> None:
    told = server.ask("POST", "/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == server.engine.front.max_model_len
    assert server.ask("POST", "/detokenize", {"tokens": told["tokens"]}).json == {"prompt": text}


@pytest.mark.weights
def test_tokenize_says_what_the_compute_routes_do(server: Any) -> None:
    for text in TEXTS[:4]:
        ids = server.ask("POST", "/tokenize", {"prompt": text}).json["tokens"]
        assert (
            server.complete(text, max_tokens=1, return_token_ids=True).json["choices"][0]["prompt_token_ids"]
            == ids
        )
    messages = [{"role": "user", "content": "hi"}]
    for body in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        ids = server.ask("POST", "/tokenize", {"messages": messages, **body}).json["tokens"]
        assert (
            server.chat(messages, max_tokens=1, return_token_ids=True, **body).json["prompt_token_ids"] == ids
        )
    assert server.ask("POST", "/tokenize", {"prompt": ""}).json["tokens"] == []
    strings = server.ask("POST", "/tokenize", {"prompt": "漢", "return_token_strs": True}).json["token_strs"]
    assert any(string.startswith("bytes:\\x") for string in strings)


@pytest.mark.weights
@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/tokenize", {}, "exactly one"),
        ("/tokenize", {"prompt": "a", "messages": []}, "exactly one"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "at least one"),
        ("/tokenize", {"messages": [{}]}, "role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]: -1"),
        ("/detokenize", {"tokens": [1, 49152]}, "49152"),
        ("/detokenize", {"tokens": [10**40]}, "10000"),
        ("/detokenize", {"tokens": [True]}, "tokens.0"),
        ("/detokenize", {"tokens": [1.0]}, "tokens.0"),
    ],
)
def test_bad_token_requests(server: Any, path: str, body: dict[str, Any], text: str) -> None:
    answer = server.ask("POST", path, body)
    assert answer.status == 400
    assert text in answer.error["message"]


@pytest.mark.weights
def test_every_route_that_computes_asks_for_a_key(server: Any) -> None:
    with server.variant(api_key=["first", "second-ä"]) as other:
        paths = [
            path
            for path, _ in other.ask("GET", "/openapi.json", Authorization="Bearer first")
            .json["paths"]
            .items()
        ]
        assert {"/v1/completions", "/v1/models", "/tokenize"} <= set(paths)
        for path in [*paths, "/v1/nope", "/docs", "/openapi.json", "//v1/models", "/health/../v1/models"]:
            for method in ("GET", "POST"):
                for headers in (
                    {},
                    {"Authorization": "Bearer"},
                    {"Authorization": "Bearer "},
                    {"Authorization": "Bearer wrong"},
                    {"Authorization": "Basic first"},
                    {"Authorization": "first"},
                    {"Authorization": "Bearer first second"},
                    {"X-Api-Key": "first"},
                ):
                    answer = other.ask(method, path, b"{}", **headers)
                    if path == "/version":
                        assert answer.status in (200, 405)
                        continue
                    assert answer.status == 401, (method, path, headers)
                    error = answer.error
                    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                    assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("first", "second-ä".encode().decode("latin-1")):
            for scheme in ("Bearer", "bearer"):
                assert other.ask("GET", "/v1/models", Authorization=f"{scheme} {key}").status == 200
        assert other.client("first").models.list().data
        with pytest.raises(openai.AuthenticationError, match="Bearer"):
            other.client("wrong").models.list()
        assert other.ask("GET", "/health").status == 404, "free, and not of this application"


@pytest.mark.weights
def test_a_proxy_may_serve_it_below_a_path(server: Any) -> None:
    """One that keeps the path, and one that strips it."""
    with server.variant(root_path="/llm", api_key=["key"]) as other:
        for path in ("/llm/v1/models", "/v1/models"):
            assert other.ask("GET", path).status == 401
            assert other.ask("GET", path, Authorization="Bearer key").status == 200
        for path in ("/llm/version", "/version"):
            assert other.ask("GET", path).status == 200
        for path in ("/llmversion", "/llm/llm/version"):
            assert other.ask("GET", path).status in (401, 404)


@pytest.mark.weights
def test_the_name_of_a_request_comes_back(server: Any) -> None:
    for path, body in (
        ("/v1/completions", b'{"prompt":"a","max_tokens":1}'),
        ("/nope", b"{}"),
        ("/tokenize", b""),
    ):
        assert server.ask("POST", path, body, X_Request_Id="my-1").headers["x-request-id"] == "my-1"
        assert "x-request-id" not in server.ask("POST", path, body).headers
    assert server.ask("GET", "/version", X_Request_Id="a" * 5000).headers["x-request-id"] == "a" * 128
    assert "x-request-id" not in server.ask("GET", "/version", X_Request_Id="\x07\xff").headers


@pytest.mark.weights
def test_a_line_a_request_holds_no_text(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with server.variant(log_requests=True) as other:
        body = {"prompt": ["secret word", "b"], "max_tokens": 3, "n": 2, "temperature": 1, "ignore_eos": True}
        answer = other.ask("POST", "/v1/completions", body, X_Request_Id="mine").json
        other.complete("a", max_tokens=2, stream=True, ignore_eos=True)
    [line, second] = [r.getMessage() for r in caplog.records if r.name == "headrace.server.request_log"]
    assert line.startswith(
        f"{answer['id']} (mine): 2 prompts with 3 tokens (0 cached), 4 answers with 12 tokens (length), "
    )
    assert "s in queue" in line
    assert line.endswith(" s in all")
    assert "1 prompts with 1 tokens (0 cached), 1 answers with 2 tokens (length)" in second
    assert "secret" not in caplog.text


@pytest.mark.weights
def test_pages_of_allowed_origins_may_ask(server: Any) -> None:
    asked = {"Origin": "https://a.example", "Access_Control_Request_Method": "POST"}
    assert server.ask("OPTIONS", "/v1/completions", **asked).status == 405
    with server.variant(cors_origins=["https://a.example"], api_key=["key"]) as other:
        answer = other.ask("OPTIONS", "/v1/completions", **asked)
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        answer = other.ask("POST", "/v1/completions", {}, Origin="https://a.example")
        assert answer.status == 401
        assert answer.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.weights
def test_answers_without_http(server: Any) -> None:
    app = build_app(server.engine, ServerSection())
    compute = app.state.compute
    status, answer = server.run(compute.answer("/v1/completions", {"prompt": "a", "max_tokens": 2, "zz": 1}))
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    status, answer = server.run(compute.answer("/v1/chat/completions", chat))
    assert (status, answer["object"]) == (200, "chat.completion")
    for url, body, expected in (
        ("/v1/completions", {"prompt": ""}, 400),
        ("/v1/completions", {"prompt": "a", "stream": True}, 400),
        ("/v1/completions", {"prompt": "a", "model": "no"}, 404),
        ("/v1/embeddings", {}, 404),
    ):
        status, answer = server.run(compute.answer(url, body))
        assert status == expected
        assert answer["error"]["message"]


class Routes:
    """A plugin with a route."""

    name = "greeter"
    headrace_api = ">=1,<2"

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    @headrace.hookimpl
    def headrace_register(self, registrar: Any) -> None:
        registrar.http_route("greet", self.add)

    def add(self, context: Any) -> None:
        if self.fails:
            raise KeyError("no such thing")

        @context.app.get("/v1/greet/{number}")
        async def greet(number: int) -> dict[str, Any]:
            return {
                "metrics": len(await context.engine.metrics()),
                "model": context.config.model,
                "number": number,
            }


def unstarted(*plugins: Any) -> headrace.AsyncLLM:
    """An engine that nobody started."""
    from headrace.configuration import start_configuration

    return headrace.AsyncLLM(start_configuration("smollm2", keywords={"plugins": list(plugins)}))


async def ask_app(app: Any, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Ask an application without a server."""
    sent: list[Any] = []
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def test_plugins_add_routes() -> None:
    async def check() -> None:
        app = build_app(unstarted(Routes()), ServerSection())
        assert "/v1/greet/{number}" in app.openapi()["paths"]
        status, body = await ask_app(app, "GET", "/v1/greet/x")
        assert (status, b'"param":"number"' in body) == (400, True)
        status, body = await ask_app(app, "GET", "/v1/greet/1")
        assert (status, b"still starting" in body) == (503, True)

    asyncio.run(check())


def test_a_plugin_whose_route_fails_is_named() -> None:
    with pytest.raises(PluginLoadError, match=r"plugin 'greeter'.*'greet': KeyError.*plugins.disable"):
        build_app(unstarted(Routes(fails=True)), ServerSection())


def test_without_an_engine_there_is_no_answer() -> None:
    async def check() -> None:
        app = build_app(unstarted(), ServerSection())
        for method, path in (
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/smollm2"),
        ):
            status, body = await ask_app(app, method, path, b"no json")
            assert status == 503, path
            assert b'"type":"service_unavailable_error"' in body
        assert (await ask_app(app, "GET", "/version"))[0] == 200
        status, _ = await app.state.compute.answer("/v1/completions", {"prompt": "a"})
        assert status == 503

    asyncio.run(check())


def test_the_description_holds_bodies_and_answers() -> None:
    app = build_app(unstarted(), ServerSection())
    document = app.openapi()
    schemas = document["components"]["schemas"]
    for path, body, answer in (
        ("/v1/completions", "CompletionBody", "Completion"),
        ("/v1/chat/completions", "ChatBody", "Chat"),
        ("/tokenize", "TokenizeBody", "Tokens"),
        ("/detokenize", "DetokenizeBody", "Text"),
    ):
        route = document["paths"][path]["post"]
        schema = route["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{body}"}
        schema = route["responses"]["200"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{answer}"}
        assert {body, answer} <= set(schemas)
        assert {"400", "503"} <= set(route["responses"])
    properties = schemas["CompletionBody"]["properties"]
    assert {"prompt", "echo", "temperature", "stop", "add_special_tokens"} <= set(properties)
    assert "messages" not in properties
    references = {
        word.split('"')[0] for word in str(document).replace("'", '"').split("#/components/schemas/")[1:]
    }
    assert references <= set(schemas)


def test_the_server_imports_no_torch() -> None:
    code = "import sys, headrace.server.app; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.weights
def test_a_trace_context_reaches_the_request(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    prepare = AsyncLLM.prepare

    async def noting(self: AsyncLLM, prompt: Any, params: SamplingParams, **rest: Any) -> Any:
        seen.append(params.options.get("traceparent"))
        return await prepare(self, prompt, params, **rest)

    monkeypatch.setattr(AsyncLLM, "prepare", noting)
    context = f"00-{'ab' * 16}-{'cd' * 8}-01"
    for header in (context, "00-xyz", ""):
        answer = server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, traceparent=header)
        assert answer.status == 200
    assert seen == [context, None, None]
