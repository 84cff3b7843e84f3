"""What plugins register: a `Registrar` each to write with, one `Registry` an engine to read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from headrace.core.config import option_table
from headrace.core.errors import ConfigError, PluginError, PluginLoadError, nearest
from headrace.core.interfaces.runner import SelectableProcessor
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import StashKey, StashKeys

if TYPE_CHECKING:
    from headrace.core.interfaces import (
        AttentionBackend,
        Constraint,
        EngineListener,
        Executor,
        GrammarBackend,
        InputProcessor,
        KVCacheManager,
        LinearWrapper,
        LogitsProcessor,
        ModelDefinition,
        ModelSource,
        ModelVariants,
        OpSet,
        ParserContext,
        Proposer,
        QuantizationMethod,
        ReasoningParser,
        RunnerListener,
        Scheduler,
        SchedulingPolicy,
        Tokenizer,
        ToolParser,
        WeightLoader,
    )
    from headrace.core.interfaces.build import (
        CoreContext,
        ExecutorBuild,
        FrontContext,
        HttpContext,
        KVCacheBuild,
        SchedulerBuild,
        WorkerContext,
    )
    from headrace.core.interfaces.wrapping import WrapContext
    from headrace.core.metrics import Metric

__all__ = ["KINDS", "Entry", "Kind", "NameClashError", "Registrar", "Registry", "Room"]

Room = Literal["front", "core", "worker"]


@dataclass(frozen=True)
class Kind:
    """A kind of part: in which room its factories run, what a user calls it, and which option selects one."""

    name: str
    room: Room
    words: str
    option: str | None = None


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("attention_backend", "worker", "attention backend", "attention_backend"),
        Kind("op_set", "worker", "op set"),
        Kind("model", "worker", "model"),
        Kind("model_source", "front", "model source", "model"),
        Kind("weight_loader", "worker", "weight loader"),
        Kind("quantization", "worker", "quantization method", "quantization"),
        Kind("tokenizer", "front", "tokenizer"),
        Kind("input_processor", "front", "input processor"),
        Kind("model_variants", "front", "variants of the model"),
        Kind("scheduler", "core", "scheduler", "scheduler_name"),
        Kind("scheduling_policy", "core", "scheduling policy", "scheduling_policy"),
        Kind("kv_cache_manager", "core", "KV cache manager", "kv_cache_manager"),
        Kind("constraint", "core", "constraint"),
        Kind("engine_listener", "core", "engine listener"),
        Kind("executor", "core", "executor", "executor"),
        Kind("runner_listener", "worker", "runner listener"),
        Kind("linear_wrapper", "worker", "linear wrapper"),
        Kind("logits_processor", "worker", "logits processor"),
        Kind("proposer", "worker", "proposer", "speculative_method"),
        Kind("grammar", "core", "grammar backend", "grammar_backend"),
        Kind("tool_parser", "front", "tool parser", "tool_call_parser"),
        Kind("reasoning_parser", "front", "reasoning parser", "reasoning_parser"),
        Kind("config_section", "front", "configuration section"),
        Kind("request_option", "front", "request option"),
        Kind("cli_command", "front", "command"),
        Kind("http_route", "front", "HTTP route"),
        Kind("metric", "front", "metric"),
    )
}


@dataclass(frozen=True)
class Entry:
    """One registered part."""

    kind: str
    name: str
    factory: Any
    plugin: str
    overrides: str | None = None
    """The plugin whose entry this one replaced, if it did."""


class NameClashError(PluginLoadError):
    """Two plugins provide one name; the start stops, whether or not they were asked for."""


class Registry:
    """All parts of one engine, by kind and name, in the order of registration."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}
        self.stash_keys = StashKeys()

    def add(self, kind: str, name: str, factory: Any, *, plugin: str, override: bool) -> None:
        """Add a part. Raises `NameClashError` if the name is taken and `override` is False."""
        known = self._entries[kind].get(name)
        if known is not None and not override:
            raise NameClashError(
                f"plugin {plugin!r} registers the {KINDS[kind].words} {name!r}, which plugin {known.plugin!r} "
                "registered already; one of them must be switched off (plugins.disable), or the second must "
                "register with override=True",
                plugin=plugin,
            )
        self._entries[kind][name] = Entry(kind, name, factory, plugin, known.plugin if known else None)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What is registered inside stays only if nothing is raised: a plugin registers wholly or not at all."""
        entries = {kind: dict(parts) for kind, parts in self._entries.items()}
        keys = list(self.stash_keys)
        try:
            yield
        except BaseException:
            self._entries = entries
            self.stash_keys = StashKeys(keys)
            raise

    def sections(self) -> dict[str, type[BaseModel]]:
        """The configuration sections that plugins registered, by name."""
        return {name: entry.factory for name, entry in self._entries["config_section"].items()}

    def names(self, kind: str) -> list[str]:
        """Names of a kind, in order."""
        return list(self._entries[kind])

    def entries(self, kind: str) -> list[Entry]:
        """Entries of a kind, in order."""
        return list(self._entries[kind].values())

    def get(self, kind: str, name: str, *, option: str | None = None) -> Entry:
        """Return an entry. Raises `ConfigError` with the names there are and the option to change."""
        entry = self._entries[kind].get(name)
        if entry is None:
            known = self.names(kind)
            raise ConfigError(
                f"no {KINDS[kind].words} is called {name!r}{nearest(name, known)}; there are: "
                f"{', '.join(known) or 'none'}" + (f". The option is {option}." if option else ""),
                option=option,
            )
        return entry


class Registrar:
    """A plugin's hand in the registry; every method takes `(name, factory, *, override=False)`.

    A factory is called when an engine needs the part, in the part's room, so that registering imports nothing.
    """

    def __init__(self, registry: Registry, plugin: str) -> None:
        self._registry = registry
        self.plugin = plugin

    def _add(self, kind: str, name: str, factory: Any, override: bool) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"the name of a {KINDS[kind].words} must be a string that is not empty, got {name!r}"
            )
        if kind != "request_option" and not callable(factory):
            raise TypeError(
                f"the factory of the {KINDS[kind].words} {name!r} must be callable, got {factory!r}"
            )
        self._registry.add(kind, name, factory, plugin=self.plugin, override=override)

    def attention_backend(
        self, name: str, factory: Callable[[], AttentionBackend], *, override: bool = False
    ) -> None:
        """Add an attention backend; `attention_backend: auto` tries them in order of registration."""
        self._add("attention_backend", name, factory, override)

    def op_set(self, name: str, factory: Callable[[], OpSet], *, override: bool = False) -> None:
        """Add an op set; the first that fits the device wins, op by op."""
        self._add("op_set", name, factory, override)

    def model(self, name: str, factory: Callable[[], ModelDefinition], *, override: bool = False) -> None:
        """Add an architecture."""
        self._add("model", name, factory, override)

    def model_source(self, name: str, factory: Callable[[], ModelSource], *, override: bool = False) -> None:
        """Add a source, chosen by the prefix `name:`."""
        self._add("model_source", name, factory, override)

    def weight_loader(
        self, name: str, factory: Callable[[], WeightLoader], *, override: bool = False
    ) -> None:
        """Add a checkpoint format."""
        self._add("weight_loader", name, factory, override)

    def quantization(
        self, name: str, factory: Callable[[], QuantizationMethod], *, override: bool = False
    ) -> None:
        """Add a way of holding weights, chosen by `quantization` or by a checkpoint's configuration."""
        self._add("quantization", name, factory, override)

    def tokenizer(
        self, name: str, factory: Callable[[Mapping[str, Any]], Tokenizer], *, override: bool = False
    ) -> None:
        """Add a kind of tokenizer: `name` is the `"kind"` in `Checkpoint.tokenizer`, which the factory gets."""
        self._add("tokenizer", name, factory, override)

    def input_processor(
        self, name: str, factory: Callable[[FrontContext], InputProcessor], *, override: bool = False
    ) -> None:
        """Add a link to the chain from prompt to tokens; they run in order of registration."""
        self._add("input_processor", name, factory, override)

    def model_variants(
        self, name: str, factory: Callable[[FrontContext], ModelVariants], *, override: bool = False
    ) -> None:
        """Add names beside the model's own, under which requests get something added."""
        self._add("model_variants", name, factory, override)

    def scheduler(
        self,
        name: str,
        factory: Callable[[SchedulerBuild], Scheduler],
        *,
        override: bool = False,
    ) -> None:
        """Add a scheduler, chosen by `scheduler.name`."""
        self._add("scheduler", name, factory, override)

    def scheduling_policy(
        self, name: str, factory: Callable[[], SchedulingPolicy], *, override: bool = False
    ) -> None:
        """Add a policy, chosen by `scheduling_policy`."""
        self._add("scheduling_policy", name, factory, override)

    def kv_cache_manager(
        self, name: str, factory: Callable[[KVCacheBuild], KVCacheManager], *, override: bool = False
    ) -> None:
        """Add a KV cache manager, chosen by `kv_cache_manager`."""
        self._add("kv_cache_manager", name, factory, override)

    def constraint(
        self, name: str, factory: Callable[[CoreContext], Constraint], *, override: bool = False
    ) -> None:
        """Add a constraint; all are asked."""
        self._add("constraint", name, factory, override)

    def engine_listener(
        self, name: str, factory: Callable[[CoreContext], EngineListener], *, override: bool = False
    ) -> None:
        """Add an engine listener; all are told."""
        self._add("engine_listener", name, factory, override)

    def executor(
        self, name: str, factory: Callable[[ExecutorBuild], Executor], *, override: bool = False
    ) -> None:
        """Add an executor, chosen by `executor`."""
        self._add("executor", name, factory, override)

    def runner_listener(
        self, name: str, factory: Callable[[WorkerContext], RunnerListener], *, override: bool = False
    ) -> None:
        """Add a runner listener; all are told, in order of registration."""
        self._add("runner_listener", name, factory, override)

    def linear_wrapper(
        self, name: str, factory: Callable[[WrapContext], LinearWrapper | None], *, override: bool = False
    ) -> None:
        """Add what stands around a model's products; the factory returns None where it has nothing to do.

        It is a runner listener as well, and told before those that are nothing else.
        """
        self._add("linear_wrapper", name, factory, override)

    def logits_processor(
        self,
        name: str,
        factory: Callable[..., LogitsProcessor | None],
        *,
        parameters: type[BaseModel] | None = None,
        override: bool = False,
    ) -> None:
        """Add a logits processor; applied in order of registration to requests for which the factory returns one.

        The factory is called with the request's `SamplingParams`. With `parameters` it is asked only for requests
        that select the processor by name, `processors={name: {…}}`, and gets an instance of that model besides.
        """
        if parameters is not None:
            factory = SelectableProcessor(name, parameters, factory)
        self._add("logits_processor", name, factory, override)

    def proposer(
        self, name: str, factory: Callable[[WorkerContext], Proposer | None], *, override: bool = False
    ) -> None:
        """Add a proposer; the factory returns None where the configuration does not ask for it."""
        self._add("proposer", name, factory, override)

    def grammar(self, name: str, factory: Callable[[], GrammarBackend], *, override: bool = False) -> None:
        """Add a grammar backend, chosen by `grammar_backend`; also made in processes that only mask."""
        self._add("grammar", name, factory, override)

    def tool_parser(
        self, name: str, factory: Callable[[ParserContext], ToolParser], *, override: bool = False
    ) -> None:
        """Add a form of tool calls, chosen by `tool_call_parser`; the factory makes one parser an answer."""
        self._add("tool_parser", name, factory, override)

    def reasoning_parser(
        self, name: str, factory: Callable[[ParserContext], ReasoningParser], *, override: bool = False
    ) -> None:
        """Add a form of thinking, chosen by `reasoning_parser`; the factory makes one parser an answer."""
        self._add("reasoning_parser", name, factory, override)

    def config_section(self, name: str, model: type[BaseModel], *, override: bool = False) -> None:
        """Add a section to the configuration: a subclass of `headrace.core.config.Section`.

        Every field needs a default. Raises `NameClashError` when the section or one of its options is called like
        another one.
        """
        self._add("config_section", name, model, override)
        try:
            option_table(self._registry.sections())
        except ConfigError as error:
            raise NameClashError(f"plugin {self.plugin!r}: {error}", plugin=self.plugin) from None

    def request_option(self, name: str, model: Any, *, override: bool = False) -> None:
        """Add a keyword to `SamplingParams`: a type that pydantic can validate; read it with `params.options`."""
        if name in SamplingParams.model_fields:
            raise NameClashError(
                f"plugin {self.plugin!r} registers the request option {name!r}, which is one of the core's; "
                "it must choose another name",
                plugin=self.plugin,
            )
        self._add("request_option", name, model, override)

    def cli_command(self, name: str, factory: Callable[[], Any], *, override: bool = False) -> None:
        """Add a command to `headrace`: the factory returns a function or a `typer.Typer`."""
        self._add("cli_command", name, factory, override)

    def http_route(
        self, name: str, factory: Callable[[HttpContext], None], *, override: bool = False
    ) -> None:
        """Add routes to the HTTP server: the factory gets its application and what a handler needs."""
        self._add("http_route", name, factory, override)

    def metric(self, name: str, factory: Callable[[], Metric], *, override: bool = False) -> None:
        """Describe a metric that a part's `metrics()` tells series of, for those who publish it."""
        self._add("metric", name, factory, override)

    def stash_key(self, key: StashKey[Any]) -> None:
        """Declare a stash key the plugin uses on objects that may cross processes."""
        try:
            self._registry.stash_keys.add(key)
        except PluginError as error:
            raise NameClashError(f"plugin {self.plugin!r}: {error}", plugin=self.plugin) from None
