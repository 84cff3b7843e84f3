"""Hugging Face folders through the real engine: what loads answers as transformers does, what does not is named."""

from __future__ import annotations

import contextlib
import json
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace import LLM, EngineConfig, SamplingParams
from headrace.core.errors import CheckpointError
from headrace.core.interfaces.build import ExecutorBuild
from headrace.executors.loading import load_model

PROMPTS = [[(7 * i + 3 * k) % 128 for i in range(length)] for k, length in enumerate((1, 9, 33))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TIE = 1e-3
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@contextlib.contextmanager
def quiet() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        yield transformers


def save(folder: Path, *, tied: bool = False, **how: Any) -> Any:
    """Save a random Llama and return it."""
    with quiet() as transformers:
        torch.manual_seed(3)
        config = transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            initializer_range=0.3,
        )
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(folder, **how)
    return model


def answers(folder: Path, **options: Any) -> list[tuple[int, ...]]:
    with LLM(str(folder), dtype="float32", show_report=False, **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def check_against(model: Any, found: list[tuple[int, ...]]) -> None:
    for prompt, given in zip(PROMPTS, found, strict=True):
        assert len(given) == GREEDY.max_tokens
        tokens = list(prompt)
        for token in given:
            with torch.inference_mode(), quiet():
                best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
            assert token == int(best.indices[0]) or float(best.values[0] - best.values[1]) < TIE
            tokens.append(token)


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Add tensors to the one file (`__` stands for a dot), or take them out."""
    file = folder / "model.safetensors"
    held = load_file(file)
    for name, tensor in tensors.items():
        held.pop(name.replace("__", "."), None)
        if tensor is not None:
            held[name.replace("__", ".")] = tensor.clone()
    save_file(held, file)


def test_folder_file_and_shards_answer_as_transformers_does(tmp_path: Path) -> None:
    model = save(tmp_path / "one")
    save(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) >= 3
    found = answers(tmp_path / "one")
    check_against(model, found)
    assert answers(tmp_path / "many") == found
    assert answers(tmp_path / "one" / "model.safetensors") == found


@pytest.mark.parametrize("how", [{}, {"max_shard_size": "60KB"}], ids=["one", "shards"])
def test_a_tied_head_of_its_own_name_is_not_needed(how: dict[str, Any], tmp_path: Path) -> None:
    """QNT-02. Sources: vllm-project/vllm#53019; sgl-project/sglang#1508."""
    model = save(tmp_path, tied=True, **how)
    assert not any(HEAD in load_file(file) for file in tmp_path.glob("*.safetensors"))
    check_against(model, answers(tmp_path))


@pytest.mark.parametrize("implementation", ["llama", "transformers"])
@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_that_is_there_changes_nothing(
    same: bool, implementation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """QNT-01. Source: vllm-project/vllm#6758."""
    model = save(tmp_path, tied=True)
    embedding = load_file(tmp_path / "model.safetensors")[EMBEDDING]
    change(tmp_path, lm_head__weight=embedding if same else embedding.flip(0))
    check_against(model, answers(tmp_path, model_impl=implementation))
    told = [record.getMessage() for record in caplog.records if HEAD in record.getMessage()]
    assert len(told) == (0 if same else 1)
    assert all(EMBEDDING in text for text in told)


def test_tensors_of_no_use_are_passed_over_and_unknown_ones_named(tmp_path: Path) -> None:
    """QNT-10. Source: vllm-project/vllm#1687."""
    model = save(tmp_path)
    change(
        tmp_path,
        model__nothing=torch.empty(0),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),
    )
    check_against(model, answers(tmp_path))
    for unknown in ("model.layers.0.extra", "scalar"):
        change(tmp_path, **{unknown.replace(".", "__"): torch.tensor(1.0)})
        with pytest.raises(CheckpointError, match=f"does not use.*{unknown}"):
            answers(tmp_path)
        change(tmp_path, **{unknown.replace(".", "__"): None})
    answers(tmp_path)


def test_a_tensor_of_another_name_or_shape_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    held = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    change(tmp_path, model__norm__weight=None, model__norms__weight=held)
    with pytest.raises(
        CheckpointError, match=r"no tensor 'model\.norm\.weight' \(did you mean 'model\.norms\.weight'"
    ):
        answers(tmp_path)
    change(tmp_path, model__norms__weight=None, model__norm__weight=held[:-1])
    with pytest.raises(
        CheckpointError, match=r"'model\.norm\.weight' has the shape \[63\]; .*asks for \[64\]"
    ):
        answers(tmp_path)


def test_what_is_missing_of_a_sharded_checkpoint_is_named(tmp_path: Path) -> None:
    """QNT-03, QNT-11. Sources: sgl-project/sglang#32279; QwenLM/Qwen3-VL#264."""
    save(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = shard.read_bytes()

    held = load_file(shard)
    name = sorted(held)[0]
    del held[name]
    save_file(held, shard)
    with pytest.raises(CheckpointError, match=rf"index\.json names tensors that no shard holds: {name}"):
        answers(tmp_path)

    shard.write_bytes(b"\xff" * 16 + whole[16:])
    with pytest.raises(CheckpointError, match=shard.name):
        answers(tmp_path)
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged or cut off"):
        answers(tmp_path)

    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"index\.json names the shard"):
        answers(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        answers(tmp_path)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_words_for_the_type_of_the_weights(key: str, tmp_path: Path) -> None:
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps({**config, key: "bfloat16"}))
    with LLM(str(tmp_path), show_report=False) as llm:
        assert "bfloat16" in str(llm.report)


@pytest.mark.parametrize("stated", [{}, {"dtype": None, "torch_dtype": None}], ids=["silent", "null"])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_the_weights_say_their_type_where_the_configuration_does_not(
    stored: str, stated: dict[str, Any], tmp_path: Path
) -> None:
    model = save(tmp_path)
    model.to(getattr(torch, stored)).save_pretrained(tmp_path)
    # A few numbers of another type, as norms often are, decide nothing.
    change(tmp_path, model__norm__weight=torch.ones(64, dtype=torch.float64))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("dtype") == stored
    (tmp_path / "config.json").write_text(json.dumps({**config, **stated}))
    with LLM(str(tmp_path), show_report=False) as llm:
        assert llm.report.executor["dtype"] == stored
        assert llm.report.executor["weights_bytes"] == sum(
            math.prod(tensor.shape) * getattr(torch, stored).itemsize for tensor in model.parameters()
        )
    with LLM(str(tmp_path), dtype="float32", show_report=False) as llm:
        assert llm.report.executor["dtype"] == "float32"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_attention_heads": 3}, "hidden_size (64) in the model's configuration must be a multiple of"),
        ({"num_hidden_layers": 0}, "num_hidden_layers in the model's configuration must be a whole number"),
        ({"architectures": ["NobodysModel"]}, "the model's architecture is NobodysModel"),
        (
            {"architectures": ["GlmForCausalLM"], "quantization_config": None, "is_encoder_decoder": True},
            "GlmForCausalLM cannot run through transformers' attention interface: it has an encoder",
        ),
    ],
)
def test_a_wrong_configuration_is_named_by_its_file(
    changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    save(tmp_path)
    file = tmp_path / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    if "num_attention_heads" in changes:
        del config["head_dim"], config["num_key_value_heads"]
    file.write_text(json.dumps(config))
    for given in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointError) as caught:
            answers(given)
        assert str(caught.value).startswith(f"{file}: {what}")
        assert str(caught.value).count(str(file)) == 1


def test_a_worker_that_opens_the_checkpoint_names_its_file(tmp_path: Path, models_registry: Any) -> None:
    save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": "many"}))
    build = ExecutorBuild(
        config=EngineConfig(model=str(tmp_path)),
        registry=models_registry,
        model_path=tmp_path,
        max_model_len=64,
        dtype="float32",
    )
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(file))}: vocab_size .*got 'many'"):
        load_model(build, "cpu")


def test_text_goes_in_and_comes_out(tmp_path: Path) -> None:
    save(tmp_path)
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<s>"], initial_alphabet=[*map(chr, range(33, 127)), "Ġ"]
    )
    engine.train_from_iterator(["the quick brown fox"] * 3, trainer)
    engine.save(str(tmp_path / "tokenizer.json"))
    with LLM(str(tmp_path), dtype="float32", show_report=False) as llm:
        (output,) = llm.generate("the quick fox", GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == engine.encode("the quick fox").ids
    ids = list(output.outputs[0].token_ids)
    assert output.outputs[0].text == engine.decode([at for at in ids if at < engine.get_vocab_size()])
