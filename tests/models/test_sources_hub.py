"""The hub source against a small server that speaks the hub's protocol, through the real client."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.errors import CheckpointError
from headrace.models.opening import resolve_model
from headrace.models.sources.hub import HubSource

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"x" * 1000,
    "pytorch_model.bin": b"not wanted",
    "consolidated.safetensors": b"not wanted",
    "original/model.safetensors": b"not wanted",
}
COMMIT = "a" * 40

RESOLVE = """
import sys
from headrace.core.errors import CheckpointError
from headrace.core.plugin.registry import Registrar, Registry
from headrace.models import plugin
from headrace.models.opening import resolve_model

registry = Registry()
plugin.headrace_register(Registrar(registry, plugin.name), None)
try:
    print(resolve_model(sys.argv[1], registry))
except CheckpointError as error:
    print("error:", error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """One repository, org/name; one behind terms, org/gated."""

    asked: list[str]

    def log_message(self, format: str, *args: object) -> None:
        type(self).asked.append(f"{self.command} {self.path}")

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/name/revision/gone"):
            self.refuse(404, "RevisionNotFound")
        elif path.startswith("/api/models/org/name/tree"):
            self.send(
                [{"type": "file", "oid": "0" * 40, "size": len(v), "path": k} for k, v in FILES.items()]
            )
        elif path.startswith("/api/models/org/name"):
            self.send({"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]})
        elif path.startswith("/org/broken/resolve/") and self.command == "GET":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x")  # and no more
        elif path.startswith("/api/models/org/broken/tree"):
            self.send([{"type": "file", "oid": "0" * 40, "size": 2, "path": "config.json"}])
        elif path.startswith("/api/models/org/broken"):
            self.send({"id": "org/broken", "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]})
        elif path.startswith("/org/broken/resolve/"):
            self.send(FILES["config.json"])
        elif path.startswith(("/org/failing/resolve/", "/api/models/org/failing")):
            self.refuse(500, "")
        elif path.startswith("/org/name/resolve/"):
            self.send(FILES[path.rpartition("/")[2]])
        elif "/org/gated" in path:
            self.refuse(403, "GatedRepo")
        else:
            self.refuse(404, "RepoNotFound")

    def send(self, content: object) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    handler = type("OneHub", (Hub,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.asked
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(name: str, endpoint: str, cache: Path) -> str:
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HEADRACE_CACHE": str(cache),
    }
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, name], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_repository_is_fetched_without_pickles_and_found_offline_afterwards(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    endpoint, asked = hub
    folder = Path(resolve("org/name", endpoint, tmp_path))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert tmp_path in folder.parents
    fetched = [line for line in asked if line.startswith("GET /org/name")]
    assert len(fetched) == 2
    assert Path(resolve("hf:org/name", endpoint, tmp_path)) == folder
    assert [line for line in asked if line.startswith("GET /org/name")] == fetched
    assert Path(resolve("org/name", "http://127.0.0.1:9", tmp_path)) == folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/none", "the hub has no model 'org/none'"),
        ("org/gated", "behind terms"),
        ("hf:org/name@gone", "no revision 'gone'"),
        ("org/broken", "could not be fetched from the hub"),
        ("org/failing", "500 Internal Server Error"),
    ],
)
def test_what_the_hub_refuses(hub: tuple[str, list[str]], tmp_path: Path, name: str, words: str) -> None:
    answer = resolve(name, hub[0], tmp_path)
    assert answer.startswith("error:")
    assert words in answer


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "no room left in .* for 'org/name'.*HEADRACE_CACHE",
        ),
        (PermissionError(errno.EACCES, "Permission denied"), "could not be fetched .*Permission denied"),
    ],
)
def test_a_disk_that_is_full_or_read_only(
    error: OSError, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is replaced by one that raises: no disk is filled."""
    import huggingface_hub

    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=words):
        HubSource().resolve("org/name")


def test_without_the_hub_and_without_a_copy(tmp_path: Path) -> None:
    assert "cannot be reached" in resolve("org/name", "http://127.0.0.1:9", tmp_path)


@pytest.mark.parametrize("reference", ["", "name", "a/b/c", "../x", "org/name@"])
def test_other_forms_are_refused(reference: str) -> None:
    with pytest.raises(CheckpointError, match="hf:ORG/NAME"):
        HubSource().resolve(reference)


def test_a_path_comes_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models_registry: object
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model("org/name", models_registry) == Path("org/name")  # type: ignore[arg-type]
