"""A fixed set of 200 JSON schemas at temperature 1: how many answers finish, and whether each of them validates.

    python benchmarks/schemas.py [--model smollm2] [--max-tokens 256] [--output benchmarks/results/schemas.json]

The set is tests/data/schemas.json. A model is asked for JSON that fits each schema, seeded, all in one batch. A
schema that the grammar backend does not take is listed with what it says, which names the keyword; it counts neither
as finished nor as cut. An answer is finished where it ended with its grammar within `--max-tokens`, and valid where
the package `jsonschema` says so, formats included. Exits with 1 where a finished answer is not valid, or fewer than
80 % of those served finish.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
from provenance import provenance

from headrace import LLM, RequestOutput, SamplingParams

BENCHMARKS = Path(__file__).parent
SCHEMAS = BENCHMARKS.parent / "tests" / "data" / "schemas.json"
RESULTS = BENCHMARKS / "results" / "schemas.json"
FEWEST = 0.8


def ask(llm: LLM, schemas: Sequence[Any], max_tokens: int) -> list[RequestOutput]:
    """Return an answer a schema."""
    words = "Answer with one short JSON value that fits this schema: "
    conversations = [[{"role": "user", "content": words + json.dumps(one)[:1000]}] for one in schemas]
    params = [
        SamplingParams(temperature=1, seed=seed, max_tokens=max_tokens, structured={"json": one})
        for seed, one in enumerate(schemas)
    ]
    return llm.chat(conversations, params)


def judge(schema: Any, output: RequestOutput) -> dict[str, Any]:
    """Return what became of one schema."""
    answer = output.outputs[0]
    found: dict[str, Any] = {"tokens": len(answer.token_ids)}
    if answer.finish_reason == "error":
        return {"outcome": "refused" if answer.error_kind == "request" else "failed", "told": answer.error}
    if answer.finish_reason != "stop":
        return {**found, "outcome": "cut"}
    try:
        value = json.loads(answer.text)
        kind = jsonschema.Draft202012Validator
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return {**found, "outcome": "invalid", "told": str(error).splitlines()[0], "text": answer.text}
    return {**found, "outcome": "valid"}


def main() -> None:
    """Ask, judge, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    entries = json.loads(SCHEMAS.read_text())["schemas"]
    with LLM(arguments.model, max_model_len=2048, max_num_seqs=32, show_report=False) as llm:
        outputs = ask(llm, [entry["schema"] for entry in entries], arguments.max_tokens)
    rows = [
        {"name": entry["name"], **judge(entry["schema"], output)}
        for entry, output in zip(entries, outputs, strict=True)
    ]
    counts = Counter(row["outcome"] for row in rows)
    finished = counts["valid"] + counts["invalid"]
    served = finished + counts["cut"]
    print(f"{len(rows)} schemas: {counts['refused']} refused, {served} served")
    print(
        f"finished within {arguments.max_tokens} tokens: {finished} ({finished / served:.1%} of those served)"
    )
    print(f"valid: {counts['valid']} of {finished}; failed: {counts['failed']}")
    for row in rows:
        if row["outcome"] not in ("valid", "cut"):
            print(f"  {row['outcome']}: {row['name']}: {row['told']}")
    summary = {"schemas": len(rows), "served": served, "finished": finished, **counts}
    found = {**provenance(), "model": arguments.model, "max_tokens": arguments.max_tokens, **summary}
    arguments.output.write_text(json.dumps({**found, "rows": rows}, indent=1, ensure_ascii=False) + "\n")
    good = counts["valid"] == finished and not counts["failed"] and finished >= FEWEST * served
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
