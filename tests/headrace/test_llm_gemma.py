"""Gemma 2 and 3 as tiny random models: saved by transformers, run by the real engine, compared at every position."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams, hookimpl
from headrace.core.errors import CheckpointError
from headrace.core.interfaces import RunnerBatch, RunnerListener

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "sliding_window": 12,
    "query_pre_attn_scalar": 24,
    "initializer_range": 0.3,  # large enough for attention to matter
}
BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2Config",
        4,
        {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "tie_word_embeddings": False},
    ),
    "gemma2-no-caps": (
        "Gemma2Config",
        3,
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
        },
    ),
    "gemma3": ("Gemma3TextConfig", 6, {"rope_parameters": BASES, "tie_word_embeddings": False}),
    "gemma3-types": (
        "Gemma3TextConfig",
        3,
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 4.0,
        },
    ),
}
PROMPTS = [[(7 * i + 3 * k) % 131 for i in range(length)] for k, length in enumerate((1, 9, 33, 70))]
TIE = 1e-3


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        yield


def save(folder: Path, case: str) -> Any:
    """Save a random model and return it; its norms are random, too, and its reference attention is the plain one."""
    name, layers, changes = CASES[case]
    with quiet():
        torch.manual_seed(5)
        config = getattr(transformers, name)(**{**SIZES, "num_hidden_layers": layers, **changes})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder)
    return model


class Hidden(RunnerListener):
    """Keeps what the last norm gave, by request and position."""

    name = "hidden"

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], torch.Tensor] = {}
        self.tokens: dict[str, list[int]] = {}

    def on_hidden(self, batch: RunnerBatch, hidden: torch.Tensor) -> None:
        rows = iter(hidden)
        for row in batch.rows:
            for position in range(row.start, row.start + row.count):
                self.seen[row.request_id, position] = next(rows).clone()
            self.tokens[row.request_id] = [int(token) for token in row.tokens]


class Plugin:
    name = "hidden"
    headrace_api = ">=1,<2"

    def __init__(self) -> None:
        self.hidden = Hidden()

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        registrar.runner_listener("hidden", lambda context: self.hidden)


def logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What the reference's head makes of a hidden state."""
    cap = model.config.final_logit_softcapping
    with torch.inference_mode():
        logits: torch.Tensor = model.lm_head(hidden)
        return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize(("budget", "block_size"), [(7, 4), (512, 4), (7, 16), (512, 16)])
@pytest.mark.parametrize("case", CASES)
def test_every_position_is_transformers(case: str, budget: int, block_size: int, tmp_path: Path) -> None:
    model = save(tmp_path, case)
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
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    steps = llm.metrics()["num_steps"]
    assert steps <= 17 if budget == 512 else steps > 16 + 70 // 7 - 1
    windows = llm.report.windows
    assert None in windows
    assert 12 in windows
    compared = 0
    for request_id, tokens in plugin.hidden.tokens.items():
        with torch.inference_mode(), quiet():
            right = model(torch.tensor([tokens])).logits[0]
        for position in range(len(tokens)):
            ours = logits_of(model, plugin.hidden.seen[request_id, position])
            assert float((ours - right[position]).abs().max()) < 1e-4, (request_id, position)
            compared += 1
    assert compared == sum(map(len, PROMPTS)) + 4 * 15
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = output.outputs[0].token_ids
        with torch.inference_mode(), quiet():
            right = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        for token, row in zip(ids, right, strict=True):
            best = row.topk(2)
            assert token == int(best.indices[0]) or float(best.values[0] - best.values[1]) < TIE
    warm = llm.generate(PROMPTS, params, use_tqdm=False)
    assert warm[3].num_cached_tokens == 69 // block_size * block_size
    assert [o.outputs[0].token_ids for o in warm] == [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("case", ["gemma2", "gemma3-types"])
def test_logits_are_capped(case: str, tmp_path: Path) -> None:
    model = save(tmp_path, case)
    llm = LLM(str(tmp_path), dtype="float32", show_report=False, kv_cache_memory="4MiB")
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    (output,) = llm.generate([PROMPTS[2]], params, use_tqdm=False)
    with torch.inference_mode(), quiet():
        right = model(torch.tensor([PROMPTS[2]])).logits[0, -1]
    assert float(right.abs().max()) <= model.config.final_logit_softcapping
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    expected = right.log_softmax(-1)
    for token, found in logprobs[0].items():
        assert found.logprob == pytest.approx(float(expected[token]), abs=1e-4)


def test_old_and_new_spellings_of_positions(tmp_path: Path) -> None:
    """QNT-09. Sources: vllm-project/vllm#9481; huggingface/transformers#32167."""
    save(tmp_path, "gemma3")
    file = tmp_path / "config.json"
    new = json.loads(file.read_text())
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def answer() -> list[list[int]]:
        llm = LLM(str(tmp_path), dtype="float32", show_report=False, kv_cache_memory="4MiB")
        return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]

    right = answer()
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types")}
    old |= {
        "rope_theta": 1e5,
        "rope_local_base_freq": 1e3,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "sliding_window_pattern": 6,
    }
    file.write_text(json.dumps(old))
    assert answer() == right
    file.write_text(json.dumps({**old, "rope_local_base_freq": 1e5}))
    assert answer() != right


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters .*full_attention"),
        ({"layer_types": ["sliding_attention"]}, "layer_types .*6 layers"),
        ({"sliding_window": None}, "sliding_window"),
        ({"hidden_activation": "relu"}, "hidden_activation .*'relu'.*gelu_pytorch_tanh"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, Any], what: str, tmp_path: Path) -> None:
    save(tmp_path, "gemma3")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointError, match=what):
        LLM(str(tmp_path), show_report=False)


def test_a_head_of_its_own_beside_tied_embeddings_is_told_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Source: vllm-project/vllm#6758."""
    save(tmp_path, "gemma3-types")
    file = tmp_path / "model.safetensors"
    tensors, found = load_file(file), []
    embedding = tensors["model.embed_tokens.weight"]
    for head in ({}, {"lm_head.weight": embedding.flip(0)}):
        save_file({**tensors, **head}, file)
        with LLM(str(tmp_path), dtype="float32", show_report=False) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        told = [record.getMessage() for record in caplog.records if "lm_head.weight" in record.getMessage()]
        assert len(told) == len(head)
    assert found[0] == found[1]
    assert "model.embed_tokens.weight" in told[0]
