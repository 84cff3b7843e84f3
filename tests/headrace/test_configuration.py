"""Files, flags and keywords to one configuration. Sources of the cases stand with the tests."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.configuration import json_schema, load_config, request_options, start_configuration
from headrace.configuration.yaml_file import read_file
from headrace.core.config import EngineConfig, PluginsSection, SchedulerSection, Section, option
from headrace.core.errors import ConfigError, PluginLoadError, RequestError
from headrace.core.plugin.hookspecs import hookimpl
from headrace.core.plugin.registry import Registrar, Registry
from headrace.core.sampling_params import SamplingParams


class Drafting(Section):
    """A plugin's section."""

    method: str | None = option(None, "Which drafter.", flat="drafting_method")
    num_drafting_tokens: int = option(4, "Drafts a step.", ge=1, le=64)
    enable_tree: bool = option(False, "Draft a tree.")


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registrar = Registrar(registry, "fake")
    for name in ("fcfs", "priority"):
        registrar.scheduling_policy(name, dict)
    registrar.executor("uniproc", dict)
    registrar.executor("multiproc", dict)
    registrar.attention_backend("torch", dict)
    registrar.config_section("drafting", Drafting)
    registrar.request_option("structured", dict[str, int])
    return registry


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "engine.yaml"
        path.write_text(text)
        return path

    return write


def config(registry: Registry, **keywords: Any) -> EngineConfig:
    return load_config("m", keywords=keywords, registry=registry)[0]


def test_default_below_file_below_flag_or_keyword(registry: Registry, write: Any) -> None:
    file = write("max_num_seqs: 4\nblock_size: 32\nscheduler: {policy: priority}\n")
    got, provenance = load_config("m", file=file, keywords={"block_size": 8}, registry=registry)
    assert (got.scheduler.max_num_seqs, got.cache.block_size, got.scheduler.policy) == (4, 8, "priority")
    assert got.scheduler.max_num_batched_tokens == 2048
    sources = {name: str(source) for name, source in provenance.sources.items()}
    assert sources["max_num_seqs"] == f"file {file}, line 1"
    assert sources["scheduling_policy"] == f"file {file}, line 3"
    assert sources["block_size"] == "keyword block_size"
    assert sources["max_num_batched_tokens"] == "default"
    assert sources["model"] == "argument"
    assert provenance.values["max_num_seqs"] == 4
    _, provenance = load_config("m", file=file, flags={"block_size": 8}, registry=registry)
    assert str(provenance.sources["block_size"]) == "flag --block-size"


@pytest.mark.parametrize(
    "text",
    [
        "max_num_seqs: 4",
        "max-num-seqs: 4",
        "scheduler: {max_num_seqs: 4}",
        "scheduler:\n  max-num-seqs: 4",
    ],
)
def test_a_file_may_be_flat_or_nested(registry: Registry, write: Any, text: str) -> None:
    assert load_config("m", file=write(text), registry=registry)[0].scheduler.max_num_seqs == 4


def test_sections_as_keywords(registry: Registry) -> None:
    got = config(registry, scheduler={"max_num_seqs": 4}, drafting={"method": "ngram"}, enable_tree=True)
    assert got.scheduler.max_num_seqs == 4
    section = got.section("drafting", Drafting)
    assert section == Drafting(method="ngram", enable_tree=True)
    assert config(registry, scheduler=SchedulerSection(max_num_seqs=4)).scheduler.max_num_seqs == 4
    assert config(registry, kv_cache_memory_bytes="2GiB").cache.kv_cache_memory == 2**31
    assert config(registry, plugin_files=(Path("a.py"),)).plugins.files == ["a.py"]


