"""What adapters cost: throughput with four of them mixed against the base model, and loads beside streams.

    python benchmarks/lora.py [--model smollm2] [--rank 16] [--repeats 5] [--output benchmarks/results/lora.json]

Adapters are random, of one rank, and aim at every product of every layer. Rounds of the plain engine, of the engine
with adapters asked for none, and of four adapters mixed alternate; told is the median of the ratios of neighbouring
rounds. At least 80 % of the base model's throughput is wanted.

For the stall, 16 streams run and adapters are loaded one after the other, 16 times; each step is timed, with the
garbage collector as a server has it. The longest step with a load under way, less the median step without, is what a
load holds a stream up: at most one step's time is wanted. The longest step without tells what else there is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from safetensors.torch import save_file

from headrace import LLM, SamplingParams
from headrace.process.collecting import keep_what_started

RESULTS = Path(__file__).parent / "results" / "lora.json"
STREAMS = 16
ADAPTERS = 4
LEAST = 0.8
WORKLOADS = {"decode": (16, 96), "mixed": (128, 64), "prefill": (256, 4)}
"""Tokens of the prompt and of the answer, a request."""


def write_adapter(folder: Path, config: dict[str, Any], rank: int, seed: int) -> Path:
    """Write a random adapter of all products of a Llama."""
    random = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = size * config["num_attention_heads"], size * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, q),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (q, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) / inputs**0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * 0.02
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(shapes)}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def prompts(llm: LLM, length: int) -> list[list[int]]:
    """Return prompts of which none begins like another."""
    size = llm.front.vocab_size
    return [
        [(7919 * stream + 31 * place + 11) % size for place in range(length)] for stream in range(STREAMS)
    ]


def tokens_a_second(llm: LLM, workload: str, adapters: Sequence[str | None]) -> float:
    """Run a round; tokens of prompts and answers together."""
    length, answer = WORKLOADS[workload]
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    llm.reset_prefix_cache()
    begun = time.perf_counter()
    outputs = llm.generate(prompts(llm, length), params, lora=adapters, use_tqdm=False)
    seconds = time.perf_counter() - begun
    assert all(len(output.outputs[0].token_ids) == answer for output in outputs)
    return STREAMS * (length + answer) / seconds


def throughput(plain: LLM, llm: LLM, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Return a row a workload."""
    mixed = [names[stream % ADAPTERS] for stream in range(STREAMS)]
    nobody = [None] * STREAMS
    rows = []
    for workload in WORKLOADS:
        rounds: list[tuple[float, float, float]] = []
        for place in range(repeats + 1):
            one = (
                tokens_a_second(plain, workload, nobody),
                tokens_a_second(llm, workload, nobody),
                tokens_a_second(llm, workload, mixed),
            )
            if place:  # the first one warms up
                rounds.append(one)
        base, idle, used = zip(*rounds, strict=True)
        rows.append(
            {
                "workload": workload,
                "plain_tokens_per_s": statistics.median(base),
                "asked_for_none": statistics.median(b / a for a, b, _ in rounds),
                "four_adapters": statistics.median(c / a for a, _, c in rounds),
                "rounds": [base, idle, used],
            }
        )
    return rows


def stall(llm: LLM, names: list[str], folders: Sequence[Path]) -> dict[str, Any]:
    """Time steps of running streams, with loads under way and without."""
    params = SamplingParams(temperature=0, max_tokens=20 * (len(folders) + 1), ignore_eos=True)
    client = llm.client
    keep_what_started()
    for stream, prompt in enumerate(prompts(llm, 16)):
        name = names[stream % ADAPTERS]
        client.submit(llm._front.prepare(prompt, params.model_copy(update={"lora": name})))
    waiting, ticket = list(folders), None
    quiet: list[float] = []
    loading: list[float] = []
    loads = 0
    for step in range(params.max_tokens or 0):
        begun = time.perf_counter()
        if ticket is None and waiting and step % 10 == 9:
            folder = waiting.pop()
            ticket = client.call("lora", "load", folder.name, str(folder), True)["ticket"]
        busy = ticket is not None
        client.step()
        if ticket is not None:
            outcome = client.call("lora", "loaded", ticket)
            if outcome is not None:
                assert outcome["status"] == 200, outcome
                ticket, loads = None, loads + 1
        if step >= 5:
            (loading if busy else quiet).append(time.perf_counter() - begun)
    while client.num_unfinished:
        client.step()
    usual = statistics.median(quiet)
    return {
        "loads": loads,
        "median_step_ms": usual * 1e3,
        "longest_quiet_step_ms": max(quiet) * 1e3,
        "median_loading_step_ms": statistics.median(loading) * 1e3,
        "longest_loading_step_ms": max(loading) * 1e3,
        "stall_steps": max(loading) / usual - 1,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": STREAMS, "show_report": False}
    with tempfile.TemporaryDirectory() as folder, LLM(arguments.model, **options) as plain:
        from headrace.models.opening import open_checkpoint

        checkpoint = open_checkpoint(Path(plain.front.facts.path), plain.front.registry)
        config = dict(checkpoint.config)
        checkpoint.close()
        folders = [
            write_adapter(Path(folder) / f"a{i}", config, arguments.rank, i) for i in range(ADAPTERS + 4)
        ]
        modules = {path.name: path for path in folders[:ADAPTERS]}
        with LLM(
            arguments.model, lora_modules=modules, enable_lora_loading=True, max_loras=ADAPTERS, **options
        ) as llm:
            assert llm.report.executor["graph"] == plain.report.executor["graph"]
            rows = throughput(plain, llm, list(modules), arguments.repeats)
            held_up = stall(llm, list(modules), folders[ADAPTERS:] * 4)
    for row in rows:
        print(
            f"{row['workload']:>8}: {row['plain_tokens_per_s']:8.1f} tok/s plain; asked for none "
            f"{row['asked_for_none']:.1%}, four adapters {row['four_adapters']:.1%} (at least {LEAST:.0%} wanted)"
        )
    print(
        f"   loads: {held_up['loads']} beside {STREAMS} streams; a step takes {held_up['median_step_ms']:.2f} ms, "
        f"the longest {held_up['longest_quiet_step_ms']:.2f} ms, while loading "
        f"{held_up['longest_loading_step_ms']:.2f} ms: {held_up['stall_steps']:.2f} steps more (at most 1 wanted)"
    )
    told = {**provenance(), "rank": arguments.rank, "least": LEAST, "rows": rows, "stall": held_up}
    arguments.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
