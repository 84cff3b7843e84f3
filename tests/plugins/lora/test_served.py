"""Adapters over HTTP, with two processes that speak it: by name, loaded and unloaded, bad ones refused."""

from __future__ import annotations

import http.client
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headrace.testing.serving import Server, serving

PROMPT = [(7 * i) % 131 for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, adapter: Callable[..., Path]) -> Path:
    """Where adapters may lie; beside it one that may not be loaded."""
    root = tmp_path_factory.mktemp("served")
    adapter(root / "outside", 4, seed=9)
    for name, rank in (("first", 4), ("second", 8), ("high", 65)):
        adapter(root / "in" / name, rank, seed=rank)
    adapter(root / "in" / "lacking", 4, seed=1)
    adapter(root / "in" / "renamed", 4, seed=1)
    adapter(root / "in" / "fitless", 4, seed=1)
    (root / "in" / "lacking" / "adapter_config.json").unlink()
    for name, change in (
        ("renamed", lambda key, value: (key.replace("q_proj", "query"), value)),
        ("fitless", lambda key, value: (key, value[..., :-1].contiguous() if "lora_A" in key else value)),
    ):
        file = root / "in" / name / "adapter_model.safetensors"
        save_file(dict(change(key, value) for key, value in load_file(file).items()), file)
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, base: Any, folder: Path) -> Iterator[Server]:
    flags = [
        "--dtype=float32",
        "--served-model-name=base",
        f"--lora-modules={json.dumps({'given': str(folder / 'in' / 'first')})}",
        f"--lora-folder={folder / 'drop'}",
        "--enable-lora-loading",
        f'--lora-roots=["{folder / "in"}", "{folder / "drop"}"]',
        "--api-server-count=2",
        "--max-loras=2",
    ]
    with serving(tmp_path_factory.mktemp("log"), *flags, model=str(base.folder)) as server:
        yield server


def ids(server: Server, model: str, max_tokens: int = 8) -> list[int]:
    status, answer = server.complete(
        model=model, prompt=PROMPT, max_tokens=max_tokens, ignore_eos=True, return_token_ids=True
    )
    assert status == 200, answer
    assert answer["model"] == model
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def load(server: Server, name: str, path: Path | str, **more: Any) -> tuple[int, Any]:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})


def unload(server: Server, name: str) -> tuple[int, Any]:
    return server.post("/v1/unload_lora_adapter", {"lora_name": name})


def models(server: Server) -> dict[str, Any]:
    return listed(server.get("/v1/models")[1])


def listed(answer: Any) -> dict[str, Any]:
    return {model["id"]: model for model in answer["data"]}


def models_of_one(server: Server) -> tuple[int | None, dict[str, Any]]:
    """The process that answered, and what it knows; None: it closed the connection before it was looked for."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", "/v1/models")
        found = listed(json.loads(connection.getresponse().read()))
        own = connection.sock.getsockname()
        for process in server.children("api"):
            if own in [tuple(one.raddr) for one in process.net_connections("tcp")]:
                return process.pid, found
        return None, found
    finally:
        connection.close()


def everywhere(server: Server, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Both processes are told on their own time, milliseconds after the answer: wait until each has said so."""
    told: set[int | None] = set()

    def all_told() -> bool:
        process, found = models_of_one(server)
        if holds(found):
            told.add(process)
        return told >= {process.pid for process in server.children("api")}

    server.wait_until(all_told, 60)


def alive(server: Server) -> None:
    assert len(ids(server, "base")) == 8


def test_adapters_are_listed_beneath_the_model(server: Server, folder: Path) -> None:
    found = models(server)["given"]
    assert found["parent"] == "base"
    assert found["root"] == str(folder / "in" / "first")
    assert models(server)["base"]["parent"] is None
    assert server.get("/v1/models/given")[1]["id"] == "given"
    assert ids(server, "given") != ids(server, "base")


