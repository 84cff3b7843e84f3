"""`headrace pull` and `headrace models`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.models.sources.aliases import ALIASES
from headrace.progress import download_progress


def call(capsys: Any, *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as exit:
        main(words)
    assert (exit.value.code or 0) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "250")
    return tmp_path


def test_aliases_and_what_is_cached(cache: Path, capsys: Any) -> None:
    (row,) = json.loads(call(capsys, "models", "--json"))
    assert (row["name"], row["cached"], row["path"]) == ("smollm2", False, None)
    assert (row["size"], row["licence"]) == (98_362_432, "Apache-2.0")

    alias = ALIASES["smollm2"]
    requirement, _, member = alias.reference.removeprefix("pypi:").partition("/")
    files = cache / "models" / "pypi" / requirement
    for place in (
        files / f"sha256-{alias.sha256}" / member,
        files / "unpinned" / "other.gguf",
        files / ".lock",
    ):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"12345")
    partial = files / "unpinned" / ".partial-x" / "half.gguf"
    partial.parent.mkdir()
    partial.write_bytes(b"1")
    ours, other = json.loads(call(capsys, "models", "--json"))
    assert ours["cached"]
    assert ours["path"].endswith(member)
    assert (other["name"], other["size"]) == (f"pypi:{requirement}/other.gguf", 5)
    text = call(capsys, "models")
    assert "smollm2" in text
    assert other["name"] in text
    assert str(cache) in text


def test_a_listed_name_is_found_without_fetching(cache: Path, capsys: Any) -> None:
    place = cache / "models" / "pypi" / "none==1" / ("sha256-" + "a" * 64) / "folder" / "a.gguf"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"1")
    name = json.loads(call(capsys, "models", "--json"))[1]["name"]
    assert call(capsys, "pull", name) == f"{place}\n"


def test_pull_of_nothing(cache: Path, capsys: Any) -> None:
    assert "no model is called 'smollm'" in call(capsys, "pull", "smollm", code=1)


@pytest.mark.weights
def test_second_pull_is_immediate(smollm2_path: Path, capsys: Any) -> None:
    begun = time.perf_counter()
    assert call(capsys, "pull", "smollm2") == f"{smollm2_path}\n"
    assert time.perf_counter() - begun < 1


def test_progress_without_a_terminal_is_a_line_each(capsys: Any) -> None:
    with download_progress() as progress:
        for done in (0, 10, 5, 20):
            progress("downloading x", done, 0)
        progress("reading x", 20, 20)
    assert capsys.readouterr().err == "downloading x\nreading x\n"
