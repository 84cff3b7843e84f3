"""`headrace kernels`, `headrace cache`, and what `headrace doctor` says of native kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.cpu import build
from headrace.backends.cpu.compiler import find_compiler
from headrace.backends.cpu.isa import TIERS, supported_tiers
from headrace.cli import kernels, main

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HEADRACE_CPU_ISA", "HEADRACE_KERNELS", "CXX", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def call(cache: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as exit:
            main(words)
        captured = capsys.readouterr()
        assert (exit.value.code or 0) == code, captured
        return captured.err if code else captured.out

    return call


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One small source in the place of the package's own."""
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "kernel_sources", lambda: [source])
    monkeypatch.setattr(build, "kernel_headers", list)
    monkeypatch.setattr(kernels, "PLUGINS", ())
    return source


@needs_compiler
def test_kernels_of_plugins_are_built_with_them(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.plugins.lora.kernels import KERNELS, kernel_sources

    tier = supported_tiers()[0]
    lines = call("kernels", "build", "--output", str(tmp_path / "image")).splitlines()
    assert [Path(line.split("\t")[1]).stem for line in lines] == ["headrace_cpu", KERNELS]
    monkeypatch.setenv("HEADRACE_KERNELS", str(tmp_path / "image"))
    monkeypatch.setenv("PATH", "")
    found = build.build_kernels(kernel_sources(), tier, name=KERNELS, headers=build.kernel_headers())
    assert str(found) in lines[1]


@needs_compiler
@pytest.mark.usefixtures("sources")
def test_build_takes_the_machines_best_tier_and_puts_it_into_the_cache(call: Any, cache: Path) -> None:
    assert "none yet" in call("kernels", "list")
    tier, path = call("kernels", "build").split()
    assert tier == supported_tiers()[0].name
    assert Path(path).is_relative_to(cache / "kernels")
    assert build.load_kernels(build.build_package_kernels()).one() == 1
    (row,) = json.loads(call("kernels", "list", "--json"))
    assert row == {
        "where": "cache",
        "tier": tier,
        "name": "headrace_cpu",
        "bytes": row["bytes"],
        "path": path,
    }
    assert row["bytes"] == Path(path).stat().st_size


@needs_compiler
@pytest.mark.usefixtures("sources")
def test_prebuilt_kernels_of_all_tiers_are_found_by_name_of_their_folder(
    call: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = call("kernels", "build", "--tier", "all", "--output", str(tmp_path / "image")).splitlines()
    assert [line.split("\t")[0] for line in lines] == [tier.name for tier in TIERS]
    monkeypatch.setenv("HEADRACE_KERNELS", str(tmp_path / "image"))
    monkeypatch.setenv("PATH", "")
    for tier in TIERS:
        assert str(build.build_package_kernels(tier)) in "".join(lines)
    assert not cache.exists()
    assert call("kernels", "list").count("prebuilt\t") == len(TIERS)


@needs_compiler
@pytest.mark.usefixtures("sources")
def test_tiers_may_be_named(call: Any) -> None:
    text = call("kernels", "build", "--tier", "portable", "--tier", "avx2", "--tier", "portable")
    assert [line.split("\t")[0] for line in text.splitlines()] == ["portable", "avx2"]
    assert "did you mean 'avx2'?" in call("kernels", "build", "--tier", "avx", code=2)


@pytest.mark.usefixtures("sources")
def test_build_says_what_is_wrong(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    if find_compiler() is not None:
        place = str(tmp_path / "file" / "x")
        assert "cannot be written" in call("kernels", "build", "--output", place, code=1)
    monkeypatch.setenv("HEADRACE_CPU_ISA", "torch")
    assert "name a --tier" in call("kernels", "build", code=1)
    monkeypatch.setenv("PATH", "")
    assert "install g++" in call("kernels", "build", "--tier", "portable", code=1)


def fill(cache: Path) -> None:
    for name, size in (
        ("models/pypi/a==1/sha256-0/a.gguf", 1000),
        ("models/pypi/.lock", 0),
        ("kernels/avx2-0-0/headrace_cpu.so", 30),
        ("kernels/avx2-0-0/.lock", 0),
        ("accepted/terms", 4),
    ):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(bytes(size))


def test_cache_list(call: Any, cache: Path) -> None:
    assert json.loads(call("cache", "list", "--json")) == {"folder": str(cache), "entries": []}
    fill(cache)
    assert json.loads(call("cache", "list", "--json"))["entries"] == [
        {"part": "models", "entry": "pypi/a==1", "bytes": 1000},
        {"part": "kernels", "entry": "avx2-0-0", "bytes": 30},
    ]
    text = call("cache", "list")
    assert "pypi/a==1" in text
    assert f"cache folder: {cache}" in text


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (["--kernels"], ["accepted", "models"]),
        (["--models"], ["accepted", "kernels"]),
        (["--models", "--kernels"], ["accepted"]),
    ],
)
def test_cache_clear_removes_what_is_named_and_nothing_else(
    call: Any, cache: Path, flags: list[str], left: list[str]
) -> None:
    fill(cache)
    assert call("cache", "clear", *flags).startswith("freed ")
    assert sorted(path.name for path in cache.iterdir()) == left
    assert "freed 0.0 MB" in call("cache", "clear", *flags)


def test_cache_clear_needs_to_be_told_what(call: Any, cache: Path) -> None:
    fill(cache)
    assert "--kernels, --models, or both" in call("cache", "clear", code=2)
    assert len(list(cache.iterdir())) == 3


def test_doctor_on_native_kernels(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads(call("doctor", "--json"))
    native = report["native"]
    assert native["tier"] == supported_tiers()[0].name
    for tier in TIERS:
        runs = native[f"tier {tier.name}"] == "can run here"
        assert runs == (tier in supported_tiers())
    assert report["machine"]["threads"] <= report["machine"]["cores_allowed"]
    assert "physical cores allowed" in report["machine"]["threads_why"]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HEADRACE_CPU_ISA", "sse9")
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    report = json.loads(call("doctor", "--json"))
    assert (report["native"]["compiler"], report["native"]["tier"]) == ("none", "none")
    for word in ("install g++", "HEADRACE_CPU_ISA is 'sse9'", "OMP_NUM_THREADS asks for 4096 threads"):
        assert any(word in line for line in report["advice"])


@needs_compiler
@pytest.mark.usefixtures("sources")
def test_doctor_asks_for_no_compiler_where_kernels_are_prebuilt(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("kernels", "build", "--tier", "portable", "--output", str(tmp_path))
    monkeypatch.setenv("HEADRACE_KERNELS", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    report = json.loads(call("doctor", "--json"))
    assert report["native"]["prebuilt"] == str(tmp_path)
    assert not any("compiler" in line for line in report["advice"])
