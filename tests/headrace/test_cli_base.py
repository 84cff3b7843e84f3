"""The frame of the command line: help without torch, flags from the union, errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from headrace.cli import app as cli_app
from headrace.cli import main
from headrace.cli.app import COMMANDS, GROUPS, CommandSpec
from headrace.cli.options import EngineArgs, engine_command
from headrace.configuration import loading
from headrace.core.errors import EngineError
from headrace.core.plugin.manager import load_plugins

BUILT_IN = """
from headrace.core.plugin.hookspecs import hookimpl
name, headrace_api = "core", ">=1,<2"
@hookimpl
def headrace_register(registrar):
    registrar.scheduling_policy("fcfs", dict)
    registrar.scheduling_policy("priority", dict)
    registrar.executor("uniproc", dict)
"""

PLUGIN = """
import typer
from pydantic import BaseModel, Field
from headrace.core.config import Section, option
from headrace.core.plugin.hookspecs import hookimpl
name, headrace_api = "drafts", ">=1,<2"
class Options(BaseModel):
    level: int = Field(3, ge=0, description="How much.")
class Drafting(Section):
    method: str | None = option(None, "Which drafter.", flat="drafting_method")
    num_drafting_tokens: int = option(4, "Drafts a step.", ge=1)
    enable_tree: bool = option(False, "Draft a tree.")
    widths: list[int] = option([], "Widths of the tree.", flat="tree_widths")
class Policy:
    dynamic = False
    def order(self, request, now): return (0,)
    def victim(self, running, wanting): return None
def hello(times: int = 1):
    typer.echo("hello " * times)
@hookimpl
def headrace_register(registrar, options):
    registrar.config_section("drafting", Drafting)
    registrar.scheduling_policy("mine", Policy)
    registrar.cli_command("hello", lambda: hello)
    registrar.request_option("depth", int)
"""

BAD_PART = """
from headrace.core.plugin.hookspecs import hookimpl
name, headrace_api = "badpart", ">=1,<2"
def broken(): raise RuntimeError("no luck")
@hookimpl
def headrace_register(registrar):
    registrar.op_set("broken", broken)
    registrar.attention_backend("lacking", object)
