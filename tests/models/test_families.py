"""Families on the shared decoder against transformers: same random weights, same logits, same greedy ids.

Windows are shorter than the prompts, sizes are odd, and query heads share KV heads, so that each matters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import Model, ModelDefinition
from headrace.models.decoder import DecoderDefinition
from headrace.models.granite import GraniteDefinition
from headrace.models.llama import LlamaDefinition
from headrace.models.mistral import MinistralDefinition, MistralDefinition
from headrace.models.olmo2 import Olmo2Definition, Olmo3Definition
from headrace.models.phi3 import Phi3Definition
from headrace.models.qwen2 import Qwen2Definition
from headrace.models.qwen3 import Qwen3Definition
from headrace.models.smollm3 import SmolLM3Definition

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PROMPT, NEW = 61, 16
"""Tokens of a prompt, and how many follow greedily: 77 altogether."""
TOLERANCE = 1e-4
TIE = 2e-4
"""How far below the best logit a token may lie to count as a tie with it."""

LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.4],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 13.0],
}
HALF_LONG = {
    **LONG,
    "partial_rotary_factor": 0.5,
    "short_factor": LONG["short_factor"][:3],  # type: ignore[index]
    "long_factor": LONG["long_factor"][:3],  # type: ignore[index]
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[type[DecoderDefinition], str, dict[str, Any]]] = {
    "llama-yarn": (LlamaDefinition, "Llama", {"rope_parameters": YARN}),
    "llama-dynamic": (
        LlamaDefinition,
        "Llama",
        {"rope_parameters": DYNAMIC, "max_position_embeddings": 40},
    ),
    "llama-dynamic-within": (LlamaDefinition, "Llama", {"rope_parameters": DYNAMIC}),
    "mistral": (MistralDefinition, "Mistral", {"sliding_window": None}),
    "mistral-window": (MistralDefinition, "Mistral", {"sliding_window": 20, "head_dim": 16}),
    "ministral": (
        MinistralDefinition,
        "Ministral",
        {"sliding_window": 9, "layer_types": MIXED, "head_dim": 12},
    ),
    "qwen2": (Qwen2Definition, "Qwen2", {"use_sliding_window": False, "sliding_window": 7}),
    "qwen2-window": (
        Qwen2Definition,
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen2-window-everywhere": (
        Qwen2Definition,
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 0},
    ),
    "qwen3": (Qwen3Definition, "Qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3-window": (
        Qwen3Definition,
        "Qwen3",
        {"head_dim": 20, "use_sliding_window": True, "sliding_window": 12, "layer_types": MIXED},
    ),
    "phi3": (Phi3Definition, "Phi3", {"sliding_window": None}),
    "phi3-window": (Phi3Definition, "Phi3", {"sliding_window": 14}),
    "phi3-long": (
        Phi3Definition,
        "Phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 32},
    ),
    "phi3-short": (
        Phi3Definition,
        "Phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 128},
    ),
    "phi4": (
        Phi3Definition,
        "Phi3",
        {"rope_parameters": HALF_LONG, "original_max_position_embeddings": 32, "tie_word_embeddings": True},
    ),
    "granite": (
        GraniteDefinition,
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.22,
            "logits_scaling": 0.6,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "olmo2": (Olmo2Definition, "Olmo2", {"attention_bias": True}),
    "olmo3": (
        Olmo3Definition,
        "Olmo3",
        {"sliding_window": 11, "rope_parameters": {"full_attention": YARN}, "layer_types": MIXED},
    ),
    "smollm3": (SmolLM3Definition, "SmolLM3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "smollm3-window": (
        SmolLM3Definition,
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 13},
    ),
}
WINDOWS = {
    "mistral-window": [20, 20, 20],
    "ministral": [9, None, 9],
    "qwen2-window": [None, 12, 12],
    "qwen2-window-everywhere": [12, 12, 12],
    "qwen3-window": [12, None, 12],
    "phi3-window": [14, 14, 14],
    "olmo3": [11, None, 11],
    "smollm3-window": [None, 13, None],
}
"""Of the layers; of families not named here no layer has one."""


def oracle(family: str) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """Return transformers' model, its config.json and its tensors; norms and biases are random too."""
    _, name, changes = FAMILIES[family]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:  # large enough for attention to look somewhere, and for the token itself to count
                parameter.mul_(40 if "embed" in parameter_name else 4)
    tensors = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    return model, config.to_dict(), tensors


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_and_greedy_ids_equal_transformers(family: str, dense: Any) -> None:
    reference, config, tensors = oracle(family)
    definition = FAMILIES[family][0]()
    definition.check(config)
    assert definition.max_model_len(config) >= PROMPT + NEW
    # As long as the text is: what frequencies by length are taken for in one call of transformers.
    build = dense.build(config, tensors, max_model_len=PROMPT + NEW)
    model = definition.build(build)
    assert isinstance(model, Model)
    assert not build.weights.left, "every tensor is used"
    assert [layer.window for layer in build.layers] == WINDOWS.get(
        family, [None] * config["num_hidden_layers"]
    )

    prompt = torch.randint(3, 131, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    ids = dense.greedy(model, prompt, NEW)
    expected = reference(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.3, "the logits say something"
    assert len(set(expected.argmax(-1).tolist())) > 5, "and not the same everywhere"
    for chunks in ([77], [40, 31, 6], [76, 1], [61] + [1] * 16):
        got = dense.run(model, ids, chunks)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
    steps = expected[PROMPT - 1 : -1]
    chosen = steps[torch.arange(NEW), torch.tensor(ids[PROMPT:])]
    assert bool((steps.max(-1).values - chosen <= TIE).all()), "each id is the best, or a tie with it"


@pytest.mark.parametrize("family", WINDOWS)
@torch.inference_mode()
def test_windows_matter(family: str, dense: Any) -> None:
    """Without its windows a model says something else: the equality above would see one left out."""
    _, config, tensors = oracle(family)
    ids = list(range(3, 80))
    definition = FAMILIES[family][0]()
    narrow = definition.build(dense.build(config, dict(tensors), max_model_len=77))
    wide = definition.build(dense.build(config | {"sliding_window": 500}, dict(tensors), max_model_len=77))
    differs = (dense.run(narrow, ids, [77]) - dense.run(wide, ids, [77])).abs().amax(-1)
    window = min(filter(None, WINDOWS[family]))
    assert differs[:window].max() < TOLERANCE
    assert differs[window:].max() > 0.05


@torch.inference_mode()
def test_a_file_may_bring_frequency_factors(dense: Any) -> None:
    """GGUF files of Llama 3.1 and later have divisors for the frequencies in place of a rope_scaling."""
    _, config, tensors = oracle("llama-dynamic-within")
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    ids = list(range(3, 80))
    stacked = {**tensors, "model.rotary_emb.freq_factors": torch.full((6,), 4.0)}
    got = LlamaDefinition().build(dense.build(config, stacked))
    linear = config | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}
    expected = LlamaDefinition().build(dense.build(linear, dict(tensors)))
    torch.testing.assert_close(
        dense.run(got, ids, [77]), dense.run(expected, ids, [77]), atol=TOLERANCE, rtol=0
    )


@torch.inference_mode()
def test_stacked_projections_may_come_as_their_parts(dense: Any) -> None:
    """Other formats split what Phi-3's own checkpoints stack: 72 queries, 24 keys, 24 values; 100 gates, 100 ups."""
    _, config, tensors = oracle("phi3-window")
    split = {}
    for name, tensor in tensors.items():
        begin, _, rest = name.rpartition("_proj.")
        parts: list[tuple[str, torch.Tensor]] = [(begin, tensor)]
        if begin.endswith("qkv"):
            parts = list(zip((begin[:-3] + part for part in "qkv"), tensor.split((72, 24, 24)), strict=True))
        elif begin.endswith("gate_up"):
            parts = list(zip((begin[:-3], begin[:-7] + "up"), tensor.split((100, 100)), strict=True))
            parts = [(part.removesuffix("_"), one) for part, one in parts]
        split.update({f"{part}_proj.{rest}" if begin else name: one for part, one in parts})
    assert len(split) == len(tensors) + 3 * 3
    whole = Phi3Definition().build(dense.build(config, dict(tensors)))
    ids = list(range(3, 80))
    build = dense.build(config, split)
    torch.testing.assert_close(
        dense.run(Phi3Definition().build(build), ids, [77]),
        dense.run(whole, ids, [77]),
        atol=TOLERANCE,
        rtol=0,
    )
    assert not build.weights.left


def test_definitions_name_their_architectures() -> None:
    for definition, name, _ in FAMILIES.values():
        one: ModelDefinition = definition()
        assert one.architectures == (f"{name}ForCausalLM",)
        assert one.max_model_len(SIZES) == 256


def test_what_a_silent_configuration_means() -> None:
    """As the architecture's own class says, not as other families do."""
    silent = {key: value for key, value in SIZES.items() if key != "tie_word_embeddings"}
    assert MistralDefinition().read(silent).windows == (4096,) * 3
    assert MistralDefinition().read({**silent, "sliding_window": None}).windows == (None,) * 3
    assert MinistralDefinition().read(silent).windows == (4096,) * 3
    assert Phi3Definition().read(silent).windows == (None,) * 3
    assert Phi3Definition().read(silent).eps == 1e-5
    assert Qwen3Definition().read(silent).head_dim == 128
    assert Olmo3Definition().read({**silent, "num_hidden_layers": 4}).windows == (4096, 4096, 4096, None)
    smollm3 = SmolLM3Definition().read({**silent, "num_hidden_layers": 4})
    assert smollm3.tied
    assert [rope and rope.theta for rope in smollm3.ropes] == [2e6, 2e6, 2e6, None]


def test_older_spellings() -> None:
    """OLMo 3's `rope_scaling` is for full layers alone; Phi-3's "su" and "yarn" are what is longrope now."""
    old = {**SIZES, "num_hidden_layers": 4, "rope_theta": 1e4, "rope_scaling": YARN}
    full, window = Olmo3Definition().read(old).ropes[3], Olmo3Definition().read(old).ropes[0]
    assert full is not None
    assert window is not None
    assert (full.scaling.attention_factor > 1, window.scaling.attention_factor) == (True, 1)
    now = Phi3Definition().read({**SIZES, "rope_scaling": LONG, "original_max_position_embeddings": 32})
    for word in ("su", "yarn"):
        scaling = {**LONG, "type": word}
        del scaling["rope_type"]
        before = {**SIZES, "rope_scaling": scaling, "original_max_position_embeddings": 32}
        assert Phi3Definition().read(before) == now


@pytest.mark.parametrize(
    ("definition", "changes", "words"),
    [
        (MistralDefinition, {"sliding_window": 0}, "sliding_window.*0"),
        (MistralDefinition, {"sliding_window": "4k"}, "sliding_window.*'4k'"),
        (MinistralDefinition, {"layer_types": ["full_attention"]}, "layer_types.*each of 3 layers"),
        (MinistralDefinition, {"layer_types": 3}, "layer_types.*got 3"),
        (MinistralDefinition, {"layer_types": ["full_attention", [], {}]}, "layer_types.*full_attention"),
        (Qwen2Definition, {"use_sliding_window": 1}, "use_sliding_window.*true or false.*1"),
        (Qwen2Definition, {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers.*-1"),
        (
            Qwen2Definition,
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": None},
            "no field 'sliding_window'",
        ),
        (Qwen3Definition, {"head_dim": 7}, "head_dim.*even.*7"),
        (Qwen3Definition, {"attention_bias": "no"}, "attention_bias.*'no'"),
        (Phi3Definition, {"rope_scaling": LONG | {"long_factor": [1]}}, "long_factor.*6 numbers.*12 .*has 1"),
        (Phi3Definition, {"partial_rotary_factor": 0.3}, "partial_rotary_factor.*0.3.*3 of 12"),
        (Phi3Definition, {"rope_scaling": "longrope"}, "rope_scaling.*'longrope'"),
        (GraniteDefinition, {"embedding_multiplier": 0}, "embedding_multiplier.*0"),
        (GraniteDefinition, {"attention_multiplier": None, "logits_scaling": -1}, "logits_scaling.*-1"),
        (GraniteDefinition, {"residual_multiplier": "x"}, "residual_multiplier.*'x'"),
        (Olmo2Definition, {"hidden_act": "gelu"}, "hidden_act.*gelu.*silu"),
        (
            Olmo3Definition,
            {"rope_parameters": {"full_attention": 4, "sliding_attention": {}}},
            "full_attention.*4",
        ),
        (SmolLM3Definition, {"no_rope_layers": [1, 0]}, r"no_rope_layers.*3 layers.*\[1, 0\]"),
        (SmolLM3Definition, {"no_rope_layers": [1, 0, 2]}, "no_rope_layers.*0 or 1"),
        (SmolLM3Definition, {"no_rope_layer_interval": 0}, "no_rope_layer_interval.*0"),
    ],
)
def test_check_names_field_and_value(
    definition: type[DecoderDefinition], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        definition().check({**SIZES, **changes})
