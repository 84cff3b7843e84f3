"""Hugging Face transformers with its continuous batching over paged attention.

Left to itself it takes most of the machine's memory for its cache; it gets as much as the other engines.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import harness

PAGE_SIZE = 256
NUM_BLOCKS = 364
"""2 GiB of SmolLM2's keys and values in bfloat16."""


def load(model_folder: str) -> harness.Run:
    """Load a Hugging Face folder in bfloat16 and start its batching thread, which lives as long as the process."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).eval()
    # -1: no token ends an answer.
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=256)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE, num_blocks=NUM_BLOCKS, max_batch_tokens=1024, allow_block_sharing=False
    )
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
    manager.start()

    def run(requests: Sequence[harness.Request]) -> list[int]:
        names = [
            manager.add_request(request.prompt_ids, max_new_tokens=request.max_tokens) for request in requests
        ]
        counts: dict[str, int] = {}
        while len(counts) < len(names):
            output = manager.get_result(timeout=1)
            if output is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' batching thread has ended")
                continue
            if output.error is not None:
                raise RuntimeError(f"transformers: {output.error}")
            if output.is_finished():
                counts[output.request_id] = len(output.generated_tokens)
        return [counts[name] for name in names]

    return run


if __name__ == "__main__":
    harness.main(load, package="transformers", weights="bfloat16")
    os._exit(0)  # an ordinary end would wait for the batching thread, which has none
