"""Sampling, stopping and log-probabilities on the real model, end to end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import LLM, RequestOutput, SamplingParams, hookimpl
from headrace.core.interfaces import LogitsRow

pytestmark = pytest.mark.weights


def make(**options: Any) -> LLM:
    return LLM("smollm2", dtype="float32", max_model_len=512, show_report=False, **options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make() as made:
        yield made


def run(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    (output,) = llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
    return output


def drawn(llm: LLM, prompt: Any, **params: Any) -> list[int]:
    return run(llm, prompt, **params).outputs[0].token_ids


# Seeds --------------------------------------------------------------------------------------------------


def test_a_seeded_request_does_not_depend_on_its_neighbours(llm: LLM) -> None:
    """Source: vllm-project/vllm#51226."""
    x = SamplingParams(seed=11, temperature=0.9, max_tokens=24, ignore_eos=True)
    answers = set()
    for neighbours, _ in itertools.product((0, 1, 7), range(2)):
        others = [SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True)] * neighbours
        outputs = llm.generate(["the river"] * (1 + neighbours), [x, *others], use_tqdm=False)
        answers.add(tuple(outputs[0].outputs[0].token_ids))
    assert len(answers) == 1


def test_seeds_repeat_and_differ(llm: LLM) -> None:
    """Source: vllm-project/vllm#21310."""
    five = [drawn(llm, "The sea", seed=5, temperature=1.2, max_tokens=40) for _ in range(3)]
    six = [drawn(llm, "The sea", seed=6, temperature=1.2, max_tokens=40) for _ in range(3)]
    free = [drawn(llm, "The sea", temperature=1.2, max_tokens=40) for _ in range(3)]
    assert five[0] == five[1] == five[2]
    assert six[0] == six[1] == six[2]
    assert five[0] != six[0]
    assert len({tuple(answer) for answer in free}) > 1


def test_n_children_draw_with_the_seeds_that_follow(llm: LLM) -> None:
    output = run(llm, "A dog", n=3, seed=40, temperature=1.0, max_tokens=12, ignore_eos=True)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    singles = [
        drawn(llm, "A dog", seed=40 + i, temperature=1.0, max_tokens=12, ignore_eos=True) for i in range(3)
    ]
    assert [one.token_ids for one in output.outputs] == singles
    assert len({tuple(single) for single in singles}) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 32},
        {"max_num_seqs": 1},
        {"enable_prefix_caching": False},
        {"num_kv_blocks": 32},
    ],
    ids=str,
)
def test_seeded_draws_are_the_same_in_every_mode(llm: LLM, options: dict[str, Any]) -> None:
    prompts = [[i + 5] * (8 * i + 70) for i in range(6)]
    params = [
        SamplingParams(
            seed=i,
            temperature=0.8,
            top_p=0.9,
            top_k=50,
            presence_penalty=0.5,
            repetition_penalty=1.2,
            max_tokens=40,
            ignore_eos=True,
        )
        for i in range(6)
    ]
    right = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    other = make(**options)
    got = other.generate(prompts, params, use_tqdm=False)
    metrics = other.metrics()
    if "num_kv_blocks" in options:
        assert metrics["num_preemptions"] > 0
    if "max_num_batched_tokens" in options:
        assert metrics["iteration_tokens_total_sum"] / metrics["num_steps"] <= 32
    # float32 sums differ in their last bits with the shape of a step, so one answer of six may fall otherwise.
    equal = sum(output.outputs[0].token_ids == answer for output, answer in zip(got, right, strict=True))
    assert equal >= 5


@pytest.mark.parametrize(
    "params",
    [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 0.0, "top_p": 0.3, "top_k": 7}],
    ids=str,
)
def test_degenerate_settings_are_greedy(llm: LLM, params: dict[str, Any]) -> None:
    greedy = drawn(llm, "The moon is", temperature=0, max_tokens=12)
    assert drawn(llm, "The moon is", **{"temperature": 1.0, "seed": 3, "max_tokens": 12, **params}) == greedy


# Penalties and bias -------------------------------------------------------------------------------------


def test_penalties_know_prompt_from_output(llm: LLM) -> None:
    """Sources: vllm-project/vllm-metal#69, NVIDIA/TensorRT-LLM#5623."""
    prompt = llm.encode(" one two" * 12)
    base = {"temperature": 0, "max_tokens": 1}
    # The model goes on with the pattern; a penalty on what was generated does not keep it from that.
    (token,) = drawn(llm, prompt, **base)
    assert token in prompt
    assert drawn(llm, prompt, frequency_penalty=2.0, **base) == [token]
    assert drawn(llm, prompt, presence_penalty=2.0, **base) == [token]
    assert drawn(llm, prompt, repetition_penalty=1.9, **base) != [token]
    plain = drawn(llm, prompt, temperature=0, max_tokens=30, ignore_eos=True)
    penalized = drawn(llm, prompt, temperature=0, max_tokens=30, ignore_eos=True, frequency_penalty=2.0)
    assert penalized.count(token) < plain.count(token)


