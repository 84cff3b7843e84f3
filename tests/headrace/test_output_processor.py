"""Engine outputs to request outputs: text, ids and log-probabilities end at one place, whatever the steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import RequestError
from headrace.core.logprobs import LOGPROBS, PROMPT_LOGPROBS, PromptLogprobs, TokenLogprobs
from headrace.core.plan import EngineOutput
from headrace.core.sampling_params import SamplingParams
from headrace.output import FrontRequest, OutputProcessor, ProcessedOutputs
from headrace.output.logprobs import readable
from headrace.outputs import Logprob, RequestOutput

END = 300
WORDS = {256: b" blue,", 257: b"STOP", 258: b"ab", 259: b"ba", END: b"<end>"}
BROKEN = 261


class ByteTokenizer:
    """Ids 0–255 are bytes; a few longer tokens, an end token, and one whose text cannot be had."""

    vocab_size = 302
    bos_token_id = None
    eos_token_ids = (END,)
    special_ids = frozenset({END})

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == BROKEN:
            raise KeyError(token_id)
        return bytes([token_id]) if token_id < 256 else WORDS.get(token_id, b"")


def ids(text: str) -> list[int]:
    return list(text.encode())


class Run:
    """A processor with one clock, and requests given by their parameters."""

    def __init__(self, tokenizer: ByteTokenizer | None = None, *, text: bool = True) -> None:
        self.now = 100.0
        self.processor = OutputProcessor(ByteTokenizer() if text else None, clock=lambda: self.now)

    def add(self, request_id: str = "r", prompt: str = "prompt", **params: object) -> RequestOutput:
        params.setdefault("max_tokens", 100)
        request = FrontRequest(
            request_id=request_id,
            params=SamplingParams(**params),
            prompt=prompt,
            prompt_token_ids=ids(prompt),
            arrival_time=90.0,
        )
        return self.processor.add(request)

    def step(self, request_id: str = "r", tokens: list[int] = (), **fields: object) -> ProcessedOutputs:
        stash = fields.pop("stash", {})
        output = EngineOutput(request_id=request_id, new_token_ids=list(tokens), **fields)
        for key, value in stash.items():
            output.stash[key] = value
        return self.processor.process([output])


def entries(tokens: list[int], logprob: float = -0.5) -> list[TokenLogprobs]:
    return [TokenLogprobs([token, 65, 66], [logprob, -0.1, -0.2], 7) for token in tokens]


def test_a_plain_request() -> None:
    run = Run()
    output = run.add()
    run.now = 101.0
    first = run.step(tokens=ids("he"), scheduled_time=95.0, num_cached_tokens=3)
    run.now = 103.0
    last = run.step(tokens=ids("llo"), finish_reason="length", num_cached_tokens=3, num_preemptions=1)
    assert [update.deltas[0].text for update in first.updates + last.updates] == ["he", "llo"]
    assert last.updates[0].output is output
    answer = output.outputs[0]
    assert (answer.text, answer.token_ids) == ("hello", ids("hello"))
    assert (answer.finish_reason, answer.stop_reason, answer.logprobs) == ("length", None, None)
    assert answer.cumulative_logprob is None
    assert output.finished
    assert output.error is None
    assert (output.prompt, output.prompt_token_ids, output.num_cached_tokens) == ("prompt", ids("prompt"), 3)
    metrics = output.metrics
    assert (metrics.time_in_queue, metrics.time_to_first_token) == (5.0, 11.0)
    assert (metrics.decode_time, metrics.total_time, metrics.num_preemptions) == (2.0, 13.0, 1)
    assert run.processor.num_unfinished == 0
    assert first.to_finish == last.to_finish == []


def test_metrics_are_unknown_until_they_happen() -> None:
    metrics = Run().add().metrics
    assert (
        metrics.time_in_queue
        is metrics.time_to_first_token
        is metrics.total_time
        is metrics.decode_time
        is None
    )


def test_a_stop_string_is_told_to_the_core_and_the_rest_is_dropped() -> None:
    """Source: vllm-project/vllm#47616: ids and logprobs of a step went on behind the stop string's end."""
    run = Run()
    output = run.add(stop=["STOP"], logprobs=2)
    tokens = [*ids("a ST"), *ids("OP"), *ids("tail")]
    done = run.step(tokens=tokens, stash={LOGPROBS: entries(tokens)})
    answer = output.outputs[0]
    assert done.to_finish == [("r", "stop")]
    assert (answer.text, answer.token_ids) == ("a ", ids("a STOP"))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "STOP")
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 6
    assert answer.cumulative_logprob == pytest.approx(-3.0)
    assert done.updates[0].deltas[0].logprobs == answer.logprobs
    late = run.step(tokens=ids("late"), finish_reason="length")
    assert (late.updates, late.to_finish) == ([], [])
    assert answer.text == "a "
    assert answer.finish_reason == "stop"


