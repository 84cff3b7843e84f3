"""Kernels are compiled once, wherever that is possible, and errors say what to do where it is not."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from headrace.backends.cpu import build, build_kernels
from headrace.backends.cpu.build import KernelBuildError, load_kernels
from headrace.backends.cpu.compiler import Compiler, compile_shared, find_compiler
from headrace.backends.cpu.isa import AVX2, PORTABLE, TIERS, supported_tiers

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here"),
    pytest.mark.usefixtures("cache"),
]


def script(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start Python with a script, in an environment with changes."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def compiler_that_counts(folder: Path) -> tuple[Path, Path]:
    """Return a compiler that is the machine's own, slower, and the file where it notes each source."""
    log, wrapper = folder / "compiled", folder / "slow-g++"
    real = find_compiler()
    assert real is not None
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) echo x >> {log}; sleep 0.3;; esac\nexec {real.command[0]} "$@"\n'
    )
    wrapper.chmod(0o755)
    return wrapper, log


def test_a_kernel_computes(kernel):
    sources, headers = kernel
    library = load_kernels(build_kernels(sources, headers=headers))
    x, y = (ctypes.c_float * 3)(1, 2, 3), (ctypes.c_float * 3)(10, 10, 10)
    library.scale_add(x, y, ctypes.c_int64(3))
    assert list(y) == [12, 14, 16]


def test_the_second_time_nothing_is_compiled(kernel, cache, tmp_path, monkeypatch):
    sources, headers = kernel
    wrapper, log = compiler_that_counts(tmp_path)
    monkeypatch.setenv("CXX", str(wrapper))
    first = build_kernels(sources, headers=headers)
    assert build_kernels(sources, headers=headers) == first
    assert log.read_text().split() == ["x"] * 2
    assert cache in first.parents
    assert sorted(path.name for path in first.parent.iterdir()) == [".lock", "kernels.so"]


def test_compiling_is_told_and_a_warm_cache_is_silent(kernel):
    """By logging's own last resort, a line on standard error: nobody set up logging in this process."""
    code = """
        import sys
        from pathlib import Path
        from headrace.backends.cpu import build
        from headrace.backends.cpu.isa import PORTABLE
        *sources, header = map(Path, sys.argv[1:])
        build.kernel_sources, build.kernel_headers = lambda: sources, lambda: [header]
        build.build_kernels(sources, PORTABLE, headers=[header], name="mine")
        build.build_package_kernels(PORTABLE)
    """
    for told in (["kernels 'mine'", "native kernels"], []):
        process = script(code, *kernel[0], *kernel[1])
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert err.splitlines() == [f"compiling {what} for portable (once, some seconds)" for what in told]


def test_processes_that_start_at_once_compile_once_and_agree(kernel, tmp_path):
    sources, headers = kernel
    wrapper, log = compiler_that_counts(tmp_path)
    code = """
        import sys
        from pathlib import Path
        from headrace.backends.cpu import build_kernels
        *sources, header = map(Path, sys.argv[1:])
        path = build_kernels(sources, headers=[header])
        assert "torch" not in sys.modules
        print(path, len(path.read_bytes()))
    """
    processes = [script(code, *sources, *headers, CXX=str(wrapper)) for _ in range(4)]
    assert len({finished(process) for process in processes}) == 1
    assert log.read_text().split() == ["x"] * 2


def test_what_a_broken_off_build_left_is_cleared(kernel, monkeypatch, tmp_path):
    sources, headers = kernel
    path = build_kernels(sources, headers=headers)
    path.unlink()
    (path.parent / ".partial-old").mkdir()
    assert build_kernels(sources, headers=headers) == path
    assert not list(path.parent.glob(".partial-*"))


def test_whatever_changes_the_code_changes_the_key(kernel, tmp_path, monkeypatch):
    sources, headers = kernel
    paths = [build_kernels(sources, headers=headers), build_kernels(sources, PORTABLE, headers=headers)]
    headers[0].write_text("#define SCALE 3.0f\n")
    paths.append(build_kernels(sources, headers=headers))
    sources[1].write_text(sources[1].read_text() + "\n// changed\n")
    paths.append(build_kernels(sources, headers=headers))
    wrapper, _ = compiler_that_counts(tmp_path)
    monkeypatch.setenv("CXX", str(wrapper))
    paths.append(build_kernels(sources, headers=headers))
    monkeypatch.setattr("headrace.backends.cpu.compiler.COMMON_FLAGS", ("-O1", "-std=c++17", "-fPIC"))
    paths.append(build_kernels(sources, headers=headers))
    assert len(set(paths)) == len(paths)
    assert all(path.is_file() for path in paths)


