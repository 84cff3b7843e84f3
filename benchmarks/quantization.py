"""What fewer bits cost and bring: size, perplexity, difference to bfloat16, and speed, method by method.

    python benchmarks/quantization.py [--slices 4] [--tokens 128] [--turns 5] [--model smollm2] [--output FILE]

Text is the standard library's `pydoc_data.topics`, cut at fixed offsets. Perplexity, and the divergence (Kullback and
Leibler's) of next-token distributions from those of bfloat16, are over every token of every slice but its first.
Speeds are of
greedy answers, one stream and 48 at once; engines take turns in one process, and the best turn counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from provenance import provenance

from headrace import LLM, SamplingParams, hookimpl

RESULTS = Path(__file__).parent / "results" / "quantization.json"
METHODS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "gguf": {"quantization": "gguf"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "w8a8": {"quantization": "w8a8"},
}
OFFSET = 40_000
"""Characters between the beginnings of slices."""
STREAMS = (1, 48)
ANSWER = {1: 64, 48: 24}
"""Tokens of an answer when speed is measured, by streams."""


class Keeper:
    """A plugin that keeps the log-probabilities each request is drawn from, by the number of its tokens."""

    name = "keeper"
    headrace_api = ">=1,<2"

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        """Register the processor; it changes nothing."""
        registrar.logits_processor(self.name, lambda params: self._keep)

    def _keep(self, row: Any, logits: torch.Tensor) -> torch.Tensor:
        self.kept[len(row.tokens)] = logits.double().log_softmax(-1).float()
        return logits


def text() -> str:
    """All topics, in the order of their names."""
    return "\n".join(topics[name] for name in sorted(topics))


def start(model: str, options: dict[str, Any], keeper: Keeper | None = None) -> LLM:
    """Return an engine."""
    plugins = {} if keeper is None else {"plugins": [keeper]}
    return LLM(
        model,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=48,
        kv_cache_memory="256MiB",
        show_report=False,
        **options,
        **plugins,
    )


def distributions(llm: LLM, keeper: Keeper, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [len(ids) - 1, V] of what follows each of a slice's beginnings."""
    keeper.kept.clear()
    one = SamplingParams(temperature=0, max_tokens=1)
    llm.generate([ids[:end] for end in range(1, len(ids))], one, use_tqdm=False)
    return torch.stack([keeper.kept[end] for end in range(1, len(ids))])


def quality(model: str, slices: int, tokens: int) -> dict[str, dict[str, float]]:
    """Perplexity and divergence of every method."""
    whole, found, right = text(), {}, []
    for name, options in METHODS.items():
        keeper = Keeper()
        llm = start(model, options, keeper)
        lost, differing, same, count = 0.0, 0.0, 0, 0
        for number in range(slices):
            ids = llm.encode(whole[number * OFFSET :][: 8 * tokens])[:tokens]
            logs = distributions(llm, keeper, ids)
            if name == "bfloat16":
                right.append(logs.half())
            reference = right[number].float()
            following = torch.tensor(ids[1:])
            lost -= float(logs.double().gather(1, following[:, None]).sum())
            differing += float((reference.exp() * (reference - logs)).double().sum())
            same += int((reference.argmax(1) == logs.argmax(1)).sum())
            count += len(following)
        facts = llm.report.executor
        found[name] = {
            "weights_bytes": facts["weights_bytes"],
            "perplexity": math.exp(lost / count),
            "kl": differing / count,
            "same_top": same / count,
            "tokens": count,
        }
        llm.shutdown()
        del llm
        gc.collect()
        print(f"{name:<9} {json.dumps(found[name])}", flush=True)
    return found


def speeds(model: str, turns: int) -> dict[str, dict[str, float]]:
    """Milliseconds a step of every method, by streams: the best of some turns."""
    engines = {name: start(model, options) for name, options in METHODS.items()}
    best = {name: {f"ms_{streams}": math.inf for streams in STREAMS} for name in engines}
    for _ in range(turns):
        for name, llm in engines.items():
            for streams in STREAMS:
                tokens = ANSWER[streams]
                params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
                started = time.perf_counter()
                llm.generate([[5 + i, 9, 11, 7] for i in range(streams)], params, use_tqdm=False)
                spent = (time.perf_counter() - started) / tokens * 1e3
                best[name][f"ms_{streams}"] = min(best[name][f"ms_{streams}"], spent)
    for name, own in best.items():
        own |= {f"tok_s_{streams}": streams / own[f"ms_{streams}"] * 1e3 for streams in STREAMS}
        print(f"{name:<9} " + ", ".join(f"{key} {value:.2f}" for key, value in own.items()), flush=True)
    return best


def saved(found: dict[str, dict[str, float]]) -> None:
    """Add to every method which share of the time that its bytes should save it does save, at one stream.

    What is expected: bytes saved at the rate at which bfloat16's weights are read in its step.
    """
    plain = found["bfloat16"]
    rate = plain["weights_bytes"] / plain["ms_1"]
    for own in found.values():
        expected = (plain["weights_bytes"] - own["weights_bytes"]) / rate
        own["saved_share"] = (plain["ms_1"] - own["ms_1"]) / expected if expected else 0.0


def plot(found: dict[str, dict[str, float]], file: Path) -> None:
    """Draw size against perplexity, and speed in both loads. Raises `ImportError` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.5))
    names = list(found)
    sizes = [own["weights_bytes"] / 2**20 for own in found.values()]
    axes[0].scatter(sizes, [own["perplexity"] for own in found.values()])
    for name, size in zip(names, sizes, strict=True):
        axes[0].annotate(name, (size, found[name]["perplexity"]))
    axes[0].set(xlabel="weights, MiB", ylabel="perplexity")
    for axis, streams in zip(axes[1:], STREAMS, strict=True):
        axis.bar(names, [own[f"tok_s_{streams}"] for own in found.values()])
        axis.set(title=f"{streams} stream{'s' * (streams > 1)}", ylabel="tokens/s")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file's model: it is run packed, too")
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found = quality(arguments.model, arguments.slices, arguments.tokens)
    for name, own in speeds(arguments.model, arguments.turns).items():
        found[name] |= own
    saved(found)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    result = {**provenance(), "model": arguments.model, "methods": found}
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    try:
        plot(found, arguments.output.with_suffix(".png"))
    except ImportError:
        print("no plot: pip install matplotlib draws one", file=sys.stderr)


if __name__ == "__main__":
    main()