def test_none_as_a_keyword_means_not_given(registry: Registry, write: Any) -> None:
    file = write("max_model_len: 128\nmax_num_seqs: 4")
    got, _ = load_config(
        "m",
        file=file,
        keywords={"max_model_len": None, "cache": None, "max_num_seqs": None},
        registry=registry,
    )
    assert (got.max_model_len, got.scheduler.max_num_seqs) == (128, 4)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"max_num_seq": 4},
            "unknown option 'max_num_seq' (did you mean 'max_num_seqs'?); keyword max_num_seq",
        ),
        ({"scheduler": {"max_num_seq": 4}}, "in section scheduler (did you mean 'max_num_seqs'?)"),
        ({"scheduler": {"block_size": 4}}, "it belongs to section cache"),
        ({"scheduler": {"dtype": "auto"}}, "it stands outside of sections"),
        ({"scheduler": {"teapot": 4}}, "it has: name, policy, max_num_seqs"),
        ({"schedular": {"max_num_seqs": 4}}, "did you mean 'scheduler'?"),
        ({"num_drafting_token": 4}, "did you mean 'num_drafting_tokens'?"),
        ({"sections": {}}, "unknown option 'sections'"),
        ({"backend": "x"}, "did you mean attention.backend?"),
        ({"scheduler": 4}, "section scheduler must hold options by name"),
    ],
)
def test_unknown_keys_name_the_nearest(registry: Registry, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(registry, **given)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"max_num_seqs": 4, "scheduler": {"max_num_seqs": 5}},
        {"num_kv_blocks": 4, "num_gpu_blocks_override": 4},
        {"max_num_seqs": 4, "max-num-seqs": 4},
        {"cache": {"prefix_caching": True, "enable_prefix_caching": False}},
    ],
)
def test_two_spellings_in_one_source(registry: Registry, write: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"is given twice: as .*keep one"):
        config(registry, **given)
    with pytest.raises(ConfigError, match=r"is given twice: as .*line \d"):
        load_config("m", file=write(json.dumps(given, indent=1)), registry=registry)


def test_argument_flag_and_keyword_stand_side_by_side(registry: Registry) -> None:
    with pytest.raises(
        ConfigError, match=r"model is given twice: 'a' \(keyword model\) and 'm' \(argument\)"
    ):
        load_config("m", keywords={"model": "a"}, registry=registry)
    assert load_config("m", flags={"model": "m"}, registry=registry)[0].model == "m"


@pytest.mark.parametrize(
    ("text", "flat", "value"),
    [
        ("enable_prefix_caching: false", "enable_prefix_caching", False),
        ("cache: {prefix_caching: false}", "enable_prefix_caching", False),
        ("enable_prefix_caching: TRUE", "enable_prefix_caching", True),
        ("long_prefill_token_threshold: 0", "long_prefill_token_threshold", 0),
        ("max_model_len: null", "max_model_len", None),
        ("max_model_len: ~", "max_model_len", None),
        ("max_model_len:", "max_model_len", None),
        ("gpu_memory_utilization: ~", "gpu_memory_utilization", None),
        ("drafting_method: ''", "drafting_method", ""),
        ("drafting_method: off", "drafting_method", "off"),
        ("drafting_method: 2026-01-02", "drafting_method", "2026-01-02"),
        ("drafting_method: 1:30", "drafting_method", "1:30"),
    ],
)
def test_values_in_a_file_are_what_they_look_like(
    registry: Registry, write: Any, text: str, flat: str, value: Any
) -> None:
    """Source: vllm-project/vllm#51401."""
    _, provenance = load_config("m", file=write(text), registry=registry)
    assert provenance.values[flat] == value
    assert type(provenance.values[flat]) is type(value)
    assert provenance.sources[flat].kind == "file"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "enable_prefix_caching: off",
            "true or false, got 'off' (file {}, line 1); yes, no, on and off are plain",
        ),
        ("enable_prefix_caching: 'no'", "must be true or false, got 'no'"),
        ("enable_prefix_caching: yes", "must be true or false, got 'yes'"),
        ("enable_prefix_caching: 0", "must be true or false, got 0"),
        ("enable_prefix_caching:", "got null (file {}, line 1); leave it out to get the default, True"),
        ("max_num_seqs: ~", "must be an integer at least 1, got null"),
        ("max_num_seqs: 0", "must be an integer at least 1, got 0"),
        ("max_num_seqs: ''", "must be an integer at least 1, got ''"),
        ("max_num_seqs: 4.5", "must be an integer at least 1, got 4.5"),
        ("max_num_seqs: true", "must be an integer at least 1, got True"),
        ("cache: {block_size: 2048}", "block_size must be an integer from 1 to 1024, got 2048"),
        ("num_drafting_tokens: 65", "must be an integer from 1 to 64, got 65"),
        ("dtype: float64", "dtype must be one of auto, float32, float16, bfloat16, got 'float64'"),
        ("dtype: ''", "dtype must be one of auto, float32, float16, bfloat16, got ''"),
        ("scheduler:", "section scheduler must hold options by name, such as {{option: value}}, got null"),
        ("scheduling_policy: ''", "no scheduling policy is called ''; there are: fcfs, priority"),
        ("scheduling_policy: fcsf", "did you mean 'fcfs'?"),
        ("attention_backend: flash", "no attention backend is called 'flash'"),
        ("plugin_files: [3]", "plugin_files: Input should be a valid string, got 3"),
        ("plugin_files: a.py", "plugin_files must be a list, got 'a.py'"),
        ("model: ''", "model must be an alias, a path, or source:reference, got ''"),
        ("model: 3", "model must be text, got 3"),
    ],
)
def test_unclear_values_are_errors(registry: Registry, write: Any, text: str, error: str) -> None:
    """Source: vllm-project/vllm#51401."""
    file = write(text)
    with pytest.raises(ConfigError) as caught:
        load_config(None if text.startswith("model") else "m", file=file, registry=registry)
    assert error.format(file) in str(caught.value)
    assert caught.value.option is not None


