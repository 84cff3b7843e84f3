"""`processors`: a request selects logits processors of plugins by name, each with parameters of its own.

Which there are, and what their parameters must look like, plugins say when they register one
(`registrar.logits_processor(name, factory, parameters=Model)`). Here it is checked before anything is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import ValidationError

from headrace.core.errors import RequestError, nearest
from headrace.core.interfaces import SelectableProcessor
from headrace.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from headrace.core.interfaces import ProcessedInput
    from headrace.core.interfaces.build import FrontContext
    from headrace.core.plugin.registry import Registrar

__all__ = ["SelectionCheck", "headrace_api", "headrace_register", "name"]

name = "processors"
headrace_api = ">=1,<2"


class SelectionCheck:
    """Input processor: refuses names that no processor has, and parameters that its model refuses."""

    name = "processors"

    def __init__(self, context: FrontContext) -> None:
        factories = [entry.factory for entry in context.registry.entries("logits_processor")]
        self._known = {one.name: one for one in factories if isinstance(one, SelectableProcessor)}

    def process(self, item: ProcessedInput) -> None:
        """Raise `RequestError` naming what is wrong and what may be selected."""
        for selected, parameters in (item.params.options.get(name) or {}).items():
            processor = self._known.get(selected)
            if processor is None:
                raise RequestError(
                    f"processors: no logits processor that a request may select is called {selected!r:.100}"
                    f"{nearest(selected, self._known)}; there are: {', '.join(self._known) or 'none'}",
                    param=name,
                )
            _check(processor, parameters)


def _check(processor: SelectableProcessor, parameters: dict[str, Any]) -> None:
    try:
        processor.parameters.model_validate(parameters)
        msgspec.msgpack.encode(parameters)  # as they travel to workers
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([name, processor.name, *map(str, first["loc"])])
        text = first["msg"].removeprefix("Value error, ")
        raise RequestError(f"{where}: {text}, got {first['input']!r:.100}", param=name) from None
    except (TypeError, OverflowError) as error:
        raise RequestError(
            f"processors.{processor.name}: parameters must be plain values (numbers of 64 bits, texts, lists, "
            f"mappings): {error}",
            param=name,
        ) from None


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the option and the check."""
    registrar.request_option(name, dict[str, dict[str, Any]])
    registrar.input_processor(name, SelectionCheck)
