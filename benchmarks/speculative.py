"""What drafts are worth: an engine with prompt lookup against one without, on work that copies and that does not.

    python benchmarks/speculative.py [--pairs 9] [--prompts 50] [--tokens 128] [--output speculative.json]

SmolLM2 on the native backend, batch-invariant, so every answer is compared and must be the same. The two engines take
turns in a process, and a ratio is over the times of one turn: figures of machines that other work shares still
compare. Times are those of whole requests, prompts included. Kinds of work:

- copying, one stream: passages to be repeated, one request after another, greedy;
- chatting, one stream: questions put by the chat template, temperature 0.7;
- both again with 16 requests at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import provenance
from speculative_texts import chat_prompts, copying_prompts

from headrace import LLM, SamplingParams

RESULTS = Path(__file__).parent / "results" / "speculative.json"
STREAMS = 16
WANTED = {
    "copying, 1 stream": 1.8,
    "chatting, 1 stream": 0.97,
    f"copying, {STREAMS} streams": 0.95,
    f"chatting, {STREAMS} streams": 0.95,
}
"""Least ratio of speeds, drafts over plain."""

Prompts = Sequence[list[int]]


def start(**speculative: Any) -> LLM:
    """Return an engine."""
    options = {"speculative": speculative} if speculative else {}
    return LLM(
        "smollm2",
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=STREAMS,
        # What one engine has seen the other must not have found cached.
        enable_prefix_caching=False,
        show_report=False,
        **options,
    )


def timed(
    llm: LLM, prompts: Prompts, params: Sequence[SamplingParams], streams: int
) -> tuple[float, list[list[int]]]:
    """Run prompts, so many at once; return seconds and ids."""
    started = time.perf_counter()
    ids = []
    for first in range(0, len(prompts), streams):
        part = slice(first, first + streams)
        outputs = llm.generate(list(prompts[part]), list(params[part]), use_tqdm=False)
        ids += [output.outputs[0].token_ids for output in outputs]
    return time.perf_counter() - started, ids


def compare(
    engines: dict[str, LLM], prompts: Prompts, temperature: float, tokens: int, streams: int, pairs: int
) -> Any:
    """Let the engines take turns over the same work; return times, ratios and what became of drafts."""
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True)
        for i in range(len(prompts))
    ]
    times: dict[str, list[float]] = {name: [] for name in engines}
    before = engines["ngram"].metrics()
    for turn in range(pairs):
        order = list(engines) if turn % 2 == 0 else list(engines)[::-1]
        answers = {}
        for name in order:
            seconds, answers[name] = timed(engines[name], prompts, params, streams)
            times[name].append(seconds)
        if answers["plain"] != answers["ngram"]:
            raise SystemExit("the engines answer differently: drafts changed a token")
    after = engines["ngram"].metrics()
    counts = {
        what: after[f"spec_decode_num_{what}"] - before[f"spec_decode_num_{what}"]
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    }
    ratios = [plain / ngram for plain, ngram in zip(times["plain"], times["ngram"], strict=True)]
    generated = sum(len(answer) for answer in answers["plain"])
    steps = after["num_steps"] - before["num_steps"]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "seconds": times,
        "output_tok_s": {name: generated / statistics.median(own) for name, own in times.items()},
        "tokens_a_step": pairs * generated / steps,
        **counts,
    }


def main() -> None:
    """Measure, print, write; exit status 1 where a ratio is less than is wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=5, help="num_speculative_tokens")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    engines = {
        "plain": start(),
        "ngram": start(method="ngram", num_speculative_tokens=arguments.drafts),
    }
    copying = [engines["plain"].encode(text) for text in copying_prompts(arguments.prompts)]
    chat = chat_prompts(max(STREAMS, arguments.prompts // 3))
    chatting = [_chat_ids(engines["plain"], text) for text in chat]
    compare(engines, copying[:2], 0.0, 16, 1, pairs=1)  # warm
    found: dict[str, Any] = {}
    for name, prompts, temperature, pairs in (
        ("copying", copying, 0.0, max(1, arguments.pairs // 3)),
        ("chatting", chatting, 0.7, arguments.pairs),
    ):
        for streams in (1, STREAMS):
            kind = f"{name}, {streams} stream{'s' * (streams > 1)}"
            found[kind] = compare(engines, prompts, temperature, arguments.tokens, streams, pairs)
            one = found[kind]
            print(
                f"{kind:<22} {one['ratio']:.2f} x plain (at least {WANTED[kind]}), "
                f"{one['output_tok_s']['plain']:.0f} -> {one['output_tok_s']['ngram']:.0f} tok/s, "
                f"{one['tokens_a_step']:.2f} tokens a step, "
                f"{one['accepted_tokens']:.0f} of {one['draft_tokens']:.0f} drafts accepted",
                flush=True,
            )
    report = engines["plain"].report.executor
    facts = {"threads": report["threads"], "fingerprint": report["fingerprint"], "drafts": arguments.drafts}
    arguments.output.write_text(json.dumps({**provenance(), **facts, "work": found}, indent=1) + "\n")
    missed = [kind for kind, one in found.items() if one["ratio"] < WANTED[kind]]
    if missed:
        print("less than wanted:", ", ".join(missed))
    raise SystemExit(1 if missed else 0)


def _chat_ids(llm: LLM, text: str) -> list[int]:
    (output,) = llm.chat(
        [{"role": "user", "content": text}], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False
    )
    return list(output.prompt_token_ids)


if __name__ == "__main__":
    main()
