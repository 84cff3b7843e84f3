"""Which workload a call asks for: checked before a model is loaded, made when its vocabulary is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bench.workloads import (
    BenchRequest,
    prefix_repetition_requests,
    random_requests,
    read_sharegpt,
    read_workload,
    sharegpt_requests,
)
from headrace.core.errors import ConfigError, nearest

__all__ = ["DATASETS", "MADE_UP", "Dataset", "Vocabulary", "prepare_dataset"]

DATASETS: dict[str, dict[str, Any]] = {
    "workload": {"dataset_path": None, "output_len": None},
    "sharegpt": {"dataset_path": None, "output_len": None},
    "random": {"input_len": 1024, "output_len": 128, "range_ratio": 0.0, "prefix_len": 0},
    "prefix_repetition": {
        "prefix_repetition_prefix_len": 256,
        "prefix_repetition_suffix_len": 256,
        "prefix_repetition_num_prefixes": 10,
        "prefix_repetition_output_len": 128,
    },
}
"""By name: the options a dataset takes, and their defaults, which are vLLM's."""

MADE_UP = ("random", "prefix_repetition")
"""Those whose prompts are drawn from the vocabulary's ids."""

NUM_PROMPTS = 100
"""How many are made up where nobody says."""


@dataclass(frozen=True)
class Vocabulary:
    """What making requests needs to know of a model."""

    ids: Sequence[int]
    """Ids that stand for text."""
    encode: Callable[[str], list[int]]


@dataclass(frozen=True)
class Dataset:
    """A workload that is asked for."""

    name: str
    options: Mapping[str, Any]
    """All that the name takes, with their values, and `num_prompts` and `seed`; told in the results."""
    make: Callable[[Vocabulary], list[BenchRequest]]


def prepare_dataset(
    name: str | None, given: Mapping[str, Any], *, num_prompts: int | None = None, seed: int = 0
) -> Dataset:
    """Check what was asked for, read the file, and return what makes the requests.

    name: one of `DATASETS`; None: `workload` where a path is given, else `random`.
    given: options by name; None is not given.
    num_prompts: at most so many of a file, or so many made up.
    Raises `ConfigError`.
    """
    given = {option: value for option, value in given.items() if value is not None}
    name = name or ("workload" if "dataset_path" in given else "random")
    if name not in DATASETS:
        raise ConfigError(
            f"--dataset-name must be one of {', '.join(DATASETS)}, got {name!r}{nearest(name, DATASETS)}",
            option="dataset_name",
        )
    for option in given:
        if option not in DATASETS[name]:
            users = [other for other, options in DATASETS.items() if option in options]
            raise ConfigError(
                f"{_flag(option)} is not for --dataset-name {name}; it is for {' and '.join(users)}",
                option=option,
            )
    options = {**DATASETS[name], **given, "num_prompts": num_prompts, "seed": seed}
    if name not in MADE_UP:
        return _from_file(name, options)
    options["num_prompts"] = num_prompts or NUM_PROMPTS
    _check_lengths(options)
    return Dataset(name, options, _made_up(name, options))


def _from_file(name: str, options: dict[str, Any]) -> Dataset:
    path, output_len, most = options["dataset_path"], options["output_len"], options["num_prompts"]
    if path is None:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path FILE", option="dataset_path")
    options["dataset_path"] = str(path)
    if name == "workload":
        requests = [BenchRequest(r.prompt_token_ids, output_len or r.max_tokens) for r in read_workload(path)]
        return Dataset(name, options, lambda vocabulary: requests[:most])
    conversations = read_sharegpt(path)

    def make(vocabulary: Vocabulary) -> list[BenchRequest]:
        found = sharegpt_requests(
            conversations,
            vocabulary.encode,
            num_prompts=most,
            seed=options["seed"],
            output_len=output_len,
        )
        if not found:
            raise ConfigError(
                f"--dataset-path {path}: none of its {len(conversations)} conversations is of a length to use",
                option="dataset_path",
            )
        return found

    return Dataset(name, options, make)


def _made_up(name: str, options: Mapping[str, Any]) -> Callable[[Vocabulary], list[BenchRequest]]:
    """Pass options on by the names that the makers have for them."""
    number, seed = options["num_prompts"], options["seed"]
    values = {option.removeprefix("prefix_repetition_"): options[option] for option in DATASETS[name]}
    maker: Callable[..., list[BenchRequest]] = (
        random_requests if name == "random" else prefix_repetition_requests
    )
    return lambda vocabulary: maker(number, vocabulary.ids, seed=seed, **values)


def _check_lengths(options: Mapping[str, Any]) -> None:
    ratio = options.get("range_ratio", 0.0)
    if not 0 <= ratio < 1:
        raise ConfigError(f"--range-ratio must be at least 0 and below 1, got {ratio}", option="range_ratio")
    prefixes = options.get("prefix_repetition_num_prefixes", 1)
    if options["num_prompts"] < prefixes:
        raise ConfigError(
            f"--num-prompts {options['num_prompts']} is less than --prefix-repetition-num-prefixes {prefixes}: "
            "each prefix needs at least one prompt",
            option="num_prompts",
        )


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
