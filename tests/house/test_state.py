"""No module-level mutable state of ours: two engines in one process never meet.

The rule: no `global` statement, and no module-level name bound to a list, dict, set, deque or the like, unless it
is a table: an upper-case name bound once to something not empty. Process-wide facts have one home.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

PROCESS_FACTS = {"headrace.executors.process"}
MAKERS = {"list", "dict", "set", "defaultdict", "OrderedDict", "deque", "Counter", "WeakValueDictionary"}
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def mutable_kind(value: ast.expr) -> str:
    """Return `"empty"`, `"filled"`, or `""` for a value that cannot be changed in place."""
    if isinstance(value, ast.List | ast.Set):
        return "filled" if value.elts else "empty"
    if isinstance(value, ast.Dict):
        return "filled" if value.keys else "empty"
    if isinstance(value, DISPLAYS):
        return "filled"
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        if name in MAKERS:
            return "filled" if value.args and name in {"list", "dict", "set"} else "empty"
    return ""


def state(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield what could carry something from one engine to another."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node, f"global {', '.join(node.names)}"
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            kind = mutable_kind(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (target.id for target in targets if isinstance(target, ast.Name)):
                if name != "__all__" and (kind == "empty" or (kind == "filled" and not name.isupper())):
                    yield node, f"module-level mutable {name}"


def test_no_module_level_mutable_state(sources):
    found = [s.at(n, text) for s in sources if s.module not in PROCESS_FACTS for n, text in state(s.tree)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("cache = {}", True),
        ("CACHE: dict[str, int] = {}", True),
        ("seen = [1]", True),
        ("QUEUE = collections.deque()", True),
        ("def f():\n    global x\n    x = 1", True),
        ("__all__ = ['f']", False),
        ("_UNITS = {'kb': 1000}", False),
        ("names = ('a', 'b')", False),
    ],
)
def test_the_rule_itself(code, wrong):
    assert bool(list(state(ast.parse(code)))) is wrong
