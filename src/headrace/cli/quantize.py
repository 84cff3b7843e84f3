"""`headrace quantize`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import EngineArgs, engine_command

if TYPE_CHECKING:
    from headrace.quantizing import Quantized

__all__ = ["quantize"]


@engine_command(only="plugins")
def quantize(
    args: EngineArgs,
    name: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, path, or source:reference.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to write; new or empty.", file_okay=False)
    ],
    method: Annotated[str, typer.Option(help="int4, int8 or w8a8.")] = "int4",
    group_size: Annotated[int | None, typer.Option(help="int4: inputs to a scale: 32, 64 or 128.")] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Layer to leave as it is: a name, a part, or re:PATTERN. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a model with quantized weights, in the format compressed-tensors.

    Every layer is printed with what it lost. Embeddings and the output projection stay as they are. A tokenizer is
    written where the model comes with the files of one; a GGUF file's stays in that file.
    """
    from headrace.core.errors import ConfigError
    from headrace.models.opening import open_checkpoint, resolve_model
    from headrace.progress import counting, download_progress
    from headrace.quantizing import products, quantize_checkpoint

    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"the folder {output} is not empty; name another one (-o)", option="output")
    registry = _with_options(args, group_size, ignore or []).plugins().registry
    chosen = registry.get("quantization", method, option="method").factory()
    with download_progress() as progress:
        path = resolve_model(name, registry, progress)
    checkpoint = open_checkpoint(path, registry)
    try:
        with counting(len(products(checkpoint)), f"{method} layers") as tick:
            done = quantize_checkpoint(checkpoint, chosen, output, tick)
    finally:
        checkpoint.close()
    sys.stdout.write(_json(done, output) if as_json else _table(done, output))


def _with_options(args: EngineArgs, group_size: int | None, ignore: list[str]) -> EngineArgs:
    """The options of the plugin `quantization`, as the flags have them."""
    own: dict[str, Any] = {"ignore": ignore} if ignore else {}
    if group_size is not None:
        own["group_size"] = group_size
    if not own:
        return args
    given = dict(args.flags.get("plugin_options") or {})
    given["quantization"] = {**given.get("quantization", {}), **own}
    return replace(args, flags={**args.flags, "plugin_options": given})


def _json(done: Quantized, output: Path) -> str:
    told = {
        "output": str(output),
        "bytes_before": done.bytes_before,
        "bytes_after": done.bytes_after,
        "layers": [asdict(layer) for layer in done.layers],
    }
    return json.dumps(told, indent=2) + "\n"


def _table(done: Quantized, output: Path) -> str:
    width = max(len(layer.name) for layer in done.layers)
    lines = [f"{'layer':{width}}  bits  error"]
    lines += [f"{layer.name:{width}}  {layer.bits:4.2f}  {layer.error:6.2%}" for layer in done.layers]
    before, after = done.bytes_before / 2**20, done.bytes_after / 2**20
    lines.append(f"{output}: {after:.0f} MiB, {before:.0f} MiB in bfloat16")
    return "\n".join(lines) + "\n"
