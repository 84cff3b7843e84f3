"""A newcomer copies what README and the pages in docs/ show, and it works."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.testing.serving import serving

PAGES = (
    "docs/batch.md",
    "docs/cpu.md",
    "docs/lora.md",
    "docs/metrics.md",
    "docs/performance.md",
    "docs/plugins.md",
    "docs/quantization.md",
    "docs/sampling.md",
    "docs/scheduling.md",
    "docs/serving.md",
    "docs/speculative.md",
    "docs/structured.md",
    "docs/tools.md",
)
"""Pages whose Python blocks are run, as one script each; a block that begins with `# NAME.py` is that file."""

SERVE = "headrace serve "
"""The one command that does not end by itself."""


def blocks(root: Path, language: str, page: str = "README.md") -> list[str]:
    """Return a page's fenced blocks of a language."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", (root / page).read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found


def commands(root: Path) -> list[str]:
    """Return README's calls of `headrace`."""
    lines = "\n".join(blocks(root, "sh")).splitlines()
    called = [line.removeprefix(".venv/bin/") for line in lines if line.startswith(".venv/bin/headrace ")]
    return [command for command in called if not command.startswith(SERVE)]


def run(command: list[str], folder: Path) -> str:
    """Run a command in a folder, from this environment; return its standard output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_make_target_named_in_a_page_exists(root):
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"):
        named = re.findall(r"(?:^|`)make ([a-z-]+)", (root / page).read_text(), re.MULTILINE)
        assert set(named) <= targets, page


def test_every_file_linked_in_a_page_exists(root):
    for page in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", *PAGES):
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (root / page).read_text())
        assert not [link for link in links if not ((root / page).parent / link).exists()], page


@pytest.mark.weights
@pytest.mark.slow
def test_the_python_examples_run_as_one_plain_script(root, tmp_path):
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks(root, "python")))
    output = run([sys.executable, str(script)], tmp_path)
    assert len(output.splitlines()) >= 4


@pytest.mark.weights
@pytest.mark.slow
def test_the_commands_run(root, tmp_path):
    (tmp_path / "engine.yaml").write_text("\n".join(blocks(root, "yaml")))
    shown = commands(root)
    assert len(shown) >= 5
    for command in shown:
        assert run(shlex.split(command), tmp_path).strip(), command


@pytest.mark.weights
def test_the_server_of_readme_answers_the_curl_below_it(root, tmp_path):
    text = (root / "README.md").read_text()
    assert f".venv/bin/{SERVE}smollm2 --port 8000\n" in text
    [body] = re.findall(r"-d '(\{.*\})'", text)
    with serving(tmp_path) as server:
        status, answer = server.post("/v1/chat/completions", json.loads(body))
        assert status == 200
        assert answer["choices"][0]["message"]["content"]


def test_all_pages_are_listed(root):
    assert sorted(PAGES) == sorted(f"docs/{path.name}" for path in (root / "docs").glob("*.md"))


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_python_examples_of_a_page_run(root, tmp_path, page):
    script = []
    for block in blocks(root, "python", page):
        name = re.match(r"# (\w+\.py)\n", block)
        if name:
            (tmp_path / name[1]).write_text(block)
        else:
            script.append(block)
    (tmp_path / "page.py").write_text("\n".join(script))
    run([sys.executable, "page.py"], tmp_path)
