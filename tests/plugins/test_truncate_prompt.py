"""`truncate_prompt_tokens`: which tokens of a long prompt stay."""

from __future__ import annotations

import types
from typing import Any

import pytest

from headrace.configuration import request_options
from headrace.core.errors import RequestError
from headrace.core.interfaces import ProcessedInput
from headrace.core.plugin.registry import Registrar, Registry
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.plugins import truncate_prompt as plugin

START = 256
CONTEXT = 100


def cut(ids: list[int], **params: Any) -> ProcessedInput:
    registry = Registry()
    plugin.headrace_register(Registrar(registry, plugin.name), None)
    item = ProcessedInput(ids, SamplingParams(**params), Stash(), text="as it was", token_ids=list(ids))
    request_options(registry, item.params)
    context: Any = types.SimpleNamespace(
        max_model_len=CONTEXT, tokenizer=types.SimpleNamespace(bos_token_id=START)
    )
    plugin.TruncatePrompt(context).process(item)
    return item


@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({"truncate_prompt_tokens": 3}, [5, 6, 7]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [5, 6, 7]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 2, 3]),
        ({"truncate_prompt_tokens": 1}, [7]),
        ({"truncate_prompt_tokens": 7}, [1, 2, 3, 4, 5, 6, 7]),
        ({"truncate_prompt_tokens": -1}, [1, 2, 3, 4, 5, 6, 7]),
        ({"truncation_side": "right"}, [1, 2, 3, 4, 5, 6, 7]),
    ],
    ids=str,
)
def test_one_end_stays(options: dict[str, Any], right: list[int]) -> None:
    item = cut([1, 2, 3, 4, 5, 6, 7], **options)
    assert item.token_ids == right
    assert item.text == ("as it was" if len(right) == 7 else None)


def test_a_start_token_stays() -> None:
    ids = [START, 1, 2, 3, 4]
    assert cut(ids, truncate_prompt_tokens=3).token_ids == [START, 3, 4]
    assert cut(ids, truncate_prompt_tokens=3, truncation_side="right").token_ids == [START, 1, 2]
    assert cut(ids, truncate_prompt_tokens=1).token_ids == [4]


def test_an_answer_keeps_its_room() -> None:
    ids = list(range(150))
    for most in (-1, CONTEXT, 120):
        assert cut(ids, truncate_prompt_tokens=most).token_ids == ids[-99:]
    assert cut(ids, truncate_prompt_tokens=-1, max_tokens=0, prompt_logprobs=0).token_ids == ids[-100:]
    assert cut(ids[:99], truncate_prompt_tokens=-1).token_ids == ids[:99]


@pytest.mark.parametrize("most", [0, -2, 1.5, "3", True])
def test_lengths_that_are_none_are_refused(most: Any) -> None:
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        cut([1], truncate_prompt_tokens=most)
    with pytest.raises(RequestError, match=r"truncation_side.*'left' or 'right'"):
        cut([1], truncation_side="middle")
