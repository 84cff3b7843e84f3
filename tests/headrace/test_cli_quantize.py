"""`headrace quantize`: what it writes loads again, with the weights of the online method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from headrace import LLM, SamplingParams
from headrace.cli.app import main

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * k) % 128 for i in range(length)] for k, length in enumerate((1, 9, 33))]


def call(*words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == code


def answers(model: Path, **options: Any) -> list[Any]:
    with LLM(str(model), dtype="float32", show_report=False, **options) as llm:
        return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("method", ["int4", "int8", "w8a8"])
def test_what_is_written_is_what_the_method_makes(
    method: str, tiny_llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    call("quantize", str(tiny_llama_folder), "--method", method, "-o", str(out), "--json")
    told = json.loads(capsys.readouterr().out)
    assert len(told["layers"]) == 14
    assert all(0 < layer["error"] < (0.2 if method == "int4" else 0.02) for layer in told["layers"])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    with safe_open(out / "model.safetensors", "pt") as file:
        assert ("model.layers.0.mlp.up_proj.weight_packed" in file.keys()) == (method != "w8a8")  # noqa: SIM118
    online = {"quantization": {"ignore": ["lm_head"]}}
    assert answers(out) == answers(tiny_llama_folder, quantization=method, plugin_options=online)


def test_layers_that_are_left_out_and_a_folder_that_is_not_empty(
    tiny_llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    flags = ("--group-size", "32", "--ignore", "mlp", "--ignore", "re:.*layers.1.*")
    call("quantize", str(tiny_llama_folder), "-o", out, *flags)
    told = capsys.readouterr().out
    assert [line.split()[0].rpartition(".")[2] for line in told.splitlines()[1:-1]] == [
        *("k_proj", "o_proj", "q_proj", "v_proj")
    ]
    assert len(answers(Path(out))) == 3
    call("quantize", str(tiny_llama_folder), "-o", out, code=2)
    assert "is not empty" in capsys.readouterr().err
    call("quantize", str(tiny_llama_folder), "-o", str(tmp_path / "b"), "--group-size", "64", code=2)
    assert "those that do: 32" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    call("quantize", out, "-o", str(tmp_path / "c"), code=2)
    assert "quantized already" in capsys.readouterr().err