def test_the_field_lora_names_one_too(server: Server) -> None:
    status, answer = server.complete(
        prompt=PROMPT, max_tokens=8, ignore_eos=True, return_token_ids=True, lora="given"
    )
    assert status == 200
    assert answer["choices"][0]["token_ids"] == ids(server, "given")
    status, answer = server.complete(prompt=PROMPT, lora="ghost")
    assert status == 400
    assert answer["error"]["param"] == "lora"
    status, answer = server.complete(model="given", prompt=PROMPT, use_beam_search=True, n=2)
    assert status == 400
    assert "lora does not go with use_beam_search" in answer["error"]["message"]


def test_an_adapter_comes_is_replaced_and_goes(server: Server, folder: Path) -> None:
    assert load(server, "x", folder / "in" / "first") == (
        200,
        "Success: LoRA adapter 'x' added successfully.",
    )
    everywhere(server, lambda known: "x" in known)
    first = ids(server, "x")
    assert first == ids(server, "given")
    status, answer = load(server, "x", folder / "in" / "second")
    assert status == 400
    assert "loaded already" in answer["error"]["message"]
    assert load(server, "x", folder / "in" / "second", load_inplace=True)[0] == 200
    everywhere(server, lambda known: known["x"]["root"].endswith("second"))
    assert ids(server, "x") != first
    assert unload(server, "x") == (200, "Success: LoRA adapter 'x' removed successfully.")
    everywhere(server, lambda known: "x" not in known)
    for name in ("x", "ghost"):
        assert server.complete(model=name, prompt=PROMPT)[0] == 404
        assert unload(server, name)[0] == 404
    alive(server)


def test_bad_adapters_are_refused_and_not_listed(server: Server, folder: Path) -> None:
    inside = folder / "in"
    for path, status, message in (
        (inside / "high", 400, "65 is above the largest rank allowed, 64"),
        (inside / "fitless", 400, "lora_A of module 'model.layers.0."),
        (inside / "renamed", 400, "self_attn.query', which this model does not have"),
        (inside / "nowhere", 404, "there is no such folder"),
        (inside / "lacking", 400, "it has no adapter_config.json"),
        (folder / "outside", 400, "is outside of the folders that are allowed"),
        ("/etc", 400, "is outside of the folders that are allowed"),
    ):
        got, answer = load(server, "bad", path)
        assert (got, message in answer["error"]["message"]) == (status, True), answer
    assert load(server, "base", inside / "first")[0] == 400
    bodies: list[Any] = [{}, [], {"lora_name": "x"}, {"lora_name": 1, "lora_path": "x"}, b"{"]
    for body in bodies:
        assert server.post("/v1/load_lora_adapter", body)[0] == 400
    assert load(server, "bad", inside / "first", load_inplace="yes")[0] == 400
    assert "bad" not in models(server)
    alive(server)


def test_a_folder_dropped_there_can_be_asked_for(server: Server, folder: Path) -> None:
    assert server.complete(model="dropped", prompt=PROMPT)[0] == 404
    shutil.copytree(folder / "in" / "second", folder / "drop" / "dropped")
    assert ids(server, "dropped") != ids(server, "base")
    everywhere(server, lambda known: "dropped" in known)
    assert server.complete(model="../in/second", prompt=PROMPT)[0] == 404


def test_streams_go_on_while_adapters_come_and_go(server: Server, folder: Path) -> None:
    names = ["given", "base"] * 3
    expected = {name: ids(server, name, 200) for name in set(names)}
    opened = [
        server.begin(model=name, prompt=PROMPT, max_tokens=200, ignore_eos=True, return_token_ids=True)
        for name in names
    ]
    loads = 0
    while loads < 2 or any(one.thread.is_alive() for one in opened):
        assert load(server, "hot", folder / "in" / "second", load_inplace=True)[0] == 200
        loads += 1
        time.sleep(0.01)
    for name, one in zip(names, opened, strict=True):
        assert json.loads(one.wait().body)["choices"][0]["token_ids"] == expected[name]