@pytest.mark.parametrize("value", ["-1", "abc", "", "0", 0, -1, "2XB", "-2GiB", True, 1.5, [1]])
def test_bad_sizes_are_named(registry: Registry, value: Any) -> None:
    """Source: vllm-project/vllm#2418, #10517."""
    with pytest.raises(ConfigError) as error:
        config(registry, kv_cache_memory=value)
    assert str(error.value).startswith("kv_cache_memory")
    assert f"got {value!r}" in str(error.value)
    assert "bytes" in str(error.value)


@pytest.mark.parametrize(
    ("value", "size"),
    [("2GiB", 2**31), ("500 MB", 5 * 10**8), ("1.5kib", 1536), (4096, 4096), ("4096", 4096)],
)
def test_sizes(registry: Registry, value: Any, size: int) -> None:
    assert config(registry, kv_cache_memory=value).cache.kv_cache_memory == size


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: the key 'a' stands twice, in lines 1 and 3"),
        ("scheduler:\n  x: 1\n  x: 2\n", "line 3: the key 'x' stands twice, in lines 2 and 3"),
        ("a: [1\n", "line 2:"),
        ("- a\n", "must hold a mapping"),
        ("3: a\n", "a key must be text, got 3"),
        ("a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "another document"),
    ],
)
def test_bad_files(write: Any, text: str, error: str) -> None:
    file = write(text)
    with pytest.raises(ConfigError) as caught:
        read_file(file)
    assert error in str(caught.value)
    assert str(file) in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path, write: Any) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        read_file(tmp_path / "none.yaml")
    assert read_file(write("# nothing\n")).data == {}


def test_numbers_of_yaml_1_2(write: Any) -> None:
    data = read_file(write("a: 1e3\nb: 010\nc: 0x1F\nd: .5\ne: -3\nf: .inf\ng: 1_000\nh: 0o17\n")).data
    assert data == {
        "a": 1000.0,
        "b": 10,
        "c": 31,
        "d": 0.5,
        "e": -3,
        "f": float("inf"),
        "g": "1_000",
        "h": 15,
    }


