"""`LLM.embed`: decoders and encoders, in whatever chunks, beside whatever else runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, EmbeddingOutput, SamplingParams
from headrace.core.errors import ConfigError, RequestError

PROMPTS = [[random.Random(i).randrange(64) for _ in range(n)] for i, n in enumerate((50, 3, 1, 17, 64, 33))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def decoder(tiny_gguf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("decoder") / "tiny.gguf")


@pytest.fixture(scope="module")
def encoder(tiny_bert: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("encoder"))


def make(path: Path, **options: Any) -> LLM:
    return LLM(str(path), dtype="float32", show_report=False, **options)


def vectors(outputs: list[EmbeddingOutput]) -> torch.Tensor:
    return torch.tensor([output.embedding for output in outputs])


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_chunks_do_not_change_an_embedding(decoder: Path, pooling: str) -> None:
    found = []
    for budget in (16, 4096):
        with make(decoder, max_num_batched_tokens=budget) as llm:
            found.append(llm.embed(PROMPTS, pooling=pooling, use_tqdm=False))
            steps = llm.metrics()["num_steps"]
            # Two begin alike, and one of them waits a step; the last tells workers that all is over.
            assert steps >= 10 if budget == 16 else steps <= 3
    assert [output.prompt_token_ids for output in found[0]] == PROMPTS
    assert {output.pooling for output in found[0]} == {pooling}
    assert torch.allclose(vectors(found[0]), vectors(found[1]), atol=1e-5)
    assert torch.allclose(vectors(found[0]).norm(dim=1), torch.ones(len(PROMPTS)))


def test_without_normalization_the_length_is_kept(decoder: Path) -> None:
    with make(decoder) as llm:
        plain = vectors(llm.embed(PROMPTS, pooling="mean", normalize=False, use_tqdm=False))
        unit = vectors(llm.embed(PROMPTS, pooling="mean", use_tqdm=False))
    assert (plain.norm(dim=1) - 1).abs().min() > 0.1
    assert torch.allclose(torch.nn.functional.normalize(plain, dim=1), unit, atol=1e-6)


def test_decoders_pool_the_last_token_unless_told_otherwise(decoder: Path) -> None:
    with make(decoder) as llm:
        (output,) = llm.embed(PROMPTS[0], use_tqdm=False)
        (last,) = llm.embed(PROMPTS[0], pooling="last", use_tqdm=False)
    assert output.pooling == "last"
    assert torch.allclose(vectors([output]), vectors([last]), atol=1e-5)


def test_a_preempted_request_gives_the_same(decoder: Path) -> None:
    with make(decoder) as llm:
        right = vectors(llm.embed(PROMPTS, pooling="mean", use_tqdm=False))
    params = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)] * 4
    pooled = SamplingParams(max_tokens=0, pooling={"type": "mean"})
    with make(
        decoder,
        max_num_batched_tokens=16,
        num_kv_blocks=8,
        scheduling_policy="priority",
        enable_prefix_caching=False,
    ) as llm:
        # What is urgent takes the blocks of prompts that are half done.
        outputs = llm.generate(
            [*PROMPTS, *[[1, 2, 3]] * 4],
            [*[pooled] * len(PROMPTS), *params],
            priority=[*[5] * len(PROMPTS), *[0] * 4],
            use_tqdm=False,
        )
    assert all(output.error is None for output in outputs)
    assert sum(output.metrics.num_preemptions for output in outputs[: len(PROMPTS)]) > 0
    stashes = [output.outputs[0].stash for output in outputs[: len(PROMPTS)]]
    got = torch.tensor([next(stash[key] for key in stash).vector for stash in stashes])
    assert torch.allclose(got, right, atol=1e-5)
    assert not any(len(output.outputs[0].stash) for output in outputs[len(PROMPTS) :])


def test_generating_neighbours_do_not_notice(decoder: Path) -> None:
    with make(decoder, max_num_batched_tokens=64) as llm:
        alone = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    pooled = SamplingParams(max_tokens=0, pooling={"type": "mean"})
    with make(decoder, max_num_batched_tokens=64) as llm:
        right = vectors(llm.embed(PROMPTS, pooling="mean", use_tqdm=False))
        llm.reset_prefix_cache()
        both = [prompt for prompt in PROMPTS for _ in range(2)]
        outputs = llm.generate(both, [GREEDY, pooled] * len(PROMPTS), use_tqdm=False)
        assert llm.metrics()["iteration_requests_max"] > 2
    assert [output.outputs[0].token_ids for output in outputs[::2]] == alone
    finished = [output.outputs[0] for output in outputs[1::2]]
    assert {(answer.finish_reason, len(answer.token_ids)) for answer in finished} == {("length", 0)}
    got = torch.tensor([next(answer.stash[key] for key in answer.stash).vector for answer in finished])
    assert torch.allclose(got, right, atol=1e-5)


def test_a_warm_prefix_cache_hides_no_token(decoder: Path) -> None:
    with make(decoder) as llm:
        first = llm.embed(PROMPTS[4], pooling="mean", use_tqdm=False)
        again = llm.embed(PROMPTS[4], pooling="mean", use_tqdm=False)
        assert llm.metrics()["prefix_cache_hits"] == 0
        last = llm.embed(PROMPTS[4], use_tqdm=False)
        assert llm.metrics()["prefix_cache_hits"] > 0
    with make(decoder) as llm:
        right = llm.embed(PROMPTS[4], use_tqdm=False)
    assert torch.allclose(vectors(first), vectors(again), atol=1e-6)
    assert torch.allclose(vectors(last), vectors(right), atol=1e-5)


def test_a_prompt_may_fill_the_context(decoder: Path) -> None:
    with make(decoder, max_model_len=32) as llm:
        assert len(llm.embed([1] * 32, use_tqdm=False)) == 1
        with pytest.raises(RequestError, match="33 tokens, and with max_model_len 32 at most 32 fit"):
            llm.embed([1] * 33, use_tqdm=False)
        with pytest.raises(RequestError, match="at most 31 fit beside one answer token"):
            llm.generate([1] * 32, use_tqdm=False)


def test_a_wrong_pooling_is_named(decoder: Path) -> None:
    with make(decoder) as llm, pytest.raises(RequestError, match=r"pooling.type.*'max'"):
        llm.embed([1, 2], pooling="max")


def test_without_the_plugin_there_is_no_embedding(decoder: Path) -> None:
    with make(decoder, disable_plugins=["pooling"]) as llm, pytest.raises(RequestError, match="'pooling'"):
        llm.embed([1, 2])


def test_states_that_are_no_numbers_are_an_error(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    broken = torch.full((64,), float("nan")).numpy()
    path = tiny_gguf(tmp_path / "broken.gguf", tensors={"output_norm.weight": broken})
    with make(path) as llm, pytest.raises(RequestError, match=r"prompt 0 has no embedding: .*not finite"):
        llm.embed([[1, 2], [3, 4]], use_tqdm=False)


# Encoders


def test_encoders_read_prompts_whole_whatever_the_step(encoder: Path) -> None:
    prompts = [prompt[:48] for prompt in PROMPTS]
    found = []
    for budget in (48, 4096):
        with make(encoder, max_num_batched_tokens=budget) as llm:
            found.append(llm.embed(prompts, use_tqdm=False))
            steps = llm.metrics()["num_steps"]
            assert steps >= 4 if budget == 48 else steps <= 2
            assert llm.metrics()["kv_blocks_free"] == llm.metrics()["kv_blocks_total"]
    assert {output.pooling for output in found[0]} == {"mean"}
    assert torch.allclose(vectors(found[0]), vectors(found[1]), atol=1e-5)
    with make(encoder, max_num_seqs=1) as llm:
        alone = vectors([llm.embed(prompt, use_tqdm=False)[0] for prompt in prompts])
    assert torch.allclose(alone, vectors(found[1]), atol=1e-5)


def test_a_small_step_shortens_the_longest_prompt(encoder: Path) -> None:
    with make(encoder, max_num_batched_tokens=20) as llm:
        assert "max_model_len lowered to 20" in str(llm.report)
        llm.embed([1] * 20, use_tqdm=False)
        with pytest.raises(RequestError, match="21 tokens"):
            llm.embed([1] * 21)
    with make(encoder, long_prefill_token_threshold=30) as llm:
        assert "max_model_len lowered to 30" in str(llm.report)
        assert len(llm.embed([[1] * 30] * 3, use_tqdm=False)) == 3


@pytest.mark.parametrize("option", ["max_num_batched_tokens", "long_prefill_token_threshold"])
def test_a_step_too_small_for_the_length_asked_for(encoder: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=f"encoder.*{option} is 20.*max_model_len 40.*raise {option}"):
        make(encoder, max_model_len=40, **{option: 20})


def test_an_encoder_does_not_generate(encoder: Path) -> None:
    with make(encoder) as llm:
        for params in (GREEDY, None):
            with pytest.raises(RequestError, match=r"encoder.*embed"):
                llm.generate([1, 2, 3], params)
        with pytest.raises(RequestError, match="prompt_logprobs"):
            llm.generate([1, 2, 3], SamplingParams(max_tokens=0, prompt_logprobs=1))
        assert len(llm.embed([1, 2, 3], use_tqdm=False)) == 1


def test_an_encoder_shares_no_prefix(encoder: Path) -> None:
    with make(encoder) as llm:
        first = llm.embed([1] * 32, pooling="last", use_tqdm=False)
        longer = llm.embed([1] * 32 + [2] * 8, pooling="last", use_tqdm=False)
        assert llm.metrics()["prefix_cache_hits"] == 0
        assert "prefix caching off" in str(llm.report)
    assert not torch.allclose(vectors(first), vectors(longer), atol=1e-3)


# Real weights


@pytest.mark.weights
def test_smollm2_means_are_those_of_transformers(oracle: Any) -> None:
    texts = ["The capital of France is Paris.", "A", "Rain falls mainly on the plain. " * 30]
    with LLM(
        "smollm2", dtype="float32", max_model_len=512, max_num_batched_tokens=64, show_report=False
    ) as llm:
        outputs = llm.embed(texts, pooling="mean", use_tqdm=False)
        assert llm.metrics()["num_steps"] >= 4
    for output in outputs:
        right = oracle.hidden(output.prompt_token_ids).mean(0)
        cosine = torch.nn.functional.cosine_similarity(right, torch.tensor(output.embedding), dim=0)
        assert float(cosine) >= 0.99999


SUBJECTS = (
    "A cat",
    "The old engineer",
    "Nobody",
    "My sister's café",
    "The weather in 1987",
    "¿Quién",
    "東京",
    "GPU",
    "It",
    "",
)
ENDINGS = (
    " sleeps.",
    " wrote three letters to the editor, and none of them was printed!",
    " runs faster than expected, " * 12,
    " #42 @home – naïve Straße",
    "?",
)
SENTENCES = [subject + ending for subject in SUBJECTS for ending in ENDINGS]


@pytest.fixture(scope="module")
def minilm() -> Iterator[LLM]:
    with LLM("minilm", dtype="float32", show_report=False) as llm:
        yield llm


@pytest.mark.weights
def test_minilm_embeddings_are_those_of_transformers(minilm: LLM) -> None:
    import transformers

    folder = Path(minilm.report.path)
    assert {"modules.json", "1_Pooling/config.json"} <= {
        str(path.relative_to(folder)) for path in folder.rglob("*.json")
    }
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = minilm.embed(SENTENCES, use_tqdm=False)
    assert len(outputs) == 50
    assert minilm.metrics()["iteration_requests_max"] > 8
    for sentence, output in zip(SENTENCES, outputs, strict=True):
        assert output.pooling == "mean"
        inputs = tokenizer(sentence, return_tensors="pt")
        assert output.prompt_token_ids == inputs.input_ids[0].tolist()
        with torch.inference_mode():
            right = reference(**inputs).last_hidden_state[0].mean(0)
        cosine = torch.nn.functional.cosine_similarity(right, torch.tensor(output.embedding), dim=0)
        assert float(cosine) >= 0.99999


@pytest.mark.weights
def test_minilm_finds_what_means_the_same(minilm: LLM) -> None:
    texts = ["How do I bake bread?", "A recipe for a loaf", "The stock market fell today"]
    found = vectors(minilm.embed(texts, use_tqdm=False))
    assert float(found[0] @ found[1]) > float(found[0] @ found[2]) + 0.2


@pytest.mark.weights
def test_minilm_texts_are_neither_cut_nor_filled_up(minilm: LLM) -> None:
    assert len(minilm.encode("hello")) == 3
    assert len(minilm.encode("hello " * 300)) == 302
    with pytest.raises(RequestError, match="at most 512 fit"):
        minilm.embed("hello " * 600)