def test_a_stop_string_completed_in_the_last_step_wins_over_length() -> None:
    run = Run()
    output = run.add(stop=["STOP"])
    done = run.step(tokens=[*ids("x"), 257], finish_reason="length")
    assert done.to_finish == []  # the core has ended it already
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "STOP")


def test_good_text_before_a_stop_in_one_token_streams() -> None:
    """Source: ggml-org/llama.cpp#9867 (DTK-04)."""
    run = Run()
    output = run.add(stop=[", "])
    texts = [run.step(tokens=[token]).updates[0].deltas[0].text for token in [256, 32]]
    assert texts == [" blue", ""]
    assert output.outputs[0].text == " blue"


def test_held_text_comes_with_the_end() -> None:
    run = Run()
    output = run.add(stop=["STOP"])
    assert run.step(tokens=ids("a ST")).updates[0].deltas[0].text == "a "
    assert run.step(tokens=[0xF0], finish_reason="length").updates[0].deltas[0].text == "ST\ufffd"
    assert output.outputs[0].text == "a ST\ufffd"


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xSTOP")])
def test_stop_token_ids(include: bool, text: str) -> None:
    run = Run()
    output = run.add(stop_token_ids=[257], include_stop_str_in_output=include)
    run.step(tokens=[*ids("x"), 257], finish_reason="stop", stop_reason=257)
    answer = output.outputs[0]
    assert (answer.text, answer.token_ids) == (text, [*ids("x"), 257])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", 257)


def test_a_stop_token_in_the_middle_is_text() -> None:
    run = Run()
    output = run.add(stop_token_ids=[257], min_tokens=5)
    run.step(tokens=[257])
    run.step(tokens=[257], finish_reason="stop", stop_reason=257)
    assert output.outputs[0].text == "STOP"


@pytest.mark.parametrize(("skip", "text"), [(True, "xy"), (False, "x<end>y<end>")])
def test_end_tokens_stay_among_the_ids(skip: bool, text: str) -> None:
    run = Run()
    output = run.add(skip_special_tokens=skip)
    run.step(tokens=[*ids("x"), END, *ids("y"), END], finish_reason="stop")
    answer = output.outputs[0]
    assert (answer.text, answer.token_ids[-1], answer.stop_reason) == (text, END, None)


def test_stop_strings_wait_for_min_tokens() -> None:
    """Source: vllm-project/vllm#21987 (SMP-10)."""
    run = Run()
    output = run.add(stop=["X"], min_tokens=4)
    assert run.step(tokens=ids("aXb")).to_finish == []
    assert run.step(tokens=ids("cXd")).to_finish == [("r", "stop")]
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("aXbc", 5)


def test_logprobs_are_readable() -> None:
    run = Run()
    output = run.add(logprobs=2)
    entry = TokenLogprobs([97, 98, 97, 0xF0], [-1.0, -0.5, -1.0, -math.inf], 2)
    run.step(tokens=[97], stash={LOGPROBS: [entry]})
    assert output.outputs[0].logprobs == [
        {97: Logprob(-1.0, 2, "a"), 98: Logprob(-0.5, 1, "b"), 0xF0: Logprob(-math.inf, 3, "\ufffd")}
    ]
    assert next(iter(output.outputs[0].logprobs[0])) == 97
    run.step(tokens=[END], stash={LOGPROBS: entries([END])}, finish_reason="stop")
    assert output.outputs[0].logprobs[1][END].decoded_token == "<end>"
    assert output.outputs[0].cumulative_logprob == -1.5


def test_missing_logprobs_fail_that_request_alone() -> None:
    run = Run()
    broken, well = run.add("broken", logprobs=1), run.add("well")
    done = run.step("broken", ids("ab"), stash={LOGPROBS: entries([97])})
    assert done.to_finish == [("broken", "error")]
    assert broken.error is not None
    assert "2 tokens" in broken.error
    assert broken.finished
    run.step("well", ids("ok"), finish_reason="length")
    assert well.outputs[0].text == "ok"


