"""Stash, sampling parameters and the printed form of messages."""

from __future__ import annotations

import math

import msgspec
import pytest

from headrace.core.errors import PluginError, RequestError
from headrace.core.logprobs import LOGPROBS, TokenLogprobs
from headrace.core.plan import NewRequest
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash, StashKey, StashKeys

NUMBERS: StashKey[list[int]] = StashKey("test/numbers", list[int])
LOCAL: StashKey[object] = StashKey("test/local", direction="local")


def test_a_stash_survives_the_wire_and_leaves_local_entries_behind() -> None:
    stash = Stash()
    stash[NUMBERS] = [1, 2]
    stash[LOCAL] = object()
    wire = stash.to_wire()
    assert wire == {"test/numbers": [1, 2]}
    back = StashKeys([NUMBERS]).from_wire(wire)
    assert back[StashKey("test/numbers", list[int])] == [1, 2]
    assert LOCAL not in back


def test_logprobs_survive_the_wire() -> None:
    stash = Stash()
    stash[LOGPROBS] = [
        TokenLogprobs([5, 7], [-1.5, -math.inf], 2, [(9, -3.5, 4)]),
        TokenLogprobs([1], [0.0], 1),
    ]
    back = StashKeys([LOGPROBS]).from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(stash.to_wire())))
    assert back == stash


def test_unknown_and_clashing_stash_keys_are_errors() -> None:
    with pytest.raises(PluginError, match="unknown key 'test/numbers'"):
        StashKeys().from_wire({"test/numbers": [1]})
    with pytest.raises(PluginError, match="declared twice"):
        StashKeys([NUMBERS, StashKey("test/numbers", dict)])
    with pytest.raises(ValueError, match="plugin/entry"):
        StashKey("nameless")


def test_defaults_are_the_fields_own() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.stop) == (16, 0, None, [])
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", True),
        ("logprob_token_ids", []),
        ("logprob_token_ids", list(range(129))),
        ("logprob_token_ids", ["5"]),
        ("logprobs_mode", "cooked"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("n", 0),
        ("n", True),
        ("seed", 2**63),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("logprobs", -2),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["zzz", ""]),
        ("stop", [7]),
        ("stop", ["x"] * 1001),
        ("stop_token_ids", ["a"]),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", {5: float("nan")}),
    ],
)
def test_a_wrong_value_names_its_field_and_itself(field: str, value: object) -> None:
    """Sources: sgl-project/sglang#38712 (empty stop strings), vllm-project/vllm#16529 (bias)."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert (caught.value.param or "").split(".")[0] == field
    assert field in str(caught.value)


def test_combinations() -> None:
    with pytest.raises(RequestError, match=r"min_tokens \(5\) must not exceed max_tokens \(3\)"):
        SamplingParams(min_tokens=5, max_tokens=3)
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(RequestError, match="same answer 2 times"):
        SamplingParams(n=2, temperature=0)


def test_max_tokens_zero_needs_a_purpose() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=1).max_tokens == 0
    with pytest.raises(RequestError, match="max_tokens 0 gives nothing"):
        SamplingParams(max_tokens=0)


def test_values_are_brought_into_shape() -> None:
    params = SamplingParams(
        stop="x", temperature=0.001, logit_bias={"5": 1000}, seed=-1, stop_token_ids=(1, 2)
    )
    assert params.stop == ["x"]
    assert params.temperature == 0.01
    assert params.logit_bias == {5: 100.0}
    assert params.seed is None
    assert params.stop_token_ids == [1, 2]
    assert SamplingParams(stop=None).stop == []


def test_parameters_are_frozen_and_keep_unknown_keywords_for_plugins() -> None:
    params = SamplingParams(temperature=0, colour="green")
    assert params.options == {"colour": "green"}
    with pytest.raises(ValueError, match="frozen"):
        params.temperature = 1.0  # type: ignore[misc]


def test_messages_do_not_print_anybodys_tokens() -> None:
    new = NewRequest(
        request_id="a",
        token_ids=[4711, 4712],
        num_prompt_tokens=2,
        params=SamplingParams(),
        start=0,
        count=2,
        block_ids=[[1]],
    )
    assert "4711" not in repr(new)
