"""Registering the reference imports no torch; its parts are made when they are asked for."""

from __future__ import annotations

import subprocess
import sys

from headrace.backends.torch_reference import plugin
from headrace.core.interfaces import AttentionBackend, OpSet
from headrace.core.plugin.registry import Registrar, Registry


def test_registers_one_backend_and_one_op_set() -> None:
    registry = Registry()
    plugin.headrace_register(Registrar(registry, plugin.name), None)
    backend = registry.get("attention_backend", "torch").factory()
    ops = registry.get("op_set", "torch").factory()
    assert isinstance(backend, AttentionBackend)
    assert backend.name == "torch"
    assert isinstance(ops, OpSet)
    assert ops.name == "torch"


def test_importing_the_plugin_imports_no_torch() -> None:
    code = (
        "import sys, headrace.backends.torch_reference.plugin\n"
        "sys.exit(', '.join({'torch', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
