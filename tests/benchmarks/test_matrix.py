"""Features in pairs with drafts: a part of `make matrix`, on a random model and on the real one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Script = Callable[[str], ModuleType]

TOKENS = [*"abcdefgh", "ab", *(f"{a}{b}x" for a in "abcdefgh" for b in "abcdefg")][:64]


@pytest.fixture
def matrix(script: Script) -> ModuleType:
    return script("matrix")


def holds_all_pairs(cases: Sequence[Mapping[str, str]], factors: Mapping[str, Sequence[str]]) -> bool:
    return all(
        any(case[one] == a and case[other] == b for case in cases)
        for one, other in itertools.combinations(factors, 2)
        for a in factors[one]
        for b in factors[other]
        if {one: a, other: b} != {"n": "2", "sampling": "temperature 0"}
    )


def test_cases_hold_every_pair(matrix: ModuleType) -> None:
    cases = matrix.pairwise(matrix.FACTORS, 200)
    assert len(cases) == 200
    assert holds_all_pairs(cases, matrix.FACTORS)
    assert cases == matrix.pairwise(matrix.FACTORS, 200)
    with pytest.raises(ValueError, match="do not hold"):
        matrix.pairwise(matrix.FACTORS, 10)


def tiny(matrix: ModuleType, tiny_gguf: Callable[..., Path], folder: Path) -> Any:
    """Material from a random model of 64 ids that have texts."""
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 9,
    }
    paths = [str(tiny_gguf(folder / f"{seed}.gguf", keys, seed=seed)) for seed in (0, 1)]

    def ids(seed: int, count: int) -> list[int]:
        return [random.Random(seed * 100 + i).randrange(64) for i in range(count)]

    common = {"dtype": "bfloat16", "max_model_len": 128}
    return matrix.Material(
        model=paths[0],
        draft_model=paths[0],
        prompts={
            "copying": lambda i: [*ids(i, 24), 3, *ids(i, 6)],
            "loop": lambda i: ids(i, 1 + i % 3) * 6,
            "question": lambda i: ids(i, 20),
            "code": lambda i: ids(i, 9) + ids(i + 1, 9) + ids(i, 9),
            "two ids": lambda i: ids(i, 2),
        },
        stop=["ab", "gx"],
        stop_ids=[4, 17, 33],
        bias={5: 1.0, 6: -100.0, 20: 2.0},
        masks={
            "bad words": {"bad_words": ["ab", "c"]},
            "expression": {"structured": {"regex": "([a-d][a-h]*x?)+"}},
        },
        tokens=40,
        engines={
            "roomy": common,
            "chunked prompts": {**common, "max_num_seqs": 4, "max_num_batched_tokens": 12},
            "tight pool": {**common, "num_kv_blocks": 12},
            "no prefix cache": {**common, "max_num_seqs": 2, "enable_prefix_caching": False},
        },
    )


def check(outcomes: Sequence[Any]) -> None:
    assert [(o.case, o.differences) for o in outcomes if o.differences] == []
    for drafts in {o.case["drafts"] for o in outcomes}:
        own = [o for o in outcomes if o.case["drafts"] == drafts]
        drafted, accepted = sum(o.drafted for o in own), sum(o.accepted for o in own)
        assert drafted >= accepted, drafts
        # One that adapts drafts little where little is accepted, and may have no luck with that.
        assert drafted if drafts == "ngram adaptive" else accepted, drafts


@pytest.mark.usefixtures("drafts_that_pay")
def test_a_random_model(matrix: ModuleType, tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    cases = matrix.pairwise(matrix.FACTORS, 90)
    assert holds_all_pairs(cases, matrix.FACTORS)
    outcomes = matrix.run_matrix(cases, tiny(matrix, tiny_gguf, tmp_path))
    check(outcomes)
    assert {o.case["engine"] for o in outcomes} == set(matrix.FACTORS["engine"])
    loops = [o for o in outcomes if o.case["prompt"] == "loop" and o.case["drafts"].startswith("ngram")]
    assert sum(o.accepted for o in loops) > 5
    lines = matrix.table(outcomes)
    assert lines[-1].startswith("| all |  | 90 |")
    assert lines[-1].endswith("| 0 |")


def test_a_difference_is_told(matrix: ModuleType) -> None:
    right = [([1, 2, 3], None, "abc", "length", None), ([1], None, "a", "stop", 1)]
    assert matrix._differences(right, right) == []
    got = [([1, 2, 4], None, "abd", "length", None), ([1], None, "a", "stop", None)]
    assert matrix._differences(got, right) == [
        "answer 0: token ids",
        "answer 0: text",
        "answer 1: stop_reason",
    ]


def test_the_table_is_put_into_the_page(matrix: ModuleType, benchmarks: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = (benchmarks.parent / "docs" / "speculative.md").read_text()
    page.write_text(text)
    for _ in range(2):
        matrix.write_page(page, ["| a | table |"])
    before, after = text.split(matrix.MARKS[0])[0], text.split(matrix.MARKS[1])[1]
    assert page.read_text() == f"{before}{matrix.MARKS[0]}\n| a | table |\n{matrix.MARKS[1]}{after}"


@pytest.mark.weights
def test_the_real_model(matrix: ModuleType) -> None:
    factors = {
        **matrix.FACTORS,
        "drafts": ("ngram 5",),
        "engine": ("chunked prompts", "tight pool"),
        "prompt": ("copying", "question"),
        "sampling": ("temperature 0", "temperature 1", "min_p"),
    }
    cases = matrix.pairwise(factors, 20)
    outcomes = matrix.run_matrix(cases, matrix.smollm2(20))
    check(outcomes)
    assert sum(o.accepted for o in outcomes if o.case["prompt"] == "copying") > 20
