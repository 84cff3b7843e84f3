"""`LLM` as its users call it: inputs, outputs, errors, on the real model."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import LLM, RequestOutput, SamplingParams
from headrace.core.errors import CheckpointError, ConfigError, EngineError, RequestError

pytestmark = pytest.mark.weights

SHORT = SamplingParams(temperature=0, max_tokens=6)
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", dtype="float32", max_model_len=256, show_report=False) as made:
        yield made


def run(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    (output,) = llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
    return output


def check_drained(llm: LLM) -> None:
    metrics = llm.metrics()
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
    assert metrics["kv_blocks_free"] == metrics["kv_blocks_total"]


def test_chat_answers(llm: LLM) -> None:
    (output,) = llm.chat(FRANCE, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None


def test_every_form_of_prompt_gives_the_same_answer(llm: LLM) -> None:
    ids = llm.encode("The sky is")
    forms = ["The sky is", {"prompt": "The sky is"}, ids, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, SHORT, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["The sky is", "The sky is", None, None]
    assert all(output.prompt_token_ids == ids for output in outputs)


def test_outputs_come_in_the_order_of_prompts(llm: LLM) -> None:
    prompts = ["One", "Two two two two two two two two", "Three"]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (20, 1, 5)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 1, 5]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)


def test_many_conversations_are_a_list(llm: LLM) -> None:
    outputs = llm.chat([FRANCE, FRANCE], SHORT, use_tqdm=False)
    assert len(outputs) == 2
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_metrics_of_an_answer(llm: LLM) -> None:
    metrics = run(llm, "Hello there", temperature=0, max_tokens=5).metrics
    times = [
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    ]
    assert None not in times
    assert times == sorted(times)  # type: ignore[type-var]


def test_an_empty_batch_is_no_error(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ([3, "x"], "'x'"),
        ([49152], "49152"),
        ([50152], "50152"),
        ([-1], "-1"),
        ([1099511627776], "1099511627776"),
        ([[1, 2], [49152]], "49152"),
        ([True], "True"),
        (["a", ""], "empty"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one"),
        ({"promt": "a"}, "did you mean 'prompt'"),
        (7, "int"),
        (b"bytes", "bytes"),
        ([5] * 256, "at most 255"),
        ([5] * 768, "768 tokens"),
        (["fine", [5] * 300], "prompt 1 of 2"),
    ],
)
def test_a_wrong_prompt_is_refused_before_any_compute_and_the_engine_goes_on(
    llm: LLM, prompt: Any, message: str
) -> None:
    """Sources: vllm-project/vllm#7632, #10648, #9634, #51795, #13067."""
    steps = llm.metrics()["num_steps"]
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, SHORT, use_tqdm=False)
    assert llm.metrics()["num_steps"] == steps
    assert len(run(llm, "one two three", temperature=0, max_tokens=4).outputs[0].token_ids) == 4
    check_drained(llm)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temprature": 0}, "did you mean 'temperature'"),
        ({"logprobs": 21}, "at most 20"),
        ({"prompt_logprobs": -1}, "at most 20"),
        ({"stop_token_ids": [49152]}, "49152"),
        ({"logit_bias": {"49152": 5}}, "49152"),
        ({"logit_bias": {"50052": -100}}, "50052"),
        ({"logit_bias": {"-1": 5}}, "-1"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(llm: LLM, params: dict[str, Any], message: str) -> None:
    """Sources: vllm-project/vllm#16529 and #6866 (bias outside the vocabulary)."""
    with pytest.raises(RequestError, match=message) as caught:
        run(llm, "hi", **params)
    assert caught.value.param is not None
    check_drained(llm)


def test_lists_of_another_length_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="1 entries for 2 prompts"):
        llm.generate(["a", "b"], [SHORT], use_tqdm=False)
    with pytest.raises(RequestError, match="no effect under the policy 'fcfs'"):
        llm.generate(["a"], SHORT, priority=[3], use_tqdm=False)


@pytest.mark.parametrize("length", [254, 255])
def test_prompts_up_to_the_limit_work(llm: LLM, length: int) -> None:
    """Source: vllm-project/vllm#13067."""
    output = run(llm, [5] * length, temperature=0, max_tokens=20, ignore_eos=True)
    assert len(output.outputs[0].token_ids) == 256 - length
    assert output.outputs[0].finish_reason == "length"


def test_without_max_tokens_an_answer_takes_what_is_left(llm: LLM) -> None:
    """Source: vllm-project/vllm#6707."""
    output = run(llm, [5] * 253, temperature=0, max_tokens=None, ignore_eos=True)
    assert len(output.outputs[0].token_ids) == 3
    assert len(run(llm, "So", temperature=0, ignore_eos=True).outputs[0].token_ids) == 16


def test_parameters_are_not_changed_by_use(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3)
    before = params.model_dump()
    llm.generate(["a", "b"], params, use_tqdm=False)
    assert params.model_dump() == before