def test_the_model_may_stand_in_the_file(registry: Registry, write: Any) -> None:
    """Source: vllm-project/vllm#8947, #14819, PR#18999."""
    file = write("model: from-file\nmax_num_seqs: 4\n")
    got, provenance = load_config(file=file, registry=registry)
    assert got.model == "from-file"
    assert provenance.notes == []
    got, provenance = load_config("from-argument", file=file, registry=registry)
    assert got.model == "from-argument"
    assert provenance.notes == [
        f"model 'from-argument' (argument) replaces 'from-file' (file {file}, line 1)",
    ]
    assert load_config("from-file", file=file, registry=registry)[1].notes == []
    with pytest.raises(ConfigError, match="no model: name one"):
        load_config(registry=registry)
    assert load_config(registry=registry, require_model=False)[0].model == ""


def test_a_default_gives_way_to_a_small_budget(registry: Registry) -> None:
    got, provenance = load_config("m", keywords={"max_num_batched_tokens": 32}, registry=registry)
    assert got.scheduler.max_num_seqs == 32
    assert provenance.values["max_num_seqs"] == 32
    assert provenance.sources["max_num_seqs"].kind == "adjusted"
    [note] = provenance.notes
    assert "max_num_seqs lowered from its default 64 to 32" in note
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(32.*must be at least max_num_seqs \(33"):
        config(registry, max_num_batched_tokens=32, max_num_seqs=33)
    with pytest.raises(ConfigError, match=r"\(2048, default\) must be at least max_num_seqs \(4096"):
        config(registry, max_num_seqs=4096)
    assert config(registry, max_num_batched_tokens=32, max_num_seqs=32).scheduler.max_num_seqs == 32


def test_what_a_cpu_cannot_do(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization.*kv_cache_memory"):
        config(registry, gpu_memory_utilization=0.9)
    got, _ = load_config("m", keywords={"gpu_memory_utilization": 0.9}, registry=registry, device="cuda")
    assert got.cache.gpu_memory_utilization == 0.9


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size", "tp", "pp"])
def test_several_ranks_need_an_executor_that_can(registry: Registry, name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is 2, but the executor 'uniproc' runs one rank.*: multiproc; the option"
    ):
        config(registry, **{name: 2})
    assert config(registry, **{name: 2}, executor="multiproc").parallel.executor == "multiproc"
    with pytest.raises(ConfigError, match="none is installed"):
        load_config("m", keywords={name: 2}, registry=Registry())


def test_the_configuration_is_frozen(registry: Registry) -> None:
    with pytest.raises(ValidationError):
        config(registry).scheduler.max_num_seqs = 3  # type: ignore[misc]


def test_the_schema_holds_the_whole_union(registry: Registry) -> None:
    schema = json_schema(registry.sections())
    properties = schema["properties"]
    assert schema["additionalProperties"] is False
    assert properties["num_drafting_tokens"]["maximum"] == 64
    assert properties["drafting"]["properties"]["num_drafting_tokens"]["default"] == 4
    assert properties["enable_prefix_caching"] == properties["cache"]["properties"]["prefix_caching"]
    assert properties["enable_prefix_caching"]["type"] == "boolean"
    assert "string" in json.dumps(properties["kv_cache_memory"])
    assert set(EngineConfig.base_sections()) < set(properties)
    assert '"flat"' not in json.dumps(schema)


class Plugin:
    name = "obj"
    headrace_api = ">=1"

    class Options(Section):
        level: int = 1

    def __init__(self) -> None:
        self.got: Any = None

    @hookimpl
    def headrace_register(self, registrar: Registrar, options: Any) -> None:
        self.got = options
        registrar.config_section("drafting", Drafting)
        registrar.scheduling_policy("fcfs", dict)


PLUGIN_FILE = """
from headrace.core.plugin.hookspecs import hookimpl
from headrace.core.config import Section, option
name, headrace_api = "infile", ">=1"
class Mine(Section):
    a_limit: int = option(3, "A limit.")
@hookimpl
def headrace_register(registrar):
    registrar.config_section("mine", Mine)
"""


def start(**keywords: Any) -> Any:
    return start_configuration(
        keywords.pop("model", "m"), builtin=(), essential=frozenset(), discover=False, **keywords
    )


def test_plugins_load_before_their_sections_are_read(write: Any, tmp_path: Path) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    (folder / "plug.py").write_text(PLUGIN_FILE)
    file = write("mine: {a_limit: 5}\nplugins: {files: [sub/plug.py], options: {obj: {level: 7}}}\n")
    plugin = Plugin()
    started = start(file=file, plugin_objects=[plugin], flags={"num_drafting_tokens": 9})
    assert plugin.got.level == 7
    assert started.config.sections["mine"].a_limit == 5
    assert started.config.sections["drafting"].num_drafting_tokens == 9
    assert started.config.plugins == PluginsSection(
        files=[str(folder / "plug.py")], options={"obj": {"level": 7}}
    )
    assert [info.name for info in started.plugins.infos] == ["infile", "obj"]
    with pytest.raises(ConfigError, match="unknown option 'mine'"):
        start(file=file, keywords={"plugin_files": []}, plugin_objects=[plugin])


def test_plugins_by_keyword() -> None:
    plugin = Plugin()
    started = start(keywords={"plugins": [plugin], "plugin_options": {"obj": {"level": 2}}})
    assert plugin.got.level == 2
    assert started.config.plugins.options == {"obj": {"level": 2}}
    started = start(keywords={"plugins": {"disable": ["obj"]}}, plugin_objects=[plugin])
    assert started.plugins.info("obj").state == "disabled"
    with pytest.raises(ConfigError, match="did you mean 'level'"):
        start(keywords={"plugins": [plugin], "plugin_options": {"obj": {"lvel": 2}}})
    with pytest.raises(ConfigError, match="disable_plugins must be a list, got 'obj'"):
        start(keywords={"disable_plugins": "obj"}, plugin_objects=[plugin])
    with pytest.raises(PluginLoadError, match="'nope' was asked for"):
        start(flags={"enable_plugins": ["nope"]})


class MyBackend:
    """Stands for an attention backend."""


def test_a_part_as_a_keyword() -> None:
    started = start(keywords={"attention_backend": MyBackend, "scheduling_policy": MyBackend()})
    assert started.config.attention.backend == "MyBackend"
    registry = started.plugins.registry
    assert registry.get("attention_backend", "MyBackend").factory is MyBackend
    assert isinstance(registry.get("scheduling_policy", "MyBackend").factory(), MyBackend)
    with pytest.raises(ConfigError, match="attention_backend must be text, got 3"):
        start(keywords={"attention_backend": 3})


def test_a_plugin_set_aside_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from headrace.core.plugin import discovery

    entry = discovery.EntryPoint("late", "no_such_module", "headrace.plugins.v1")
    found = discovery.Found("late", entry, "late-dist", "1.0", "1", "")
    monkeypatch.setattr(discovery, "discover", lambda: [found])
    with caplog.at_level(logging.WARNING):
        started = start_configuration("m", builtin=(), essential=frozenset())
    [note] = started.notes
    assert "'late' is set aside: importing no_such_module raised ModuleNotFoundError" in note
    # Of others, in the background, there may be more.
    assert len([record for record in caplog.records if "'late'" in record.getMessage()]) == 1


def test_request_options(registry: Registry) -> None:
    request_options(registry, SamplingParams(structured={"a": 1}))
    request_options(registry, SamplingParams(structured=None))
    request_options(registry, SamplingParams())
    with pytest.raises(
        RequestError, match=r"unknown parameter 'temprature' \(did you mean 'temperature'\?\)"
    ):
        request_options(registry, SamplingParams(temprature=1.0))
    with pytest.raises(RequestError, match=r"did you mean 'structured'\?\); plugins bring: structured"):
        request_options(registry, SamplingParams(structure={}))
    with pytest.raises(RequestError, match=r"structured\.a: .*got 'x' \(plugin 'fake'\)") as error:
        request_options(registry, SamplingParams(structured={"a": "x"}))
    assert error.value.param == "structured"
