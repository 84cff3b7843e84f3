"""PEFT's format: what of it changes a result does so here, too, and what is not computed here is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.core.errors import ConfigError, RequestError
from headrace.core.interfaces.wrapping import Segment
from headrace.plugins.lora.adapter import Adapter, pack_adapter
from headrace.plugins.lora.files import read_files
from headrace.plugins.lora.location import AdapterMissingError, check_root, digest_of, stamp
from headrace.plugins.lora.modules import Targets

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def targets() -> Targets:
    """What the tiny base model has."""
    found = Targets()
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for names, outputs, inputs in (
            (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], [64, 32, 32], 64),
            (["self_attn.o_proj"], [64], 64),
            (["mlp.gate_proj", "mlp.up_proj"], [96, 96], 64),
            (["mlp.down_proj"], [64], 96),
        ):
            found.add([f"{prefix}.{name}" for name in names], outputs, inputs, [Segment(0, sum(outputs), 0)])
    return found


def pack(folder: Path) -> Adapter:
    return pack_adapter(read_files(folder), targets(), torch.float32, 64)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.down_proj": 12}, "alpha_pattern": {"q_proj": 1}},
        {"targets": ("self_attn.v_proj", "mlp.up_proj")},
        {"dtype": torch.bfloat16},
        {"init_lora_weights": "gaussian", "lora_alpha": 3.5},
    ],
    ids=["plain", "rslora", "patterns", "some modules", "bfloat16", "alpha"],
)
def test_answers_are_the_merged_model_s(
    tmp_path: Path,
    base: Any,
    adapter: Callable[..., Path],
    merge: Callable[[Any, Path], Any],
    config: dict[str, Any],
) -> None:
    folder = adapter(tmp_path / "a", 8, seed=11, **config)
    with LLM(str(base.folder), dtype="float32", lora_modules={"a": folder}, show_report=False) as llm:
        given = llm.generate(PROMPT, GREEDY, lora="a", use_tqdm=False)[0].outputs[0].token_ids
        plain = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    base.check(merge(base.model, folder), PROMPT, given)
    assert list(given) != list(plain)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_pickled_weights_are_read_as_far_as_they_are_plain_tensors(
    tmp_path: Path, adapter: Callable[..., Path], name: str
) -> None:
    folder = adapter(tmp_path / "a", 4)
    right = pack(folder)
    file = folder / "adapter_model.safetensors"
    torch.save(load_file(file), folder / name)
    file.unlink()
    got = pack(folder)
    for index, packed in right.products.items():
        for one, other in zip(packed.b, got.products[index].b, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


def test_pickled_code_is_not_run(tmp_path: Path, adapter: Callable[..., Path]) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    folder = adapter(tmp_path / "a", 4)
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"x": Evil()}, folder / "adapter_model.bin")
    with pytest.raises(RequestError, match=r"adapter_model.bin holds no plain tensors"):
        pack(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA is supported"),
        ({"use_dora": True}, "use_dora True asks for DoRA"),
        ({"bias": "lora_only"}, "bias 'lora_only' asks for trained biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
        ({"layer_replication": [[0, 2]]}, "replicated layers"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trained rows"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights 'pissa_niter_4' changed the base model's",
        ),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"r": 65}, r"r 65 is above the largest rank allowed, 64 \(max_lora_rank\)"),
        ({"r": 0}, "r must be a whole number from 1 on, got 0"),
        ({"r": "8"}, "r must be a whole number"),
        ({"rank_pattern": {"q_proj": 100}}, r"rank_pattern\['q_proj'\] 100 is above the largest rank"),
        ({"rank_pattern": {"q_proj": 3}}, "lora_A of module .*q_proj' has the shape .*rank 3"),
        ({"rank_pattern": {"(": 3}}, r"rank_pattern: '\(' is no pattern"),
        ({"rank_pattern": [1]}, "rank_pattern must map patterns"),
        ({"lora_alpha": None}, "lora_alpha must be a number, got None"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a number, got inf"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, adapter: Callable[..., Path], config: dict[str, Any], message: str
) -> None:
    folder = adapter(tmp_path / "a", 8)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    with pytest.raises(RequestError, match=message):
        pack(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {k.replace("q_proj", "query"): v for k, v in t.items()},
            "'model.layers.0.self_attn.query', which",
        ),
        (
            lambda t: {k.replace("model.layers.", "encoder."): v for k, v in t.items()},
            "this model does not have",
        ),
        (lambda t: {}, "it adapts no module of the model"),
        (lambda t: {**t, "surprise": torch.zeros(1)}, "tensor 'surprise' is no matrix of LoRA"),
        (lambda t: {k: v for k, v in t.items() if "k_proj.lora_B" not in k}, "k_proj' has no lora_B"),
        (
            lambda t: {k: v[:, :-1].contiguous() if "lora_A" in k else v for k, v in t.items()},
            "lora_A of module",
        ),
        (lambda t: {k: v.view(1, *v.shape) for k, v in t.items()}, "has the shape"),
        (lambda t: {k: v * float("nan") for k, v in t.items()}, r"holds numbers that are none"),
        (lambda t: {k: v.int() for k, v in t.items()}, "has the type I32"),
    ],
    ids=["renamed", "another model", "none", "unknown", "half", "narrow", "axes", "NaN", "integers"],
)
def test_weights_of_something_else_are_refused(
    tmp_path: Path,
    adapter: Callable[..., Path],
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    message: str,
) -> None:
    folder = adapter(tmp_path / "a", 8)
    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(RequestError, match=message):
        pack(folder)


def test_damaged_files_are_named_whatever_is_cut(tmp_path: Path, adapter: Callable[..., Path]) -> None:
    folder = adapter(tmp_path / "a", 4)
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole, said = file.read_bytes(), config.read_bytes()
    for place in range(0, len(whole), len(whole) // 40):
        file.write_bytes(whole[:place])
        with pytest.raises(RequestError, match="adapter"):
            pack(folder)
    file.write_bytes(whole)
    for text, message in (
        (b"", "is no JSON"),
        (b"[]", "must hold a JSON object, got a list"),
        (said[:-1], "no JSON"),
    ):
        config.write_bytes(text)
        with pytest.raises(RequestError, match=message):
            pack(folder)
    config.unlink()
    with pytest.raises(RequestError, match=r"it has no adapter_config.json"):
        pack(folder)
    config.write_bytes(said)
    file.unlink()
    with pytest.raises(RequestError, match=r"looked for: adapter_model.safetensors, "):
        pack(folder)
    with pytest.raises(AdapterMissingError, match="there is no such folder"):
        pack(tmp_path / "nowhere")


def test_a_digest_is_of_all_content_and_a_stamp_follows_it(
    tmp_path: Path, adapter: Callable[..., Path]
) -> None:
    folder = adapter(tmp_path / "a", 4, seed=1)
    before = digest_of(folder), stamp(folder)
    assert before[0] == pack(folder).digest == digest_of(folder)
    adapter(folder, 4, seed=2)
    assert digest_of(folder) != before[0]
    assert stamp(folder) != before[1]
    adapter(folder, 4, seed=1, lora_alpha=9)
    assert digest_of(folder) != before[0]


def test_paths_must_lie_below_a_root_links_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "a").mkdir(parents=True)
    outside.mkdir()
    (root / "link").symlink_to(outside)
    check_root(root / "a", [root.resolve()])
    check_root(outside, [])
    for path in (outside, root / "link", root / ".." / "outside", tmp_path / "rootless"):
        with pytest.raises(
            RequestError, match=r"is outside of the folders that are allowed: .*\(lora_roots\)"
        ):
            check_root(path, [root.resolve()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_modules": {"a": "nowhere"}}, "lora_modules: 'a': no adapter at 'nowhere'"),
        ({"lora_modules": "a"}, "lora_modules"),
        ({"lora_modules": {"": "x"}}, "an adapter's name has 1 to 256 characters"),
        ({"max_loras": 4, "max_cpu_loras": 2}, r"max_cpu_loras \(2\) must not be below max_loras \(4\)"),
    ],
)
def test_a_wrong_configuration_stops_the_start(base: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(base.folder), dtype="float32", show_report=False, **options)


def test_modules_may_be_told_as_texts_and_as_adapters(
    tmp_path: Path, base: Any, adapter: Callable[..., Path]
) -> None:
    folder = adapter(tmp_path / "a", 4)
    file = tmp_path / "headrace.yaml"
    file.write_text(
        f"model: {base.folder}\ndtype: float32\nadapters:\n  one: {folder}\nlora: {{max_loras: 2}}\n"
    )
    with LLM(config=file, show_report=False) as llm:
        first = llm.generate(PROMPT, GREEDY, lora="one", use_tqdm=False)[0].outputs[0].token_ids
    with LLM(str(base.folder), dtype="float32", lora_modules=[f"two={folder}"], show_report=False) as llm:
        second = llm.generate(PROMPT, GREEDY, lora="two", use_tqdm=False)[0].outputs[0].token_ids
    assert list(first) == list(second)


def test_the_copy_of_the_base_weight_that_peft_saves_is_passed_over(
    tmp_path: Path, base: Any, adapter: Callable[..., Path]
) -> None:
    folder = adapter(tmp_path / "a", 4, embeddings=True)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    names = [f"base_model.model.{name}.base_layer.weight" for name in ("model.embed_tokens", "lm_head")]
    save_file(tensors | {name: torch.zeros(131, 64) for name in names}, file)
    with LLM(str(base.folder), dtype="float32", lora_modules={"a": folder}, show_report=False) as llm:
        with_copies = llm.generate(PROMPT, GREEDY, lora="a", use_tqdm=False)[0].outputs[0].token_ids
    save_file(tensors, file)
    with LLM(str(base.folder), dtype="float32", lora_modules={"a": folder}, show_report=False) as llm:
        without = llm.generate(PROMPT, GREEDY, lora="a", use_tqdm=False)[0].outputs[0].token_ids
    assert list(with_copies) == list(without)
    save_file(tensors | {names[1]: torch.zeros(133, 64)}, file)
    with pytest.raises(ConfigError, match=r"of shape \[133, 64\], and this model's has \[131, 64\]"):
        LLM(str(base.folder), dtype="float32", lora_modules={"a": folder}, show_report=False)


def test_a_lookup_and_a_product_are_told_apart(
    tmp_path: Path, base: Any, adapter: Callable[..., Path]
) -> None:
    folder = adapter(tmp_path / "a", 4, embeddings=True)
    file = folder / "adapter_model.safetensors"
    renamed = {
        key.replace("lora_embedding_A", "lora_A.weight").replace("lora_embedding_B", "lora_B.weight"): value
        for key, value in load_file(file).items()
    }
    save_file(renamed, file)
    with pytest.raises(
        ConfigError, match="embed_tokens' is a lookup in this model, and the adapter's is not"
    ):
        LLM(str(base.folder), dtype="float32", lora_modules={"a": folder}, show_report=False)


def test_who_asks_wrongly_is_told(tmp_path: Path, base: Any, adapter: Callable[..., Path]) -> None:
    with LLM(str(base.folder), dtype="float32", show_report=False) as llm:
        with pytest.raises(
            RequestError, match="lora: this engine has no adapters; start it with lora_modules"
        ):
            llm.generate(PROMPT, GREEDY, lora="a", use_tqdm=False)
        assert llm.report.executor["op_sets"] == ["cpu", "torch"]
    modules = {"sql": adapter(tmp_path / "a", 4)}
    with LLM(str(base.folder), dtype="float32", lora_modules=modules, show_report=False) as llm:
        with pytest.raises(RequestError, match=r"no adapter 'sqk' \(did you mean 'sql'\?\); there are: sql"):
            llm.generate(PROMPT, GREEDY, lora="sqk", use_tqdm=False)
        with pytest.raises(RequestError, match="lora has 2 entries for 1 prompts"):
            llm.generate(PROMPT, GREEDY, lora=["sql", None], use_tqdm=False)
        with pytest.raises(RequestError, match="lora"):
            llm.generate(PROMPT, SamplingParams(lora=3), use_tqdm=False)
