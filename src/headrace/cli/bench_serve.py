"""`headrace bench serve`: a server under load, as its clients see it.

The server may be any that speaks OpenAI's protocol. Workloads that are made up, or are text, ask for its tokenizer by
vLLM's routes `/tokenize` and `/detokenize`.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.datasets import Dataset
from headrace.bench.load_options import (
    FORMATS,
    METRICS,
    Traffic,
    read_backend,
    read_base_url,
    read_goals,
    read_names,
    read_percentages,
)
from headrace.bench.payloads import APIS
from headrace.bench.remote import Server
from headrace.cli import bench_serve_flags as flags
from headrace.cli.bench_dataset import dataset_flags
from headrace.cli.requests import emit
from headrace.core.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from headrace.bench.serving import Run

__all__ = ["serve"]

TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Time between chunks",
    "e2el": "Time to last token",
}
SHOWN_ERRORS = 3


@dataset_flags
def serve(
    *,
    base_url: flags.BaseUrl = None,
    host: flags.Host = "127.0.0.1",
    port: flags.Port = 8000,
    backend: flags.Backend = "openai",
    endpoint: flags.Endpoint = None,
    model: flags.Model = None,
    api_key: flags.ApiKey = None,
    dataset: Dataset,
    random_vocab_size: flags.VocabSize = None,
    request_rate: flags.Rate = math.inf,
    burstiness: flags.Burstiness = 1.0,
    max_concurrency: flags.Concurrency = None,
    num_warmups: flags.Warmups = 0,
    ignore_eos: flags.IgnoreEos = False,
    temperature: flags.Temperature = 0.0,
    goodput: flags.Goodput = None,
    more_goals: flags.MoreGoals = None,
    percentile_metrics: flags.Metrics = ",".join(METRICS),
    metric_percentiles: flags.Percentages = "99",
    output_json: flags.OutputJson = None,
    save_result: flags.SaveResult = False,
    result_dir: flags.ResultFolder = Path(),
    save_detailed: flags.Detailed = False,
    plot: flags.Plot = None,
) -> None:
    """Send requests to a server, and tell how it served them: throughput, and times of tokens."""
    told = _Told(
        read_goals(goodput, more_goals), read_names(percentile_metrics), read_percentages(metric_percentiles)
    )
    files = _Files(output_json, result_dir if save_result else None, plot, save_detailed)
    files.check()
    traffic = Traffic(request_rate, burstiness, max_concurrency, num_warmups, ignore_eos, temperature)
    api = APIS[read_backend(backend)]
    server = Server(read_base_url(base_url, host, port), api_key)
    _need("aiohttp")

    from headrace.bench.serving_requests import Target, make_requests
    from headrace.bench.serving_run import measure
    from headrace.progress import counting

    target = Target(server, api, model) if model else Target(server, api, *server.model())
    requests = make_requests(dataset, target, random_vocab_size=random_vocab_size)
    url = f"{server.base_url}/{(endpoint or api.endpoint).lstrip('/')}"
    seed = dataset.options["seed"]
    run = measure(target, url, requests, traffic, seed=seed, keep_chunks=save_detailed, progress=counting)
    figures = told.figures(run)
    facts = {
        "backend": backend,
        "endpoint": url,
        "model_id": target.model,
        "num_prompts": len(requests),
        **traffic.facts,
        "workload": {"dataset_name": dataset.name, **dataset.options, "random_vocab_size": random_vocab_size},
    }
    files.write(run, facts, figures)
    told.tell(figures, run)


@dataclass(frozen=True)
class _Told:
    """What is told of a run."""

    goals: Mapping[str, float]
    metrics: Sequence[str]
    percentages: Sequence[float]

    def figures(self, run: Run) -> dict[str, Any]:
        from headrace.bench.serving_figures import figures

        return figures(run, goals=self.goals, metrics=self.metrics, percentages=self.percentages)

    def tell(self, figures: Mapping[str, Any], run: Run) -> None:
        """Write figures to standard output. Raises `EngineError` where no request was served."""
        errors = [answer.error for answer in run.answers if answer.error]
        if not figures["completed"]:
            raise EngineError(
                f"all {len(errors)} requests failed, so there is no figure; the first: {errors[0]}"
            )
        emit(
            "Serving: {request_throughput:.2f} requests/s, {total_token_throughput:.2f} total tokens/s, "
            "{output_throughput:.2f} output tokens/s\n"
            "{completed} requests in {duration:.2f} s: {total_input_tokens} prompt tokens and {total_output_tokens} "
            "output tokens; at most {max_concurrent_requests} at once, and {max_output_tokens_per_s:.0f} output "
            "tokens in a second; {client_cpu_s:.2f} CPU seconds of this client\n".format_map(figures)
        )
        if self.goals:
            goals = ", ".join(f"{name} {value:g} ms" for name, value in self.goals.items())
            emit(f"Goodput: {figures['request_goodput']:.2f} requests/s within {goals}\n")
        for name in self.metrics:
            kinds = ["mean", "median", "std", *(f"p{percentage:g}" for percentage in self.percentages)]
            values = [(kind, figures[f"{kind}_{name}_ms"]) for kind in kinds]
            if values[0][1] is not None:
                emit(f"{TITLES[name]}: {', '.join(f'{kind} {value:.1f} ms' for kind, value in values)}\n")
        if errors:
            shown = "".join(f"  {error}\n" for error in errors[:SHOWN_ERRORS])
            emit(f"{len(errors)} requests failed, and are in no other figure; the first:\n{shown}")


@dataclass(frozen=True)
class _Files:
    """What is written of a run, and where."""

    output: Path | None
    folder: Path | None
    """Where a file with a name of its own goes."""
    plot: Path | None
    detailed: bool

    def check(self) -> None:
        """Refuse before anything is sent what could not be written afterwards. Raises `ConfigError`."""
        for flag, path in (("--output-json", self.output), ("--plot", self.plot)):
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise ConfigError(
                    f"{flag} {path} cannot be written: it must be a file in a folder that exists"
                )
        if self.folder is not None and not self.folder.is_dir():
            raise ConfigError(f"--result-dir {self.folder} must be a folder that exists", option="result_dir")
        if self.detailed and self.output is None and self.folder is None:
            raise ConfigError(
                "--save-detailed needs --output-json FILE or --save-result", option="save_detailed"
            )
        if self.plot is not None:
            if self.plot.suffix not in FORMATS:
                raise ConfigError(f"--plot {self.plot} must end with {' or '.join(FORMATS)}", option="plot")
            _need("matplotlib")

    def write(self, run: Run, facts: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
        """Write what was asked for."""
        from headrace.bench.facts import client_facts
        from headrace.bench.serving_figures import details

        now = datetime.datetime.now(datetime.UTC)
        paths = [] if self.output is None else [self.output]
        if self.folder is not None:
            paths.append(self.folder / _file_name(facts, now))
        if paths:
            rest = details(run) if self.detailed else {}
            text = _json_lines({**client_facts(), **facts, **figures, **rest})
            for path in paths:
                path.write_text(text, encoding="utf-8")
        if self.plot is not None and figures["completed"]:
            from headrace.bench.serving_plot import write_plot

            good = [answer for answer in run.answers if not answer.error]
            title = f"{facts['model_id']}, {facts['endpoint']}: {figures['output_throughput']:.1f} output tokens/s"
            write_plot(good, title, self.plot)


def _file_name(facts: Mapping[str, Any], now: datetime.datetime) -> str:
    """Return a name such as vLLM's benchmark gives."""
    limit = facts["max_concurrency"]
    model = facts["model_id"].rstrip("/").rpartition("/")[2]
    concurrency = "" if limit is None else f"-concurrency{limit}"
    return f"{facts['backend']}-{facts['request_rate']}qps{concurrency}-{model}-{now:%Y%m%d-%H%M%S}.json"


def _json_lines(results: Mapping[str, Any]) -> str:
    """Return a JSON object with one line a key: details are long lists."""
    lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in results.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _need(package: str) -> None:
    """Refuse where a package of the extra `bench` is not installed. Raises `ConfigError`."""
    if find_spec(package) is None:
        raise ConfigError(
            f"headrace bench serve needs the package {package}, which is not installed: "
            "pip install 'headrace[bench]' brings it"
        )