def test_a_penalty_concerns_its_request_alone(llm: LLM) -> None:
    """Source: vllm-project/vllm#28307."""
    prompts = [f"Story number {i}:" for i in range(8)]
    lengths = [4, 9, 14, 19, 24, 29, 6, 11]
    plain = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    mixed = list(plain)
    mixed[2] = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, repetition_penalty=1.3)
    mixed[5] = SamplingParams(temperature=0, max_tokens=29, ignore_eos=True, presence_penalty=-1.5)
    alone = [
        drawn(llm, p, **params.model_dump(exclude_unset=True))
        for p, params in zip(prompts, plain, strict=True)
    ]
    together = [o.outputs[0].token_ids for o in llm.generate(prompts, mixed, use_tqdm=False)]
    for i in (0, 1, 3, 4, 6, 7):
        assert together[i] == alone[i]
    assert together[2] != alone[2]


def test_bias_forces_and_bans_also_when_greedy(llm: LLM) -> None:
    """Source: vllm-project/vllm#6866."""
    first = drawn(llm, "The sun", temperature=0, max_tokens=1)[0]
    assert drawn(llm, "The sun", temperature=0, max_tokens=3, logit_bias={"5": 1000}) == [5, 5, 5]
    assert drawn(llm, "The sun", temperature=0, max_tokens=1, logit_bias={first: -100}) != [first]


def test_min_tokens_holds_off_the_end(llm: LLM) -> None:
    end = llm.front.eos_token_ids[0]
    forced = {"temperature": 0, "max_tokens": 10, "logit_bias": {end: 100}}
    assert drawn(llm, "Hi", **forced) == [end]
    held = run(llm, "Hi", min_tokens=5, **forced).outputs[0]
    assert len(held.token_ids) == 6
    assert held.token_ids[-1] == end
    assert end not in held.token_ids[:-1]
    ignored = drawn(llm, "Hi", ignore_eos=True, **forced)
    assert ignored == [end] * 10


# Stopping -----------------------------------------------------------------------------------------------


def pieces(llm: LLM, prompt: str, count: int) -> tuple[str, list[str]]:
    """The answer without a stop, and each token's share of its text."""
    output = run(llm, prompt, temperature=0, max_tokens=count, ignore_eos=True).outputs[0]
    tokenizer = llm.front.tokenizer
    assert tokenizer is not None
    shares = [tokenizer.token_bytes(token).decode() for token in output.token_ids]
    assert "".join(shares) == output.text
    return output.text, shares


@pytest.mark.parametrize("tokens", [2, 3])
def test_a_stop_string_over_token_borders_leaves_no_trace(llm: LLM, tokens: int) -> None:
    """Sources: sgl-project/sglang#11446, huggingface/text-generation-inference#1724."""
    prompt = "The history of the city begins"
    text, shares = pieces(llm, prompt, 24)
    before = "".join(shares[:8])
    # From inside token 8 to inside the last of `tokens`.
    stop = "".join(shares[8 : 8 + tokens])[1:-1] or shares[8]
    stop = stop if text.index(stop) >= len(before) else text[len(before) + 1 : len(before) + 12]
    expected = text[: text.index(stop)]
    params = SamplingParams(temperature=0, max_tokens=24, stop=stop)
    whole = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    deltas = list(llm.stream(prompt, params))
    assert whole.text == expected
    assert "".join(delta.text for delta in deltas) == expected
    assert (whole.finish_reason, whole.stop_reason) == ("stop", stop)
    kept = llm.generate(
        prompt, params.model_copy(update={"include_stop_str_in_output": True}), use_tqdm=False
    )
    assert kept[0].outputs[0].text == expected + stop
    metrics = llm.metrics()
    assert metrics["kv_blocks_free"] == metrics["kv_blocks_total"]


def test_good_text_in_the_token_that_begins_a_stop_is_kept(llm: LLM) -> None:
    """Source: ggml-org/llama.cpp#9867."""
    prompt = "The history of the city begins"
    text, shares = pieces(llm, prompt, 24)
    index = next(
        i for i in range(5, 20) if len(shares[i]) > 4 and text.count(shares[i][3:] + shares[i + 1]) == 1
    )
    stop = shares[index][3:] + shares[index + 1]
    expected = text[: text.index(stop)]
    assert expected.endswith(shares[index][:3])
    params = SamplingParams(temperature=0, max_tokens=24, stop=[stop])
    assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text == expected
    assert "".join(delta.text for delta in llm.stream(prompt, params)) == expected


def test_a_stop_string_waits_for_min_tokens(llm: LLM) -> None:
    """Source: vllm-project/vllm#21987."""
    prompt = "The history of the city begins"
    _, shares = pieces(llm, prompt, 24)
    stop = shares[2]
    early = run(llm, prompt, temperature=0, max_tokens=40, stop=[stop]).outputs[0]
    late = run(llm, prompt, temperature=0, max_tokens=40, stop=[stop], min_tokens=20).outputs[0]
    assert len(early.token_ids) <= 3
    assert len(late.token_ids) >= 20


