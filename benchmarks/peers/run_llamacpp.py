"""llama.cpp through its Python binding, on a GGUF file: one stream, since the binding runs no more at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice

import harness


def load(model_file: str) -> harness.Run:
    """Map the file; one thread for each core this process may use."""
    from llama_cpp import Llama

    threads = len(os.sched_getaffinity(0))
    llm = Llama(model_path=model_file, verbose=False, n_ctx=2048, n_threads=threads, n_threads_batch=threads)

    def run(requests: Sequence[harness.Request]) -> list[int]:
        counts = []
        for request in requests:
            llm.reset()
            tokens = llm.generate(request.prompt_ids, temp=0.0, top_k=1)
            counts.append(sum(1 for _ in islice(tokens, request.max_tokens)))
        return counts

    return run


if __name__ == "__main__":
    harness.main(load, package="llama-cpp-python", weights="4-bit", batches=False)