def test_a_tokenizer_that_raises_fails_that_request_alone() -> None:
    run = Run()
    broken, well = run.add("broken"), run.add("well")
    outputs = [EngineOutput(request_id=name, new_token_ids=[97, token]) for name, token in
               [("broken", BROKEN), ("well", 98)]]  # fmt: skip
    done = run.processor.process(outputs)
    assert done.to_finish == [("broken", "error")]
    assert "KeyError" in str(broken.outputs[0].error)
    assert broken.outputs[0].finish_reason == "error"
    assert well.outputs[0].text == "ab"
    assert run.processor.num_unfinished == 1


def test_prompt_logprobs_by_chunks_and_again_after_a_preemption() -> None:
    """Source: vllm-project/vllm#5344, #42245: entries doubled or missing under chunks and warm caches."""
    run = Run()
    output = run.add(prompt="abcd", prompt_logprobs=2)
    run.step(stash={PROMPT_LOGPROBS: PromptLogprobs(1, entries(ids("b")))})
    assert output.prompt_logprobs is None
    run.step(stash={PROMPT_LOGPROBS: PromptLogprobs(1, entries(ids("bc")))})
    run.step(tokens=[97], stash={PROMPT_LOGPROBS: PromptLogprobs(3, entries(ids("d")))})
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 4
    assert [next(iter(e)) for e in output.prompt_logprobs[1:] if e is not None] == ids("bcd")
    assert output.prompt_logprobs[1][98] == Logprob(-0.5, 7, "b")


def test_prompt_logprobs_of_one_token() -> None:
    assert Run().add(prompt="a", prompt_logprobs=0).prompt_logprobs == [None]


def test_answers_of_one_prompt() -> None:
    run = Run()
    output = run.add(n=3, seed=1, prompt_logprobs=0, prompt="ab")
    prompt = {PROMPT_LOGPROBS: PromptLogprobs(1, entries(ids("b")))}
    batch = [
        EngineOutput(request_id="r-2", new_token_ids=ids("c"), finish_reason="length", num_cached_tokens=1),
        EngineOutput(request_id="r-0", new_token_ids=ids("a"), num_preemptions=2, num_cached_tokens=0),
    ]
    for engine_output in batch:
        engine_output.stash[PROMPT_LOGPROBS] = prompt[PROMPT_LOGPROBS]
    done = run.processor.process(batch)
    assert [update.output.request_id for update in done.updates] == ["r"]
    assert [delta.index for delta in done.updates[0].deltas] == [2, 0]
    assert not output.finished
    run.step("r-1", ids("b"), finish_reason="length", num_preemptions=1)
    finished = run.step("r-0", ids("A"), finish_reason="length", num_preemptions=2)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert [answer.text for answer in output.outputs] == ["aA", "b", "c"]
    assert output.finished
    assert finished.updates[0].output is output
    assert output.metrics.num_preemptions == 3
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 2


def test_abort_ends_every_answer_and_shows_held_text() -> None:
    run = Run()
    output = run.add(n=2, stop=["STOP"])
    run.step("r-0", ids("x"), finish_reason="length")
    run.step("r-1", ids("a ST"))
    done = run.processor.abort(["unknown", "r", "r"])
    assert done.to_finish == [("r-1", "abort")]
    assert [answer.finish_reason for answer in output.outputs] == ["length", "abort"]
    assert output.outputs[1].text == "a ST"
    assert output.finished
    assert run.step("r-1", ids("late")).updates == []
    assert run.processor.abort(["r"]).updates == []


def test_an_abort_by_the_core() -> None:
    run = Run()
    output = run.add()
    done = run.step(finish_reason="abort")
    assert output.outputs[0].finish_reason == "abort"
    assert len(done.updates) == 1


def test_errors_reach_the_caller() -> None:
    run = Run()
    output = run.add(n=2)
    run.step("r-1", finish_reason="error", error="NaN logits")
    assert (output.error, output.outputs[1].error, output.finished) == ("NaN logits", "NaN logits", False)
    run.step("r-0", ids("a"), finish_reason="length")
    assert output.finished
    assert output.outputs[0].error is None


def test_an_error_outweighs_a_stop_string_of_the_same_step() -> None:
    run = Run()
    output = run.add(stop=["X"])
    run.step(tokens=ids("aX"), finish_reason="error", error="lost")
    answer = output.outputs[0]
    assert (answer.finish_reason, answer.stop_reason, answer.error) == ("error", None, "lost")


