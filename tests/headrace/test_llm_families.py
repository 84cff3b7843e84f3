"""Every family as a tiny random model: saved by transformers, loaded from its folder, run by the real engine."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace import LLM, SamplingParams, hookimpl
from headrace.core.errors import CheckpointError
from headrace.core.interfaces import LogitsRow, RunnerListener

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # large enough for attention to matter
}
ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied-bias": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3-rope": (
        "LlamaConfig",
        {"rope_parameters": {**ROPE, "rope_theta": 5e4, "original_max_position_embeddings": 64}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 20}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": False}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "use_sliding_window": False}),
    "qwen3-window": (
        "Qwen3Config",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
}
PROMPTS = [[(7 * i + 3 * k) % 131 for i in range(length)] for k, length in enumerate((1, 9, 33, 70))]
TIE = 1e-3


@contextlib.contextmanager
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        yield


def save(folder: Path, family: str, **how: Any) -> Any:
    """Save a random model of a family and return it."""
    name, changes = FAMILIES[family]
    with quiet():
        torch.manual_seed(5)
        config = getattr(transformers, name)(**{**SIZES, **changes})
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(folder, **how)
    return model


class Keep(RunnerListener):
    name = "keep"

    def __init__(self) -> None:
        self.logits: dict[tuple[int, ...], torch.Tensor] = {}

    def on_logits(self, rows: Sequence[LogitsRow], logits: torch.Tensor) -> None:
        for row, values in zip(rows, logits, strict=True):
            self.logits[tuple(int(token) for token in row.tokens)] = values.clone()


class Plugin:
    name = "keep"
    headrace_api = ">=1,<2"

    def __init__(self) -> None:
        self.keep = Keep()

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        registrar.runner_listener("keep", lambda context: self.keep)


def reference(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode(), quiet():
        logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0, -1]
    return logits


@pytest.mark.parametrize(("budget", "block_size"), [(7, 4), (512, 4), (7, 16), (512, 16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_are_transformers(
    family: str, budget: int, block_size: int, tmp_path: Path
) -> None:
    model = save(tmp_path, family)
    plugin = Plugin()
    llm = LLM(
        str(tmp_path),
        dtype="float32",
        max_num_batched_tokens=budget,
        block_size=block_size,
        kv_cache_memory="4MiB",
        plugins=[plugin],
        show_report=False,
    )
    # Blocks of 4 are for the reference backend alone.
    assert llm.report.executor["attention_backend"] == ("torch" if block_size == 4 else "cpu")
    assert (llm.report.executor["graph"] == "yes") == (block_size == 16)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    steps = llm.metrics()["num_steps"]
    assert steps <= 17 if budget == 512 else steps > 16 + 70 // 7 - 1  # a last plan tells who is gone
    assert len(plugin.keep.logits) >= 4 * 16
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = list(prompt)
        for token in output.outputs[0].token_ids:
            right = reference(model, tokens)
            assert float((plugin.keep.logits[tuple(tokens)] - right).abs().max()) < 1e-4
            best = right.topk(2)
            assert token == int(best.indices[0]) or float(best.values[0] - best.values[1]) < TIE
            tokens.append(token)
    windowed = [window for window in llm.report.windows if window]
    assert bool(windowed) == family.endswith("window")
    warm = llm.generate(PROMPTS, params, use_tqdm=False)
    assert warm[3].num_cached_tokens == 69 // block_size * block_size
    assert [o.outputs[0].token_ids for o in warm] == [o.outputs[0].token_ids for o in outputs]


def test_blocks_behind_the_window_are_back_in_the_pool(tmp_path: Path) -> None:
    save(tmp_path, "mistral-window")
    llm = LLM(str(tmp_path), dtype="float32", block_size=4, num_kv_blocks=64, max_num_batched_tokens=16)
    stream = llm.stream([5] * 100, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    next(stream)
    metrics = llm.metrics()
    stream.close()
    held = metrics["kv_blocks_total"] - metrics["kv_blocks_free"]
    assert (
        0 < held <= (20 + 16) // 4 + 1
    )  # the window and what a step adds, of 25 blocks for the whole prompt


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    """Source: QwenLM/Qwen3-VL#264."""
    save(tmp_path / "one", "llama")
    save(tmp_path / "many", "llama", max_shard_size="100KB")
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) >= 3
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = [
        LLM(str(folder), dtype="float32", show_report=False).generate(PROMPTS, params, use_tqdm=False)
        for folder in (tmp_path / "one", tmp_path / "many")
    ]
    assert [o.outputs[0].token_ids for o in answers[0]] == [o.outputs[0].token_ids for o in answers[1]]
    with shards[1].open("r+b") as file:
        file.write(b"\xff" * 16)
    with pytest.raises(CheckpointError, match=shards[1].name):
        LLM(str(tmp_path / "many"), show_report=False)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[1].name}.*not in the folder"):
        LLM(str(tmp_path / "many"), show_report=False)


def test_dtype_auto_is_the_checkpoints_own(tmp_path: Path) -> None:
    model = save(tmp_path, "qwen2")
    assert "float32" in str(LLM(str(tmp_path), show_report=False).report)
    with quiet():
        model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert "bfloat16" in str(LLM(str(tmp_path), show_report=False).report)
