"""OpenVINO GenAI with its continuous batching, on a GGUF file, which it keeps in four bits."""

from __future__ import annotations

from collections.abc import Sequence

import harness


def load(model_file: str) -> harness.Run:
    """Compile the model and make the pipeline."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 1024
    scheduler.max_num_seqs = 64
    scheduler.cache_size = 2  # GiB
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(model_file, scheduler, "CPU")

    def config(request: harness.Request) -> openvino_genai.GenerationConfig:
        made = openvino_genai.GenerationConfig()
        made.max_new_tokens = request.max_tokens
        made.ignore_eos = True
        made.do_sample = False
        return made

    def run(requests: Sequence[harness.Request]) -> list[int]:
        prompts = [openvino.Tensor(np.array([request.prompt_ids], dtype=np.int64)) for request in requests]
        results = pipeline.generate(prompts, [config(request) for request in requests])
        return [len(result.m_generation_ids[0]) for result in results]

    return run


if __name__ == "__main__":
    harness.main(load, package="openvino-genai", weights="4-bit")