"""


@pytest.fixture(autouse=True)
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One fake built-in plugin and no installed ones; plugins to give by file."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HEADRACE_TRACEBACK", raising=False)
    (tmp_path / "fake_built_in.py").write_text(BUILT_IN)
    (tmp_path / "drafts.py").write_text(PLUGIN)
    (tmp_path / "badpart.py").write_text(BAD_PART)

    def load(builtin: Any, essential: Any, **rest: Any) -> Any:
        return load_plugins(("fake_built_in",), frozenset({"core"}), **{**rest, "discover": False})

    monkeypatch.setattr(loading, "load_plugins", load)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name == "fake_built_in" or name.startswith("headrace_plugin_"):
            del sys.modules[name]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*argv: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as exit:
            main(argv)
        out = capsys.readouterr()
        assert (exit.value.code or 0) == code, out
        return out.out if code == 0 else out.err

    return call


def shown(call: Any, *argv: str) -> dict[str, Any]:
    return json.loads(call("config", "show", "--json", *argv))["options"]


QUIET = (
    "import sys, time\n"
    "from headrace.cli import main\n"
    "heavy = ('torch', 'numpy', 'tokenizers')\n"
    "try: main(sys.argv[1:])\n"
    "finally: print(*(m for m in heavy if m in sys.modules), time.process_time(), file=sys.stderr)\n"
)
"""Tells what heavy was imported, and the processor time of this process alone."""


@pytest.mark.parametrize(
    "argv",
    [["--version"], ["--help"], ["plugins", "--help"], ["config", "show", "-h"], ["doctor", "--help"]],
    ids=" ".join,
)
def test_help_and_version_are_quick_and_without_torch(argv: list[str]) -> None:
    """Source: vllm-project/vllm#14924, #15225, #19824."""
    seconds = []
    for _ in range(2):
        command = [sys.executable, "-c", QUIET, *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        *heavy, used = done.stderr.split()
        assert heavy == []
        assert "headrace" in done.stdout
        seconds.append(float(used))
    # Processor time, since tests share the machine; of the first, compiling to bytecode may be a part.
    assert min(seconds) < 0.5 * 2.5


def test_the_help_of_every_command_of_the_table(call: Any) -> None:
    top = call("--help")
    for spec in COMMANDS:
        text = top if len(spec.words) == 1 else call(spec.words[0], "--help")
        assert spec.help in text
        assert len(spec.words) == 1 or spec.words[0] in GROUPS


def test_the_version(call: Any) -> None:
    from importlib.metadata import version

    assert call("--version").split() == ["headrace", version("headrace")]


def test_unknown_words_name_the_nearest(call: Any) -> None:
    assert "Did you mean 'config'?" in call("confg", code=2)
    assert "Did you mean 'show'?" in call("config", "shw", code=2)
    assert "--max-num-seqs" in call("config", "show", "--max-num-seq", "4", code=2)


def test_every_option_of_core_is_a_flag(call: Any, house: Path) -> None:
    plugin = str(house / "drafts.py")
    options = shown(
        call,
        *(
            "--dtype",
            "float32",
            "m",
            "--max-model-len",
            "128",
            "--max-num-seqs=4",
            "--kv-cache-memory",
            "2GiB",
        ),
        *(
            "--long-prefill-token-threshold",
            "0",
            "--no-enable-prefix-caching",
            "--scheduling-policy",
            "priority",
        ),
        *(
            "--plugin-files",
            plugin,
            "--plugin-options",
            '{"drafts": {"level": 1}}',
            "--disable-plugins",
            "drafts",
        ),
    )
    given = {name: item["value"] for name, item in options.items() if item["source"] != "default"}
    assert given == {
        "model": "m",
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "kv_cache_memory": 2**31,
        "long_prefill_token_threshold": 0,
        "enable_prefix_caching": False,
        "scheduling_policy": "priority",
        "plugin_files": [plugin],
        "plugin_options": {"drafts": {"level": 1}},
        "disable_plugins": ["drafts"],
    }
    assert options["enable_prefix_caching"]["source"] == "flag --enable-prefix-caching"
    assert options["model"]["source"] == "argument"


@pytest.mark.parametrize(
    ("argv", "option", "value"),
    [
        (["--num-gpu-blocks-override", "9"], "num_kv_blocks", 9),
        (["--kv-cache-memory-bytes", "4096"], "kv_cache_memory", 4096),
        (["-tp", "1"], "tensor_parallel_size", 1),
        (["--tp", "1"], "tensor_parallel_size", 1),
        (["-pp", "1"], "pipeline_parallel_size", 1),
        (["--distributed-executor-backend", "uniproc"], "executor", "uniproc"),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--scheduler", '{"max_num_seqs": 3}'], "max_num_seqs", 3),
        (["--model", "x"], "model", "x"),
    ],
)
def test_other_spellings_of_flags(call: Any, argv: list[str], option: str, value: Any) -> None:
    item = shown(call, *argv)[option]
    assert item["value"] == value
    assert item["source"] != "default"
    if argv[0] not in ("--no-enable-prefix-caching",):
        assert argv[0] + " " not in call("config", "show", "--help")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs must be an integer at least 1, got 0 (flag --max-num-seqs)"),
        (["--max-num-seqs", "many"], "max_num_seqs must be an integer at least 1, got 'many'"),
        (["--kv-cache-memory", "-1"], "kv_cache_memory: must be bytes"),
        (["--scheduler", "x"], "--scheduler must be JSON, got 'x'"),
        (["--scheduler", "[]"], "--scheduler must be a JSON object"),
        (["--scheduler", '{"max_num_seq": 1}'], "did you mean 'max_num_seqs'?"),
        (["--num-kv-blocks", "9", "--num-gpu-blocks-override", "9"], "num_kv_blocks is given twice"),
        (["--gpu-memory-utilization", "0.9"], "kv_cache_memory"),
        (["-tp", "2"], "the executor 'uniproc' runs one rank"),
        (["a", "--model", "b"], "model is given twice"),
        (["-c", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["--disable-plugins", "core"], "'core' cannot be switched off"),
        (["--enable-plugins", "nope"], "'nope' was asked for"),
        (["--plugin-files", "nope.py"], "nope.py"),
    ],
)
def test_errors_are_one_line_on_standard_error(call: Any, argv: list[str], text: str) -> None:
    error = call("config", "show", *argv, code=2)
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert text in error