def test_without_a_compiler_the_error_says_what_to_install_and_to_set(kernel, tmp_path, monkeypatch):
    sources, headers = kernel
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelBuildError) as error:
        build_kernels(sources, headers=headers)
    text = str(error.value)
    assert all(word in text for word in ("install g++", "CXX", "HEADRACE_KERNELS", "HEADRACE_CPU_ISA=torch"))
    assert "\n" not in text


def test_a_compiler_that_is_named_and_not_there_or_broken(kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    with pytest.raises(KernelBuildError, match="CXX is 'no-such-compiler', which is not there"):
        build_kernels(kernel[0])
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho licence expired >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(KernelBuildError, match="does not run: licence expired"):
        build_kernels(kernel[0])


def test_what_the_compiler_says_is_in_the_error_and_nothing_is_left(kernel, cache):
    sources, headers = kernel
    sources[0].write_text("int f( { }\n" + sources[0].read_text())
    with pytest.raises(KernelBuildError) as error:
        build_kernels(sources, headers=headers)
    text = str(error.value)
    assert "scale.cpp:1:" in text
    assert re.search(r"tier '\w+' failed \(exit status 1\)", text)
    assert "HEADRACE_CPU_ISA chooses a lower tier" in text
    assert not [path for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]


def test_long_output_of_the_compiler_is_cut(kernel):
    kernel[0][0].write_text("".join(f"int f{i}( {{ }}\n" for i in range(200)))
    with pytest.raises(KernelBuildError) as error:
        build_kernels(*kernel[:1], headers=kernel[1])
    assert len(str(error.value).splitlines()) <= 23


@pytest.mark.parametrize("place", ["below a file", "in a file system that cannot be written"])
def test_an_unwritable_cache_falls_to_a_temporary_folder(kernel, place, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache" if place == "below a file" else Path("/proc/headrace")
    monkeypatch.setenv("HEADRACE_CACHE", str(folder))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    with caplog.at_level(logging.WARNING, "headrace"):
        path = build_kernels(kernel[0], headers=kernel[1])
    assert path.is_relative_to(tmp_path / f"headrace-{os.getuid()}")
    assert (tmp_path / f"headrace-{os.getuid()}").stat().st_mode & 0o777 == 0o700
    assert f"the cache folder {folder} cannot be used" in caplog.text
    assert "set HEADRACE_CACHE" in caplog.text
    assert load_kernels(path).count_threads() >= 1
    assert build_kernels(kernel[0], headers=kernel[1]) == path


def test_a_temporary_folder_that_others_may_write_is_refused(kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", "/proc/headrace")
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"headrace-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(KernelBuildError, match="is not this user's alone"):
        build_kernels(kernel[0], headers=kernel[1])


def test_no_folder_at_all(kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", "/proc/headrace")
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: "/proc")
    with pytest.raises(KernelBuildError, match="neither the cache folder"):
        build_kernels(kernel[0], headers=kernel[1])


def test_prebuilt_kernels_need_no_compiler(kernel, tmp_path, monkeypatch):
    """Each folder in its turn; a change of the sources makes what is there useless."""
    sources, headers = kernel
    monkeypatch.setattr(build, "kernel_sources", lambda: sources)
    monkeypatch.setattr(build, "kernel_headers", lambda: headers)
    made = build.prebuild_kernels(PORTABLE, tmp_path / "image")
    assert made.is_relative_to(tmp_path / "image")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelBuildError, match="no C\\+\\+ compiler"):
        build.build_package_kernels(PORTABLE)
    monkeypatch.setenv("HEADRACE_KERNELS", str(tmp_path / "image"))
    assert build.build_package_kernels(PORTABLE) == made
    load_kernels(made)
    headers[0].write_text("#define SCALE 4.0f\n")
    with pytest.raises(KernelBuildError, match="no C\\+\\+ compiler"):
        build.build_package_kernels(PORTABLE)


def test_torch_and_no_sources_are_no_kernels(kernel, monkeypatch):
    monkeypatch.setenv("HEADRACE_CPU_ISA", "torch")
    with pytest.raises(KernelBuildError, match="asks for no native kernels"):
        build_kernels(kernel[0])
    with pytest.raises(KernelBuildError, match="no C\\+\\+ sources"):
        build_kernels([], PORTABLE)
    with pytest.raises(KernelBuildError, match=r"cannot be read: .*absent\.cpp"):
        build_kernels([Path("absent.cpp")], PORTABLE)


def test_the_packages_own_sources_are_found(tmp_path, monkeypatch):
    for name in ("b.cpp", "a.cpp", "a.h", "notes.txt"):
        (tmp_path / "csrc").mkdir(exist_ok=True)
        (tmp_path / "csrc" / name).write_text("")
    monkeypatch.setattr(build, "_HERE", tmp_path)
    assert [path.name for path in build.kernel_sources()] == ["a.cpp", "b.cpp"]
    assert [path.name for path in build.kernel_headers()] == ["a.h"]
    monkeypatch.setattr(build, "_HERE", tmp_path / "nothing")
    assert build.kernel_sources() == build.kernel_headers() == []


@pytest.mark.skipif(PORTABLE in supported_tiers()[:1], reason="the portable tier has no OpenMP")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_are_those_of_torchs_own_pool(kernel):
    """Two pools in one process fight for the cores."""
    code = """
        import sys
        from pathlib import Path
        from headrace.backends.cpu import build_kernels
        from headrace.backends.cpu.build import load_kernels
        *sources, header = map(Path, sys.argv[1:])
        kernels = load_kernels(build_kernels(sources, headers=[header]))
        import torch
        for wanted in (3, 1, 2):
            torch.set_num_threads(wanted)
            assert kernels.count_threads() == wanted
        maps = Path("/proc/self/maps").read_text().split()
        runtimes = {word for word in maps if word.startswith("/") and ("omp" in Path(word).name)}
        assert len(runtimes) == 1, runtimes
    """
    finished(script(code, *kernel[0], *kernel[1]))


def test_an_openmp_runtime_that_is_missing_is_named(kernel, tmp_path):
    (tmp_path / "foreign.cpp").write_text(
        'extern "C" void GOMP_of_the_future(); extern "C" void run() { GOMP_of_the_future(); }'
    )
    path = build_kernels([tmp_path / "foreign.cpp"], name="foreign")
    with pytest.raises(KernelBuildError, match=r"OpenMP runtime they need.*HEADRACE_CPU_ISA=torch"):
        load_kernels(path)


def test_a_damaged_object_is_an_error_that_says_how_to_go_on(kernel):
    path = build_kernels(kernel[0], headers=kernel[1])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(KernelBuildError, match="headrace cache clear --kernels"):
        load_kernels(path)


def test_clang_computes_on_one_thread_beside_gnus_runtime(kernel, tmp_path, caplog):
    """Clang calls LLVM's runtime, which torch's wheels do not load; the compiler here only says it is clang."""
    real = find_compiler()
    assert real is not None
    clang = Compiler(real.command, "clang version 17.0")
    assert "-fopenmp" not in clang.flags(AVX2)
    with caplog.at_level(logging.WARNING, "headrace"):
        path = compile_shared(clang, AVX2, *kernel, tmp_path, "kernels")
    assert "kernels compute on one thread; install g++" in caplog.text
    assert load_kernels(path).count_threads() == 1


@pytest.mark.parametrize("tier", supported_tiers(), ids=lambda tier: tier.name)
def test_every_tier_this_machine_can_run_runs_when_asked_for(kernel, tier):
    """Source: vllm-project/vllm#4542, #14701, #19494. A process of its own: an illegal instruction ends it."""
    code = """
        import ctypes, sys
        from pathlib import Path
        from headrace.backends.cpu import build_kernels
        from headrace.backends.cpu.build import load_kernels
        *sources, header = map(Path, sys.argv[1:])
        path = build_kernels(sources, headers=[header])
        x = (ctypes.c_float * 1001)(*range(1001)); y = (ctypes.c_float * 1001)()
        load_kernels(path).scale_add(x, y, ctypes.c_int64(1001))
        assert list(y) == [2.0 * i for i in range(1001)]
        print(path.parent.name.split("-")[0])
    """
    assert finished(script(code, *kernel[0], *kernel[1], HEADRACE_CPU_ISA=tier.name)) == tier.name


def test_flags_keep_the_order_of_sums():
    flags = {flag for tier in TIERS for flag in Compiler(("g++",), "g++ 12").flags(tier)}
    assert "-ffp-contract=off" in flags
    assert not flags & {"-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-march=native"}
    assert "-fopenmp" not in Compiler(("g++",), "g++ 12").flags(PORTABLE)
