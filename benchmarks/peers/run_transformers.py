"""Hugging Face transformers in batches of eight, padded on the left: what `generate` does with a list of prompts.

A batch runs until its longest request is done; tokens behind a request's own number are computed and not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import harness

BATCH_SIZE = 8


def load(model_folder: str) -> harness.Run:
    """Load a Hugging Face folder in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    pad = 0  # masked, so that any id does

    def run_batch(batch: Sequence[harness.Request]) -> list[int]:
        width = max(len(request.prompt_ids) for request in batch)
        longest = max(request.max_tokens for request in batch)
        pads = [width - len(request.prompt_ids) for request in batch]
        ids = torch.tensor([[pad] * n + r.prompt_ids for n, r in zip(pads, batch, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in pads])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                pad_token_id=pad,
            )
        generated = output.shape[1] - width
        return [min(generated, request.max_tokens) for request in batch]

    def run(requests: Sequence[harness.Request]) -> list[int]:
        counts: list[int] = []
        for start in range(0, len(requests), BATCH_SIZE):
            counts += run_batch(requests[start : start + BATCH_SIZE])
        return counts

    return run


if __name__ == "__main__":
    harness.main(load, package="transformers", weights="bfloat16")
