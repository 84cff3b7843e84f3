"""An engine on a processor that has fewer instructions than this one.

Source: vllm-project/vllm#4542, #14701, #19494: an illegal instruction, or an opaque error of a kernel. torch and
oneDNN are told to use less than there is, and where Headrace has kernels of its own, so are they.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.backends.cpu.isa import supported_tiers

ANSWER = """
import json, sys
from headrace import LLM, SamplingParams
answers = {}
for dtype in ("float32", "bfloat16", "float16"):
    llm = LLM(sys.argv[1], dtype=dtype, max_model_len=64, show_report=False)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([list(range(1, 20))], params, use_tqdm=False)
    answers[dtype] = list(output.outputs[0].token_ids)
print(json.dumps(answers))
"""

LESS = [{"ATEN_CPU_CAPABILITY": "default"}, {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}]


def answers(model: Path, **environment: str) -> dict[str, list[int]]:
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, str(model)],
        env=os.environ | environment,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{environment}: exit status {done.returncode}\n{done.stderr}"
    result: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_float32_answers_are_the_same_with_fewer_instructions(
    tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_gguf(tmp_path / "tiny.gguf")
    plain = answers(model)
    assert len(set(plain["float32"])) > 1
    lower = [{"HEADRACE_CPU_ISA": tier.name} for tier in supported_tiers()[1:]]
    for environment in (*LESS, *lower, {"HEADRACE_CPU_ISA": "torch"}):
        less = answers(model, **environment)
        assert less["float32"] == plain["float32"], environment
        assert {dtype: len(ids) for dtype, ids in less.items()} == dict.fromkeys(plain, 12)