def test_a_stop_token_ends_and_is_hidden(llm: LLM) -> None:
    prompt = "The history of the city begins"
    ids = drawn(llm, prompt, temperature=0, max_tokens=10)
    stop = next(token for token in ids[3:] if token not in ids[:3])
    output = run(llm, prompt, temperature=0, max_tokens=10, stop_token_ids=[stop]).outputs[0]
    assert output.token_ids == ids[: ids.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    shown = run(
        llm, prompt, temperature=0, max_tokens=10, stop_token_ids=[stop], include_stop_str_in_output=True
    ).outputs[0]
    assert len(shown.text) > len(output.text)
    assert shown.text.startswith(output.text)


class Script:
    """A plugin that makes the model say given ids."""

    name = "script"
    headrace_api = ">=1,<2"

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        def factory(params: SamplingParams) -> Any:
            script = params.options.get("script")

            def process(row: LogitsRow, logits: Any) -> Any:
                logits[script[row.position - row.num_prompt_tokens]] = 1000.0
                return logits

            return process if script else None

        registrar.request_option("script", list[int])
        registrar.logits_processor("script", factory)


def test_characters_of_several_tokens_come_whole() -> None:
    """Sources: waybarrios/vllm-mlx#109 and #195."""
    text = "źdźbło 🙂 漢字 ďábel"
    llm = make(plugins=[Script()])
    script = llm.encode(text)
    tokenizer = llm.front.tokenizer
    assert tokenizer is not None
    replaced = "\N{REPLACEMENT CHARACTER}"
    assert any(replaced in tokenizer.token_bytes(token).decode(errors="replace") for token in script)
    params = SamplingParams(temperature=0, max_tokens=len(script), script=script)
    deltas = [delta.text for delta in llm.stream("x", params)]
    assert "".join(deltas) == text
    assert all(replaced not in delta for delta in deltas)
    assert llm.generate("x", params, use_tqdm=False)[0].outputs[0].text == text


# Log-probabilities --------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own(llm: LLM, oracle: Any) -> None:
    import torch

    prompt = llm.encode("Rain falls mainly")
    output = run(llm, prompt, temperature=1.0, seed=1, top_k=3, max_tokens=4, logprobs=5).outputs[0]
    right = torch.log_softmax(oracle.logits(prompt + output.token_ids)[len(prompt) - 1 :], dim=-1)
    assert output.logprobs is not None
    total = 0.0
    for i, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert token in entry
        assert 5 <= len(entry) <= 6
        assert entry[token].rank == int((right[i] > right[i][token]).sum()) + 1
        for candidate, value in entry.items():
            assert math.isclose(value.logprob, float(right[i][candidate]), abs_tol=1e-4)
        total += entry[token].logprob
    assert math.isclose(output.cumulative_logprob or 0.0, total, abs_tol=1e-6)


def test_logprobs_zero_gives_the_chosen_token_alone(llm: LLM) -> None:
    output = run(llm, "Rain", temperature=0, max_tokens=3, logprobs=0).outputs[0]
    assert [list(entry) for entry in output.logprobs or []] == [[token] for token in output.token_ids]


@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 32}, {"max_num_batched_tokens": 4096}], ids=str
)
def test_prompt_logprobs_cold_and_warm_chunked_and_whole(oracle: Any, options: dict[str, Any]) -> None:
    """Sources: vllm-project/vllm#8268, #5344, #3251."""
    import torch

    llm = make(**options)
    prompt = [(i * 37) % 4000 + 10 for i in range(3 * 16 + 1 + 60)]
    right = torch.log_softmax(oracle.logits(prompt), dim=-1)
    for _ in range(2):
        output = run(llm, prompt, temperature=0, max_tokens=1, prompt_logprobs=1, logprobs=1)
        entries = output.prompt_logprobs
        assert entries is not None
        assert len(entries) == len(prompt)
        assert entries[0] is None
        for i in range(1, len(prompt)):
            entry = entries[i]
            assert entry is not None
            assert math.isclose(entry[prompt[i]].logprob, float(right[i - 1][prompt[i]]), abs_tol=1e-3)
        llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)  # warms the cache
    assert llm.metrics()["prefix_cache_hits"] > 0


def test_prompt_logprobs_survive_preemption() -> None:
    tight = make(num_kv_blocks=32, max_num_batched_tokens=64)
    roomy = make()
    prompts = [[(i * k) % 4000 + 10 for i in range(100)] for k in (37, 41, 43, 47)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, prompt_logprobs=0)
    got = tight.generate(prompts, params, use_tqdm=False)
    right = roomy.generate(prompts, params, use_tqdm=False)
    assert tight.metrics()["num_preemptions"] > 0
    for one, other in zip(got, right, strict=True):
        assert one.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        assert len(one.prompt_logprobs) == 100
        for a, b in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert a is not None
            assert b is not None
            assert next(iter(a.values())).logprob == pytest.approx(next(iter(b.values())).logprob, abs=1e-3)
