"""The example package: built as a wheel, installed in a fresh environment, proved, listed and used there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "plugins" / "headrace-blockwise-attention"

GENERATE = """
import json, sys
from headrace import LLM, SamplingParams
llm = LLM("smollm2", dtype="float32", max_model_len=256, attention_backend=sys.argv[1])
prompts = ["The capital of France is", "One, two, three,"]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
print(json.dumps([output.outputs[0].token_ids for output in outputs]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel and, by a `.pth`, what development has."""
    folder = tmp_path_factory.mktemp("example")
    # Built from a copy: setuptools leaves folders beside pyproject.toml.
    copy = folder / "source"
    for path in SOURCE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix in (".py", ".toml", ".md"):
            target = copy / path.relative_to(SOURCE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    wheels = folder / "wheels"
    offline = ["--disable-pip-version-check", "--no-deps", "--no-index"]
    run(sys.executable, "-m", "pip", "wheel", *offline, "--no-build-isolation", "-w", wheels, copy)
    (wheel,) = wheels.glob("headrace_blockwise_attention-*.whl")
    home = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home)
    found = home / "bin" / "python"
    site = run(found, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # addsitedir, so that the editable install's own .pth is seen too.
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(site) / "development.pth").write_text(line, encoding="utf-8")
    run(sys.executable, "-m", "pip", "--python", found, "install", *offline, wheel)
    return found


def run(*command: object) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_conformance_kit_passes_there(python: Path) -> None:
    out = run(
        python,
        *(
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            SOURCE / "pyproject.toml",
            "--rootdir",
            SOURCE,
        ),
        *("-k", "random or windows or declarations or two_groups", SOURCE / "tests"),
    )
    assert "7 passed" in out


def test_it_is_installed_and_not_only_importable_from_source(python: Path) -> None:
    out = run(python, "-c", "import headrace_blockwise_attention as p; print(p.__file__)")
    assert Path(out.strip()).is_relative_to(python.parents[1])


def test_it_is_listed(python: Path) -> None:
    out = run(
        python,
        "-c",
        "import sys; sys.argv = ['headrace', 'plugins', 'list', '--json']; "
        "from headrace.cli import main; sys.exit(main())",
    )
    (found,) = (entry for entry in entries(json.loads(out)) if entry.get("name") == "blockwise_attention")
    assert "headrace-blockwise-attention" in json.dumps(found)


def entries(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a JSON value."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from entries(inner)


@pytest.mark.weights
def test_it_generates_what_torch_generates(python: Path) -> None:
    ids = {name: json.loads(run(python, "-c", GENERATE, name)) for name in ("torch", "blockwise")}
    assert all(len(tokens) > 0 for tokens in ids["torch"])
    assert ids["blockwise"] == ids["torch"]


def test_it_is_short_and_uses_public_names_only() -> None:
    files = list((SOURCE / "src").rglob("*.py"))
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) < 200
    imports = {line.split()[1] for line in lines if line.strip().startswith("from headrace")}
    assert imports <= {"headrace", "headrace.core.interfaces", "headrace_blockwise_attention.backend"}
