"""The one policy for all plugins, line by line, each with its named error.

Sources of the cases: vllm-project/vllm#51608 (installing must change nothing), #43987 (a name that matches nothing
gave no warning), #48277 (a failing plugin fell back in silence), #40051 (no way to hand options to a plugin),
flagos-ai/vllm-plugin-FL#195 (a plugin for another version broke every command).
"""

from __future__ import annotations

import logging
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from headrace.core.config import Section, option
from headrace.core.errors import ConfigError, PluginLoadError
from headrace.core.plugin.hookspecs import hookimpl
from headrace.core.plugin.manager import LoadedPlugins, load_plugins
from headrace.core.stash import StashKey

SOURCE = """
from headrace.core.plugin.hookspecs import hookimpl
name = {name!r}
headrace_api = {api!r}
@hookimpl
def headrace_register(registrar, options):
    {body}
"""


class Site:
    """A folder on `sys.path` with fake distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self, name: str, body: str = "pass", *, plugin: str | None = None, api: str = ">=1,<2") -> str:
        (self.folder / f"{name}.py").write_text(SOURCE.format(name=plugin or name, api=api, body=body))
        return name

    def text(self, name: str, text: str) -> str:
        (self.folder / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    def dist(
        self,
        distribution: str,
        entries: dict[str, str],
        *,
        version: str = "1.2",
        keywords: str = "",
        major: str = "1",
    ) -> None:
        info = self.folder / f"{distribution}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        head = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (info / "METADATA").write_text(head + (f"Keywords: {keywords}\n" if keywords else ""))
        lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
        with (info / "entry_points.txt").open("a") as file:
            file.write(f"[headrace.plugins.v{major}]\n{lines}")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


class Plugin:
    """An object as plugin."""

    headrace_api = ">=1,<2"

    def __init__(self, name: str = "obj", register: Any = None) -> None:
        self.name = name
        self.register = register
        self.got: list[Any] = []

    @hookimpl
    def headrace_register(self, registrar: Any, options: Any) -> None:
        self.got.append(options)
        if self.register is not None:
            self.register(registrar)


def load(**keywords: Any) -> LoadedPlugins:
    return load_plugins(keywords.pop("builtin", ()), keywords.pop("essential", frozenset()), **keywords)


def states(loaded: LoadedPlugins) -> dict[str, str]:
    return {info.name: info.state for info in loaded.infos}


def test_what_a_plugin_registers_is_in_the_registry_and_the_report(site: Site) -> None:
    site.module("alpha", 'registrar.scheduler("s", dict); registrar.attention_backend("a", dict)')
    site.dist("alpha-dist", {"alpha": "alpha"}, keywords="llm,headrace-api>=1.0,headrace-api<2")
    loaded = load()
    assert loaded.registry.names("scheduler") == ["s"]
    info = loaded.info("alpha")
    assert (info.state, info.origin, info.distribution, info.version) == (
        "loaded",
        "entry point",
        "alpha-dist",
        "1.2",
    )
    assert info.registered == (("attention_backend", "a"), ("scheduler", "s"))
    assert info.rooms == ("core", "worker")
    assert info.api == ">=1,<2"
    assert load(discover=False).infos == []


def test_built_in_first_then_installed_by_name_then_files_then_objects(site: Site) -> None:
    body = "registrar.op_set(name, dict)"
    for name in ("core_b", "core_a", "zeta", "beta"):
        site.module(name, body)
    site.dist("a-dist", {"zeta": "zeta"})
    site.dist("z-dist", {"beta": "beta"})
    file = site.folder / "file.py"
    file.write_text(SOURCE.format(name="afile", api=">=1", body=body))
    item = Plugin("aobject", lambda registrar: registrar.op_set("aobject", dict))
    loaded = load(builtin=("core_b", "core_a"), files=[file], objects=[item])
    order = ["core_b", "core_a", "beta", "zeta", "afile", "aobject"]
    assert loaded.registry.names("op_set") == order
    assert [info.name for info in loaded.infos] == order
    assert [info.origin for info in loaded.infos] == [
        *["built-in"] * 2,
        *["entry point"] * 2,
        "file",
        "object",
    ]


def test_tryfirst_and_trylast_order_the_plugins_but_never_before_built_in_ones(site: Site) -> None:
    for name, mark in (("b1", ""), ("b2", "(tryfirst=True)"), ("p1", "(trylast=True)"), ("p2", "")):
        site.text(name, SOURCE.format(name=name, api=">=1", body="registrar.op_set(name, dict)"))
        path = site.folder / f"{name}.py"
        path.write_text(path.read_text().replace("@hookimpl", "@hookimpl" + mark))
    site.module("p3", "registrar.op_set(name, dict)")
    path = site.folder / "p3.py"
    path.write_text(path.read_text().replace("@hookimpl", "@hookimpl(tryfirst=True)"))
    site.dist("many", {"p1": "p1", "p2": "p2", "p3": "p3"})
    assert load(builtin=("b1", "b2")).registry.names("op_set") == ["b2", "b1", "p3", "p2", "p1"]


def test_another_major_group_is_reported_without_importing(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.text("future", "raise SystemExit('imported')")
    site.dist("future-dist", {"future": "future"}, version="9.0", major="2")
    loaded = load()
    assert states(loaded) == {"future": "broken"}
    assert "future" not in sys.modules
    [line] = [record.getMessage() for record in caplog.records]
    for word in ("future-dist 9.0", "plugin API 2", "headrace.plugins.v1", "set aside"):
        assert word in line
    with pytest.raises(
        PluginLoadError, match=r"future-dist 9\.0.*headrace_register.*API 2.*allowed is API 1"
    ):
        load(enable=["future"])


def test_a_distribution_for_both_majors_is_loaded_once(site: Site) -> None:
    site.module("both")
    site.dist("both-dist", {"both": "both"}, major="1")
    site.dist("both-dist", {"both": "nowhere"}, major="2")
    assert states(load(enable=["both"])) == {"both": "loaded"}


def test_the_name_of_a_fitting_plugin_is_not_lost_to_one_for_another_major(site: Site) -> None:
    site.module("twice")
    site.dist("new-dist", {"twice": "nowhere"}, major="2")
    site.dist("old-dist", {"twice": "twice"})
    loaded = load(enable=["twice"])
    assert [(info.distribution, info.state) for info in loaded.infos] == [
        ("new-dist", "broken"),
        ("old-dist", "loaded"),
    ]


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ("headrace-api>=1.2", ">=1.2"),
        ("a,headrace-api >= 1.0, headrace-api<1", ">=1.0,<1"),
        ("a headrace-api~=2.0 b", "~=2.0"),
        ("headrace-api=1", "range of versions"),
    ],
)
def test_finer_needs_in_keywords_are_judged_without_importing(site: Site, keywords: str, text: str) -> None:
    site.text("needy", "raise SystemExit('imported')")
    site.dist("needy-dist", {"needy": "needy"}, keywords=keywords)
    assert states(load()) == {"needy": "broken"}
    with pytest.raises(PluginLoadError) as error:
        load(enable=["needy"])
    assert text in str(error.value)
    assert "keywords of its distribution" in str(error.value)
    assert "needy" not in sys.modules


@pytest.mark.parametrize("keywords", ["headrace-api~=1.0", "x,headrace-api>=1.0,headrace-api<2", "headrace"])
def test_needs_that_are_met(site: Site, keywords: str) -> None:
    site.module("met")
    site.dist("met-dist", {"met": "met"}, keywords=keywords)
    assert states(load()) == {"met": "loaded"}


BROKEN = {
    "raises": ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
    "exits": ("raise SystemExit(3)", "SystemExit"),
    "no_name": (SOURCE.format(name="", api=">=1", body="pass"), "must have a `name`"),
    "other_name": (SOURCE.format(name="another", api=">=1", body="pass"), "calls itself 'another'"),
    "no_api": (SOURCE.format(name="no_api", api=None, body="pass"), "must say the API versions"),
    "bad_api": (SOURCE.format(name="bad_api", api="one", body="pass"), "found 'one'"),
    "old_api": (SOURCE.format(name="old_api", api="<1", body="pass"), "asks for plugin API <1"),
    "no_hook": ("name = 'no_hook'; headrace_api = '>=1'", "it implements no hook"),
    "unmarked": (
        SOURCE.format(name="unmarked", api=">=1", body="pass").replace("@hookimpl", ""),
        "not marked with @headrace.hookimpl",
    ),
    "misspelt": (
        SOURCE.format(name="misspelt", api=">=1", body="pass").replace(
            "headrace_register", "headrace_registre"
        ),
        "unknown hook 'headrace_registre' (did you mean 'headrace_register'?)",
    ),
    "arguments": (
        SOURCE.format(name="arguments", api=">=1", body="pass").replace("registrar, opt", "registry, opt"),
        "'registry'",
    ),
    "defaults": (
        SOURCE.format(name="defaults", api=">=1", body="pass").replace("options)", "options=None)"),
        "must have no defaults; found options",
    ),
    "wrapper": (
        SOURCE.format(name="wrapper", api=">=1", body="yield").replace(
            "@hookimpl", "@hookimpl(wrapper=True)"
        ),
        "hook wrapper",
    ),
    "half": (
        SOURCE.format(name="half", api=">=1", body="registrar.op_set('half', dict); raise KeyError('x')"),
        "its headrace_register raised KeyError: 'x'",
    ),
    "not_callable": (
        SOURCE.format(name="not_callable", api=">=1", body="registrar.op_set('a', 3)"),
        "must be callable, got 3",
    ),
    "unknown_kind": (
        SOURCE.format(name="unknown_kind", api=">=1", body="registrar.teapot('a', dict)"),
        "teapot",
    ),
    "options_no_model": (
        SOURCE.format(name="options_no_model", api=">=1", body="pass") + "Options = 3",
        "must be a pydantic model",
    ),
    "section_no_default": (
        "from pydantic import BaseModel\nclass S(BaseModel):\n    a_level: int\n"
        + SOURCE.format(name="section_no_default", api=">=1", body="registrar.config_section('sec', S)"),
        "must have a default",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_not_asked_for_is_set_aside_and_leaves_nothing(
    site: Site, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    text, reason = BROKEN[name]
    site.text(name, text)
    site.dist(f"{name}-dist", {name: name})
    site.module("good", "registrar.op_set('good', dict)")
    loaded = load(builtin=("good",))
    assert states(loaded) == {"good": "loaded", name: "broken"}
    assert loaded.registry.names("op_set") == ["good"]
    assert loaded.registry.names("config_section") == []
    assert reason in loaded.info(name).reason
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_that_was_asked_for_stops_the_start(site: Site, name: str) -> None:
    text, reason = BROKEN[name]
    site.text(name, text)
    site.dist(f"{name}-dist", {name: name}, version="0.7")
    with pytest.raises(PluginLoadError) as error:
        load(enable=[name])
    for word in (repr(name), f"{name}-dist 0.7", "headrace_register", reason):
        assert word in str(error.value)
    assert error.value.plugin == name


def test_a_broken_built_in_plugin_stops_the_start_with_its_cause(site: Site) -> None:
    site.text("mine", "raise RuntimeError('no luck')")
    with pytest.raises(PluginLoadError, match=r"mine.*no luck") as error:
        load(builtin=("mine",))
    assert isinstance(error.value.__cause__, RuntimeError)
    with pytest.raises(PluginLoadError, match="no_such_module"):
        load(builtin=("no_such_module",))
    assert states(load(builtin=("mine", "no_such_module"), strict=False)) == {
        "mine": "broken",
        "no_such_module": "broken",
    }


def test_files(site: Site) -> None:
    before = set(sys.modules)
    path = site.folder / "one" / "plug.py"
    path.parent.mkdir()
    path.write_text(SOURCE.format(name="one", api=">=1", body="registrar.op_set(__name__, dict)"))
    other = site.folder / "two" / "plug.py"
    other.parent.mkdir()
    other.write_text(SOURCE.format(name="two", api=">=1", body="registrar.op_set(__name__, dict)"))
    names = load(files=[path, other]).registry.names("op_set")
    assert len(set(names)) == 2
    assert names == load(files=[str(path), str(other)]).registry.names("op_set")
    assert all(name.startswith("headrace_plugin_plug_") and name in sys.modules for name in names)
    for name in names:
        del sys.modules[name]
    with pytest.raises(PluginLoadError, match=r"missing\.py.*cannot be read"):
        load(files=[site.folder / "missing.py"])
    path.write_text("import no_such_thing")
    with pytest.raises(PluginLoadError, match=r"plug\.py.*No module named 'no_such_thing'"):
        load(files=[path])
    assert not [name for name in set(sys.modules) - before if name.startswith("headrace_plugin_plug_")]
    notes = site.folder / "notes.txt"
    notes.write_text("x = 1")
    with pytest.raises(PluginLoadError, match=r"must end in \.py"):
        load(files=[notes])


def test_objects() -> None:
    assert states(load(objects=[Plugin()], discover=False)) == {"obj": "loaded"}
    with pytest.raises(PluginLoadError, match=r"object types\.SimpleNamespace.*must have a `name`"):
        load(objects=[SimpleNamespace()], discover=False)

    class Kind(Plugin):
        name = "kind"

    with pytest.raises(PluginLoadError, match=r"is the class .*Kind; give an instance"):
        load(objects=[Kind], discover=False)


def test_two_plugins_of_one_name(site: Site) -> None:
    site.module("one", plugin="same")
    site.module("two", plugin="same")
    site.dist("one-dist", {"same": "one"})
    site.dist("two-dist", {"same": "two"})
    with pytest.raises(PluginLoadError, match=r"two-dist 1\.2.*one-dist 1\.2.*same name"):
        load()
    with pytest.raises(PluginLoadError, match="same name"):
        load(objects=[Plugin("obj"), Plugin("obj")], discover=False)
    assert [info.state for info in load(strict=False).infos] == ["loaded", "broken"]


def test_two_providers_of_one_part(site: Site) -> None:
    site.module("first", "registrar.scheduler('s', dict)")
    site.module("second", "registrar.op_set('left', dict); registrar.scheduler('s', list)")
    site.dist("second-dist", {"second": "second"})
    with pytest.raises(
        PluginLoadError, match=r"'second'.*scheduler 's'.*'first' registered already.*override=True"
    ):
        load(builtin=("first",))
    loaded = load(builtin=("first",), strict=False)
    assert loaded.info("second").state == "broken"
    assert loaded.registry.names("op_set") == []
    assert loaded.registry.get("scheduler", "s").factory is dict
    assert states(load(builtin=("first",), disable=["second"])) == {"first": "loaded", "second": "disabled"}


def test_override_keeps_the_place_and_says_whom_it_replaced() -> None:
    def first(registrar: Any) -> None:
        registrar.scheduler("a", dict)
        registrar.scheduler("b", dict)

    loaded = load(
        objects=[Plugin("p1", first), Plugin("p2", lambda r: r.scheduler("a", list, override=True))],
        discover=False,
    )
    assert loaded.registry.names("scheduler") == ["a", "b"]
    entry = loaded.registry.get("scheduler", "a")
    assert (entry.factory, entry.plugin, entry.overrides) == (list, "p2", "p1")


class Level(Section):
    a_level: int = option(1, "A level.")


class Clash(Section):
    max_num_seqs: int = option(1, "Taken.")


@pytest.mark.parametrize(
    ("register", "text"),
    [
        (lambda r: r.config_section("scheduler", Level), "'scheduler'"),
        (lambda r: r.config_section("max_num_seqs", Level), "'max_num_seqs'"),
        (lambda r: r.config_section("mine", Clash), "the option mine.max_num_seqs is called 'max_num_seqs'"),
        (lambda r: (r.config_section("a", Level), r.config_section("b", Level)), "'a_level'"),
        (lambda r: r.request_option("temperature", int), "one of the core's"),
        (
            lambda r: (r.stash_key(StashKey("obj/a", int)), r.stash_key(StashKey("obj/a", str))),
            "declared twice",
        ),
    ],
)
def test_clashes_of_names_fail_at_load(register: Any, text: str) -> None:
    with pytest.raises(PluginLoadError, match="'obj'") as error:
        load(objects=[Plugin("obj", register)], discover=False)
    assert text in str(error.value)


class Options(BaseModel):
    level: int = Field(3, ge=0)


def plugin_with_options(model: Any) -> Plugin:
    plugin = Plugin("opt")
    plugin.Options = model  # type: ignore[attr-defined]
    return plugin


def test_options_reach_the_plugin() -> None:
    plugin = plugin_with_options(Options)
    load(objects=[plugin], options={"opt": {"level": 5}}, discover=False)
    load(objects=[plugin], discover=False)
    assert plugin.got == [Options(level=5), Options(level=3)]


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")


class Needy(BaseModel):
    token: str


@pytest.mark.parametrize(
    ("model", "given", "text"),
    [
        (Options, {"lvel": 5}, "no option 'lvel' (did you mean 'level'?)"),
        (
            Options,
            {"level": -1},
            "plugins.options.opt.level: Input should be greater than or equal to 0, got -1",
        ),
        (None, {"level": 1}, "takes no options"),
        (Needy, {}, "plugins.options.opt.token: Field required"),
    ],
)
def test_wrong_options(model: Any, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(objects=[plugin_with_options(model)], options={"opt": given}, discover=False)
    assert text in str(error.value)
    assert error.value.option is not None
    assert error.value.option.startswith("plugins.options.opt")


def test_options_that_a_plugin_needs_and_nobody_gave() -> None:
    with pytest.raises(PluginLoadError, match=r"needs options.*plugins\.options\.opt\.token"):
        load(objects=[plugin_with_options(Needy)], discover=False)
    load(objects=[plugin_with_options(Loose)], options={"opt": {"anything": 1}}, discover=False)


def test_options_are_a_way_of_asking(site: Site) -> None:
    site.text("broken", "raise RuntimeError('no luck')")
    site.dist("broken-dist", {"broken": "broken"})
    assert states(load()) == {"broken": "broken"}
    with pytest.raises(PluginLoadError, match="no luck"):
        load(options={"broken": {}})


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"plugin_options names.*'obk'.*did you mean 'obj'"):
        load(objects=[Plugin()], options={"obk": {}}, discover=False)
    with pytest.raises(ConfigError, match=r"disable_plugins names.*'obk'.*did you mean 'obj'"):
        load(objects=[Plugin()], disable=["obk"], discover=False)
    with pytest.raises(PluginLoadError, match=r"'obk' was asked for \(enable_plugins\).*did you mean 'obj'"):
        load(objects=[Plugin()], enable=["obk"], discover=False)
    with pytest.raises(ConfigError, match="in enable_plugins and in disable_plugins"):
        load(objects=[Plugin()], enable=["obj"], disable=["obj"], discover=False)


def test_switching_off(site: Site) -> None:
    site.text("untouched", "raise SystemExit('imported')")
    site.dist("untouched-dist", {"untouched": "untouched"})
    plugin = Plugin()
    loaded = load(objects=[plugin], disable=["untouched", "obj"])
    assert states(loaded) == {"untouched": "disabled", "obj": "disabled"}
    assert plugin.got == []
    assert "untouched" not in sys.modules


def test_an_essential_plugin_cannot_be_switched_off(site: Site) -> None:
    site.module("vital", "registrar.scheduler('s', dict); registrar.executor('e', dict)")
    with pytest.raises(ConfigError, match=r"'vital'.*scheduler 's'.*choose other parts with executor, sched"):
        load(builtin=("vital",), essential=frozenset({"vital"}), disable=["vital"])


def test_two_engines_have_nothing_in_common() -> None:
    plugin = Plugin("obj", lambda registrar: registrar.op_set("o", dict))
    first, second = load(objects=[plugin], discover=False), load(discover=False)
    assert first.registry.names("op_set") == ["o"]
    assert second.registry.names("op_set") == []
    assert first.manager is not second.manager
    assert load(objects=[plugin], discover=False).registry.names("op_set") == ["o"]


def test_installing_a_package_changes_nothing_until_it_is_selected(site: Site) -> None:
    """Source: vllm-project/vllm#51608."""
    site.module(
        "base", "registrar.scheduling_policy('fcfs', dict); registrar.attention_backend('torch', dict)"
    )
    before = load(builtin=("base",))
    site.module("aaa", "registrar.scheduling_policy('a', list); registrar.attention_backend('a', list)")
    site.dist("aaa-dist", {"aaa": "aaa"})
    after = load(builtin=("base",))
    assert after.info("aaa").state == "loaded"
    for kind in ("scheduling_policy", "attention_backend"):
        assert after.registry.entries(kind)[:1] == before.registry.entries(kind)
        assert after.registry.names(kind)[1:] == ["a"]


def test_info_names_the_nearest() -> None:
    loaded = load(objects=[Plugin()], discover=False)
    with pytest.raises(ConfigError, match="did you mean 'obj'"):
        loaded.info("obk")
