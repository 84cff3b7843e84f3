"""What a grammar costs a stream: the time between tokens with a warm grammar, against plain ones.

    python benchmarks/structured.py [--model smollm2] [--repeats 7] [--output benchmarks/results/structured.json]

Rounds of plain and of bound requests alternate, 1 and 16 streams at once; each says the same number of tokens with
end tokens ignored. Plain requests are held to the same ids by nothing, so the work of the model is alike and not the
same. The time between tokens is that of a round less its first step, by its steps; told is the median of the ratios
of neighbouring rounds. The grammar is a long list of records, so that it does not end and visits strings, numbers
and the marks between them. At most 5 % more is wanted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from provenance import provenance

from headrace import LLM, SamplingParams

RESULTS = Path(__file__).parent / "results" / "structured.json"
TOKENS = 96
STREAMS = (1, 16)
LIMIT = 0.05

SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer"},
            "city": {"type": "string", "maxLength": 30},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        },
        "required": ["name", "age", "city", "tags"],
        "additionalProperties": False,
    },
}


def round_seconds(llm: LLM, streams: int, tokens: int, structured: dict[str, Any] | None) -> float:
    """Return the seconds of one round, without its first step."""
    option = {} if structured is None else {"structured": structured}

    def run(count: int) -> float:
        params = [
            SamplingParams(temperature=0.8, seed=seed, max_tokens=count, ignore_eos=True, **option)
            for seed in range(streams)
        ]
        begun = time.perf_counter()
        outputs = llm.generate(["A list of people as JSON: "] * streams, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        assert all(len(output.outputs[0].token_ids) == count for output in outputs)
        return seconds

    return run(tokens) - run(1)


def measure(llm: LLM, streams: int, repeats: int, tokens: int) -> dict[str, Any]:
    """Return the time between tokens with and without a grammar, and the overhead."""
    bound = {"json": SCHEMA}
    round_seconds(llm, streams, tokens, bound)  # grammar and caches are warm then
    round_seconds(llm, streams, tokens, None)
    plain, with_grammar = [], []
    for _ in range(repeats):
        plain.append(round_seconds(llm, streams, tokens, None))
        with_grammar.append(round_seconds(llm, streams, tokens, bound))
    ratios = [one / other for one, other in zip(with_grammar, plain, strict=True)]
    steps = tokens - 1
    return {
        "streams": streams,
        "plain_itl_ms": statistics.median(plain) / steps * 1e3,
        "grammar_itl_ms": statistics.median(with_grammar) / steps * 1e3,
        "overhead": statistics.median(ratios) - 1,
        "ratios": ratios,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with LLM(arguments.model, max_model_len=512, max_num_seqs=16, show_report=False) as llm:
        rows = [measure(llm, streams, arguments.repeats, TOKENS) for streams in STREAMS]
    for row in rows:
        print(
            f"{row['streams']:>3} streams: {row['plain_itl_ms']:.2f} ms plain, {row['grammar_itl_ms']:.2f} ms with a "
            f"grammar, overhead {row['overhead']:+.1%} (limit {LIMIT:.0%})"
        )
    arguments.output.write_text(json.dumps({**provenance(), "limit": LIMIT, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
