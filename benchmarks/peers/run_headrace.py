"""Headrace, with the same arrangements as its peers: bfloat16, 2,048 tokens of context, no prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

import harness


def load(model: str) -> harness.Run:
    """Start an engine in this process."""
    from headrace import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=False,
        show_report=False,
    )

    def run(requests: Sequence[harness.Request]) -> list[int]:
        outputs = llm.generate(
            [request.prompt_ids for request in requests],
            [SamplingParams(temperature=0, max_tokens=r.max_tokens, ignore_eos=True) for r in requests],
            use_tqdm=False,
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    return run


if __name__ == "__main__":
    harness.main(load, package="headrace", weights="bfloat16")
