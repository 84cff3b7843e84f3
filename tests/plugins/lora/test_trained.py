"""Adapters that `peft` itself trained and saved: each answers in its own way, and as PEFT's merged model does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams

PROMPT = [5, 17, 40, 3]
TASKS = {"sevens": 7, "nineties": 90, "thirties": 33}
"""What each is taught to say after anything: an id and those that follow it, in turns."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def taught(first: int, length: int = 12) -> list[int]:
    return [first + i % 4 for i in range(length)]


def train(base: Any, first: int, folder: Path, **config: Any) -> Any:
    """Teach an adapter for some steps, save it, and return the merged model."""
    import copy

    import peft

    torch.manual_seed(first)
    model = peft.get_peft_model(copy.deepcopy(base.model), peft.LoraConfig(task_type="CAUSAL_LM", **config))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    rows = torch.tensor([[*(torch.randint(0, 131, (4,)).tolist()), *taught(first)] for _ in range(8)])
    labels = rows.clone()
    labels[:, :4] = -100
    for _ in range(40):
        loss = model(input_ids=rows, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return model.merge_and_unload().eval()


def test_three_trained_adapters_answer_in_their_own_ways(tmp_path: Path, base: Any) -> None:
    pytest.importorskip("peft", reason="peft trains the adapters; it is not installed here")
    configs: dict[str, dict[str, Any]] = {
        "sevens": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        "nineties": {"r": 8, "use_rslora": True, "target_modules": "all-linear"},
        "thirties": {
            "r": 6,
            "target_modules": ["embed_tokens", "lm_head", "up_proj", "o_proj"],
            "rank_pattern": {"up_proj": 3},
            "alpha_pattern": {"o_proj": 4},
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = {
            name: train(base, TASKS[name], tmp_path / name, **config) for name, config in configs.items()
        }
    modules = {name: tmp_path / name for name in TASKS}
    with LLM(str(base.folder), dtype="float32", lora_modules=modules, max_loras=3, show_report=False) as llm:
        names = [*TASKS, None]
        outputs = llm.generate([PROMPT] * 4, GREEDY, lora=names, use_tqdm=False)
        given = {name: list(o.outputs[0].token_ids) for name, o in zip(names, outputs, strict=True)}
    for name, first in TASKS.items():
        base.check(models[name], PROMPT, given[name])
        assert sum(token in taught(first) for token in given[name]) >= 6
        assert sum(token in taught(first) for token in given[None]) <= 2