def test_stream_gives_what_generate_gives(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    deltas = list(llm.stream("Once upon a time", params))
    output = run(llm, "Once upon a time", temperature=0, max_tokens=30)
    assert "".join(delta.text for delta in deltas) == output.outputs[0].text
    assert [token for delta in deltas for token in delta.token_ids] == output.outputs[0].token_ids
    assert len(deltas) > 10
    assert deltas[-1].finish_reason == output.outputs[0].finish_reason


def test_a_closed_stream_ends_its_request(llm: LLM) -> None:
    stream = llm.stream_chat(FRANCE, SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    assert llm.metrics()["num_requests_running"] == 1
    stream.close()
    check_drained(llm)


def test_double_start_tokens_do_not_happen(llm: LLM) -> None:
    """Source: vllm-project/vllm#2012."""
    (output,) = llm.chat(FRANCE, SHORT, use_tqdm=False)
    start = output.prompt_token_ids[0]
    assert start == 1  # <|im_start|>, which the template writes for each turn
    assert output.prompt_token_ids[1] != start
    assert llm.encode("hi")[0] != start


def test_chat_with_empty_content_works(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": ""}], SHORT, use_tqdm=False)
    assert output.outputs[0].token_ids


def test_the_prefix_cache_can_be_reset(llm: LLM) -> None:
    run(llm, [7] * 100, max_tokens=1)
    assert run(llm, [7] * 100, max_tokens=1).num_cached_tokens == 96
    assert llm.reset_prefix_cache()
    assert run(llm, [7] * 100, max_tokens=1).num_cached_tokens == 0


def test_the_report_says_what_one_tunes(llm: LLM) -> None:
    report = str(llm.report)
    for words in (
        "LlamaForCausalLM",
        "134.5M parameters",
        "float32",
        "blocks of 16 tokens",
        "kv_cache_memory",
        "max_num_seqs",
        "attention    cpu",
        "batch-invariant: yes",
        "numerics",
        "2048 tokens a step",
    ):
        assert words in report, report


def test_a_shut_down_llm_says_so() -> None:
    llm = LLM("smollm2", max_model_len=64, show_report=False)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        llm.generate("hi", SHORT, use_tqdm=False)


def test_a_short_step_lowers_the_default_number_of_requests() -> None:
    llm = LLM("smollm2", max_num_batched_tokens=32, max_model_len=64, show_report=False)
    assert llm.front.config.scheduler.max_num_seqs == 32
    assert any("max_num_seqs" in note for note in llm.report.notes)


def test_a_small_pool_lowers_the_default_length_and_serves_what_fits() -> None:
    """Source: vllm-project/vllm#35541."""
    llm = LLM("smollm2", num_kv_blocks=50, show_report=False)
    assert llm.front.max_model_len == 800
    assert any("max_model_len lowered to 800" in note for note in llm.report.notes)
    params = SamplingParams(temperature=0, max_tokens=10)
    llm.generate([[i] * 5 for i in range(10)], params, use_tqdm=False)
    with pytest.raises(RequestError, match=r"1000 tokens.*max_model_len 800"):
        llm.generate([[i] * 1000 for i in range(5)], params, use_tqdm=False)
    assert llm.generate([5] * 5, params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_num_seq": 4}, ConfigError, "max_num_seqs"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, ConfigError, "max_num_batched_tokens"),
        ({"gpu_memory_utilization": 0.9}, ConfigError, "kv_cache_memory"),
        ({"kv_cache_memory": "2 parsecs"}, ConfigError, "2GiB"),
        ({"kv_cache_memory": 0}, ConfigError, "kv_cache_memory"),
        ({"kv_cache_memory": "-1"}, ConfigError, "kv_cache_memory"),
        ({"kv_cache_memory": "4096GiB"}, ConfigError, "are available"),
        ({"num_kv_blocks": 37, "max_model_len": 2048}, ConfigError, "at most 592"),
        ({"max_model_len": 9000}, ConfigError, "8192"),
        ({"dtype": "int4"}, ConfigError, "bfloat16"),
        ({"tensor_parallel_size": 2}, ConfigError, "uniproc"),
        ({"attention_backend": "flash"}, ConfigError, "torch"),
        ({"scheduling_policy": "fair"}, ConfigError, "fcfs"),
        ({"executor": "multi"}, ConfigError, "uniproc"),
        ({"disable_plugins": ["penalty"]}, ValueError, "penalties"),
    ],
)
def test_a_wrong_option_names_itself_and_what_is_allowed(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Sources: vllm-project/vllm#2418, #2163, #10517 (memory)."""
    with pytest.raises((error, ConfigError), match=message):
        LLM("smollm2", show_report=False, **options)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smolm2", "did you mean 'smollm2'"),
        ("/nowhere/at/all.gguf", "no model is called"),
        ("gguf:x", "pypi"),
    ],
)
def test_an_unknown_model_lists_the_known(model: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        LLM(model, show_report=False)


def test_plugins_that_are_not_essential_can_be_switched_off_one_at_a_time() -> None:
    from headrace.builtin import BUILTIN, ESSENTIAL

    optional = {
        importlib.import_module(module).name for module in BUILTIN if module.startswith("headrace.plugins.")
    }
    optional -= ESSENTIAL
    assert optional == {
        "min_tokens",
        "logit_bias",
        "penalties",
        "engine_metrics",
        "pooling",
        "step_record",
        "admission",
        "tracing",
        "http_metrics",
        "truncate_prompt",
        "allowed_token_ids",
        "bad_words",
        "processors",
        "speculative",
        "lora",
        "structured",
        "llguidance",
        "reasoning",
        "tools",
    }
    for name in sorted(optional):
        llm = LLM("smollm2", max_model_len=64, disable_plugins=[name], show_report=False)
        assert llm.generate("hi", SHORT, use_tqdm=False)[0].outputs[0].token_ids
        assert name not in llm.report.plugins
        if name != "engine_metrics":
            continue
        assert "num_steps" not in llm.metrics()
