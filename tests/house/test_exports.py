"""`__all__` and a module's public names agree.

The rule: a module that defines a public function or class has an `__all__`, which names all of them and nothing
that the module does not bind. Hook implementations are found by their decorator and need not be named.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

HOOKS = {"hookimpl", "hookspec"}


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, those in its `if` and `try` blocks too."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody") if isinstance(node, ast.If | ast.Try) else ():
            yield from top_level(getattr(node, field, []))


def bound_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {n.id for target in targets if target for n in ast.walk(target) if isinstance(n, ast.Name)}


def is_hook(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Return whether a definition is a hook implementation."""
    names = [n for d in node.decorator_list for n in ast.walk(d) if isinstance(n, ast.Name | ast.Attribute)]
    return any((n.id if isinstance(n, ast.Name) else n.attr) in HOOKS for n in names)


def disagreements(tree: ast.Module) -> Iterator[str]:
    """Yield where `__all__` and the module's names differ."""
    bound: set[str] = set()
    public: set[str] = set()
    exported: list[str] | None = None
    for node in top_level(tree.body):
        bound |= bound_names(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not node.name.startswith("_") and not is_hook(node):
                public.add(node.name)
        elif isinstance(node, ast.Assign) and bound_names(node) == {"__all__"}:
            exported = ast.literal_eval(node.value)
    if exported is None:
        if public:
            yield f"no __all__, but public: {', '.join(sorted(public))}"
        return
    if unknown := set(exported) - bound:
        yield f"__all__ names what is not there: {', '.join(sorted(unknown))}"
    if missing := public - set(exported):
        yield f"public, but not in __all__: {', '.join(sorted(missing))}"
    if len(exported) != len(set(exported)):
        yield "__all__ names something twice"


def test_all_agrees(sources):
    found = [source.at(source.tree, text) for source in sources for text in disagreements(source.tree)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("def f(): ...", True),
        ("__all__ = ['f', 'g']\ndef f(): ...", True),
        ("__all__ = ['f']\ndef f(): ...\nclass C: ...", True),
        ("__all__ = ['f', 'f']\ndef f(): ...", True),
        ("__all__ = ['C', 'f']\ntry:\n    def f(): ...\nfinally:\n    class C: ...\ndef _g(): ...", False),
        ("__all__ = ['LLM']\nif TYPE_CHECKING:\n    from headrace.llm import LLM", False),
        ("@hookimpl(tryfirst=True)\ndef headrace_register(registrar, options): ...", False),
        ("name = 'x'", False),
    ],
)
def test_the_rule_itself(code, wrong):
    assert bool(list(disagreements(ast.parse(code)))) is wrong