def test_the_traceback_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.core.errors import ConfigError

    monkeypatch.setenv("HEADRACE_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        main(["config", "show", "--max-num-seqs", "0"])


@pytest.mark.parametrize(
    "argv",
    [
        ["--max-num-seqs", "4", "-c", "FILE", "m"],
        ["-c", "FILE", "--max-num-seqs", "4", "m"],
        ["m", "--config", "FILE", "--max-num-seqs", "4"],
        ["--config=FILE", "m", "--max-num-seqs", "4"],
    ],
)
def test_the_order_of_file_flags_and_model_does_not_matter(call: Any, house: Path, argv: list[str]) -> None:
    """Source: vllm-project/vllm#8947, #14819, PR#18999."""
    file = house / "engine.yaml"
    file.write_text("model: other\nmax_num_seqs: 8\nblock_size: 32\n")
    argv = [word.replace("FILE", str(file)) for word in argv]
    got = json.loads(call("config", "show", "--json", *argv))
    options = got["options"]
    assert options["model"] == {"value": "m", "source": "argument"}
    assert options["max_num_seqs"]["value"] == 4
    assert options["block_size"] == {"value": 32, "source": f"file {file}, line 3"}
    assert got["notes"] == [f"model 'm' (argument) replaces 'other' (file {file}, line 1)"]


def test_the_file_alone_is_enough(call: Any, house: Path) -> None:
    file = house / "engine.yaml"
    file.write_text("model: other\n")
    assert call("config", "check", "-c", str(file)).startswith("ok: model other, 1 options given")
    assert "no model: name one" in call("config", "check", code=2)


def test_flags_of_a_plugins_section(call: Any, house: Path) -> None:
    plugin = ["--plugin-files", str(house / "drafts.py")]
    options = shown(
        call, "m", "--num-drafting-tokens", "9", *plugin, "--enable-tree", "--tree-widths", "[1, 2]"
    )
    assert options["num_drafting_tokens"]["value"] == 9
    assert options["enable_tree"]["value"] is True
    assert options["tree_widths"]["value"] == [1, 2]
    options = shown(call, *plugin, "--drafting", '{"method": "ngram"}', "m")
    assert options["drafting_method"]["value"] == "ngram"
    assert options["model"]["value"] == "m"
    file = house / "engine.yaml"
    file.write_text("plugins: {files: [drafts.py]}\n")
    assert shown(call, "-c", str(file), "--drafting-method=ngram")["drafting_method"]["value"] == "ngram"
    error = call("config", "show", *plugin, "--num-drafting-token", "9", code=2)
    assert "--num-drafting-tokens" in error


def test_config_show_as_a_table_with_notes(call: Any) -> None:
    text = call("config", "show", "m", "--max-num-batched-tokens", "8")
    line = next(line for line in text.splitlines() if "│ max_num_batched_tokens" in line)
    assert "8" in line
    assert "flag --max-num-batched-tokens" in line
    assert "note: max_num_seqs lowered from its default 64 to 8" in text


def test_config_schema(call: Any, house: Path) -> None:
    schema = json.loads(call("config", "schema", "--plugin-files", str(house / "drafts.py")))
    assert "num_drafting_tokens" in schema["properties"]
    assert "max_num_seqs" in schema["properties"]["scheduler"]["properties"]


def test_plugins_list(call: Any, house: Path) -> None:
    plugin = ["--plugin-files", str(house / "drafts.py"), "--plugin-files", str(house / "nowhere.py")]
    infos = json.loads(call("plugins", "list", "--json", *plugin))
    assert [(i["name"], i["state"], i["origin"]) for i in infos] == [
        ("core", "loaded", "built-in"),
        ("drafts", "loaded", "file"),
        ("nowhere", "broken", "file"),
    ]
    text = call("plugins", "list", *plugin)
    assert "cannot be read" in text
    assert "fcfs, priority, uniproc" in text.replace("\n", " ") or "fcfs" in text


def test_plugins_show(call: Any, house: Path) -> None:
    plugin = ["--plugin-files", str(house / "drafts.py")]
    info = json.loads(call("plugins", "show", "drafts", "--json", *plugin))
    assert info["options"]["level"]["default"] == 3
    assert ["scheduling_policy", "mine"] in info["registered"]
    text = call("plugins", "show", "drafts", *plugin)
    assert "scheduling policy" in text
    assert "integer, default 3 How much." in text
    assert "did you mean 'drafts'?" in call("plugins", "show", "draft", *plugin, code=2)


def test_plugins_check(call: Any, house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = call("plugins", "check", "drafts", "--plugin-files", str(house / "drafts.py"))
    for line in (
        "ok: plugin drafts loads",
        "ok: scheduling policy mine: is as its contract says",
        "ok: configuration section drafting: its defaults are valid",
        "ok: request option depth: its type can be validated",
    ):
        assert line in text
    with pytest.raises(SystemExit) as exit:
        main(["plugins", "check", "badpart", "--plugin-files", str(house / "badpart.py")])
    assert exit.value.code == 1
    text = capsys.readouterr().out
    assert "FAILED: op set broken raised RuntimeError: no luck" in text
    assert "FAILED: attention backend lacking: lacks" in text
    assert "forward" in text
    assert "'nope' was asked for" in call("plugins", "check", "nope", code=2)


def test_a_command_of_a_plugin(call: Any, house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No such command 'hello'" in call("hello", code=2)

    def load(builtin: Any, essential: Any, **rest: Any) -> Any:
        return load_plugins((), frozenset(), **{**rest, "discover": False, "files": [house / "drafts.py"]})

    monkeypatch.setattr(loading, "load_plugins", load)
    assert call("hello", "--times", "2") == "hello hello \n"
    assert "No such command 'helo'" in call("helo", code=2)


def test_doctor(call: Any, house: Path) -> None:
    (house / "cache").mkdir()
    (house / "cache" / "weights").write_bytes(b"12345")
    report = json.loads(call("doctor", "--json", "--plugin-files", str(house / "nowhere.py")))
    assert report["python"]["version"] == sys.version.split()[0]
    assert report["packages"]["torch"] != "not installed"
    assert report["torch"]["threads"] >= 1
    assert report["machine"]["cores_allowed"] >= 1
    assert report["machine"]["memory_available_bytes"] > 2**20
    assert report["machine"]["huge_pages"] in ("always", "madvise", "never", "unknown")
    assert report["cache"] | {"free_bytes": 0} == {
        "folder": str(house / "cache"),
        "writable": True,
        "size_bytes": 5,
        "free_bytes": 0,
    }
    assert report["plugins"]["core"] == "loaded"
    assert report["plugins"]["nowhere"].startswith("broken: the file cannot be read")
    assert any("nowhere" in line for line in report["advice"])
    assert "machine cores_allowed" in call("doctor")


@engine_command
def probe(
    args: EngineArgs,
    prompt: Annotated[list[str] | None, typer.Option("-p", "--prompt", help="A prompt.")] = None,
    fail: bool = False,
    stop: bool = False,
) -> None:
    """Show what a command is given."""
    if fail:
        raise EngineError("it stopped:\nno luck")
    if stop:
        raise KeyboardInterrupt
    typer.echo(json.dumps([args.model, str(args.file), args.flags, prompt]))


@pytest.fixture
def with_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = CommandSpec(("probe",), f"{__name__}:probe", "Probe.")
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules["__main__"])
    monkeypatch.setattr(cli_app, "COMMANDS", (*COMMANDS, spec))


@pytest.mark.usefixtures("with_probe")
def test_a_command_gets_only_what_was_given(call: Any) -> None:
    assert json.loads(call("probe")) == [None, "None", {}, None]
    got = json.loads(
        call("probe", "m", "-p", "a", "-p", "b", "--max-num-seqs", "4", "--no-enable-prefix-caching")
    )
    assert got == ["m", "None", {"max_num_seqs": 4, "enable_prefix_caching": False}, ["a", "b"]]
    text = call("probe", "--help")
    assert "A prompt." in text
    assert "Most requests that run at once. (default: 64)" in text
    assert "--num-gpu-blocks-override" not in text


@pytest.mark.usefixtures("with_probe")
def test_how_a_command_ends_badly(call: Any) -> None:
    assert call("probe", "--fail", code=1) == "error: it stopped: no luck\n"
    assert call("probe", "--stop", code=130) == "\ninterrupted\n"