def test_the_chosen_tokens_rank_is_its_own_in_a_tie() -> None:
    run = Run()
    output = run.add(logprobs=2)
    run.step(tokens=[97], stash={LOGPROBS: [TokenLogprobs([97, 98, 97], [-1.0, -1.0, -1.0], 1)]})
    assert output.outputs[0].logprobs == [{97: Logprob(-1.0, 1, "a"), 98: Logprob(-1.0, 1, "b")}]


def test_no_detokenizing_and_no_tokenizer() -> None:
    for run, params in ((Run(), {"detokenize": False}), (Run(text=False), {})):
        output = run.add(logprobs=0, **params)
        run.step(tokens=[97], stash={LOGPROBS: [TokenLogprobs([97], [-1.0], 1)]}, finish_reason="length")
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [97])
        assert output.outputs[0].logprobs == [{97: Logprob(-1.0, 1, None)}]


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(RequestError, match="stop_token_ids"):
        Run(text=False).add(stop=["x"])


@pytest.mark.parametrize("second", ["r", "r-1"])
def test_an_id_in_use_is_refused(second: str) -> None:
    run = Run()
    run.add("r", n=2)
    with pytest.raises(RequestError, match="not finished"):
        run.add(second)
    run.processor.abort(["r"])
    run.add(second)


def test_an_update_without_news_is_none() -> None:
    run = Run()
    run.add()
    assert run.step(scheduled_time=95.0).updates == []


def test_many_answers_are_cheap() -> None:
    """Work for each output must not grow with n: 2,000 answers would take minutes otherwise."""
    run = Run()
    output = run.add(n=2000)
    batch = [
        EngineOutput(request_id=f"r-{i}", new_token_ids=[97], finish_reason="length") for i in range(2000)
    ]
    run.processor.process(batch)
    assert output.finished


words = st.lists(st.sampled_from([*ids("aboSTOP é"), 0xC3, 0xA9, 0xF0, 256, 257, 258, 259, END]), max_size=20)


@settings(max_examples=300)
@given(
    tokens=words,
    stops=st.lists(st.sampled_from(["ab", "ba", "STOP", "a", "é", "bab", "\ufffd", ", "]), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=1),
    include=st.booleans(),
    skip=st.booleans(),
    min_tokens=st.integers(0, 5),
)
def test_any_split_into_steps_gives_the_same(
    tokens: list[int], stops: list[str], cuts: list[int], include: bool, skip: bool, min_tokens: int
) -> None:
    params = {
        "stop": stops,
        "include_stop_str_in_output": include,
        "skip_special_tokens": skip,
        "min_tokens": min_tokens,
        "logprobs": 0,
    }

    def play(sizes: list[int]):
        run = Run()
        output = run.add(**params)
        shown, given_ids, start, step = "", [], 0, 0
        while not output.finished:
            part = tokens[start : start + sizes[step % len(sizes)]]
            start, step = start + len(part), step + 1
            reason = "length" if start >= len(tokens) else None
            done = run.step(tokens=part, finish_reason=reason, stash={LOGPROBS: entries(part)})
            for update in done.updates:
                for delta in update.deltas:
                    shown += delta.text
                    given_ids += delta.token_ids
        answer = output.outputs[0]
        assert (answer.text, answer.token_ids) == (shown, given_ids)
        assert answer.logprobs is not None
        assert [next(iter(candidates)) for candidates in answer.logprobs] == answer.token_ids
        assert answer.cumulative_logprob == pytest.approx(-0.5 * len(answer.token_ids))
        return answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason

    one_by_one, at_once = play([1]), play([max(1, len(tokens))])
    assert play(cuts) == one_by_one == at_once
    if one_by_one[2] == "length":
        assert one_by_one[1] == tokens
        shown = [t for t in tokens if not (skip and t == END)]
        whole = b"".join(ByteTokenizer().token_bytes(t) for t in shown)
        assert one_by_one[0] == whole.decode("utf-8", "replace")


def test_ids_asked_for_stand_behind_the_likeliest_each_once() -> None:
    entry = TokenLogprobs([5, 7], [-1.5, -0.5], 2, [(9, -3.0, 4), (7, -0.5, 1), (5, -1.5, 2)])
    assert readable(entry, None) == {
        5: Logprob(-1.5, 2, None),
        7: Logprob(-0.5, 1, None),
        9: Logprob(-3.0, 4, None),
    }
