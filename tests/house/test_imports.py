"""What imports what at run time, each module in a process of its own.

One interpreter loads the big packages of others once and is forked for every module, so that modules of ours meet
in no process but each costs milliseconds.
"""

from __future__ import annotations

import json
import subprocess
import sys

PROLOGUE = """
import importlib, importlib.abc, json, os, sys, traceback
import msgspec, packaging.specifiers, pluggy, pydantic

class Block(importlib.abc.MetaPathFinder):
    def __init__(self, names):
        self.names = names
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names or ".".join(name.split(".")[:2]) in self.names:
            raise ImportError(f"{name} is blocked here")

def each(names, check):
    failed, running = [], {}

    def wait():
        pid, status = os.wait()
        name = running.pop(pid)
        if status:
            failed.append(name)

    for name in names:
        if len(running) == os.cpu_count():
            wait()
        pid = os.fork()
        if pid == 0:
            try:
                check(importlib.import_module(name))
            except BaseException:
                sys.stderr.write(f"--- {name}\\n{traceback.format_exc(limit=-3)}")
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        running[pid] = name
    while running:
        wait()
    print(json.dumps({"tried": len(names), "failed": sorted(failed)}))
"""

ALONE = """
import filelock, jinja2, numpy, psutil, pytest, rich.console, tokenizers, torch, tqdm, typer, yaml
assert not [name for name in sys.modules if name.split(".")[0] == "headrace"]

def exports_are_there(module):
    for name in getattr(module, "__all__", ()):
        getattr(module, name)

each(NAMES, exports_are_there)
"""

CORE = """
sys.meta_path.insert(0, Block({"torch", "numpy", "yaml", "headrace.backends", "headrace.models",
                               "headrace.executors", "headrace.plugins"}))
each(NAMES, lambda module: None)
"""

ENTRIES = """
from headrace.core.plugin.registry import Registrar, Registry

def registers_nothing_heavy(module):
    register = getattr(module, "headrace_register", None)
    if register is not None:
        options = getattr(module, "Options", lambda: None)()
        register(Registrar(Registry(), module.__name__), options)
    loaded = {"torch", "triton"} & set(sys.modules)
    assert not loaded, f"loaded by importing or registering: {loaded}"

each(NAMES, registers_nothing_heavy)
"""


def run(script: str, names: list[str]) -> None:
    """Run a script for modules; fail with its report where it fails for one."""
    code = f"{PROLOGUE}\nNAMES = {names!r}\n{script}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"tried": len(names), "failed": []}, done.stderr


def test_every_module_imports_alone(sources):
    run(ALONE, [source.module for source in sources if not source.module.endswith("__main__")])


def test_core_imports_without_torch_numpy_and_the_other_rooms(sources):
    run(CORE, [source.module for source in sources if source.room == "core"])


def test_the_block_holds():
    run(CORE.replace("each(", "importlib.import_module('json'); each("), [])
    done = subprocess.run(
        [sys.executable, "-c", f"{PROLOGUE}\nNAMES = ['numpy', 'headrace.models']\n{CORE}"],
        text=True,
        capture_output=True,
    )
    assert json.loads(done.stdout)["failed"] == ["headrace.models", "numpy"]


def test_loading_and_registering_plugins_imports_neither_torch_nor_triton(sources):
    """Entries are files of `plugins/`, packages in it, and modules called `plugin` in any room."""
    entries = [
        source.module
        for source in sources
        if source.path.name == "plugin.py"
        or (source.room == "plugins" and len(source.module.split(".")) <= 3)
    ]
    run(ENTRIES, entries)
