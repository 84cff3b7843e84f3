"""Make `.venv`: torch first and alone, then Headrace with its development tools, all at the pinned versions.

A stamp inside `.venv` holds a hash of everything the result depends on, so that nothing is done when nothing
changed. An existing `.venv` of the same Python is kept and brought up to date; what is installed in it already and
satisfies the pins stays, such as another build of torch.

Any Python may be asked to run it, one that is too old too: the syntax here is that of 3.6.
"""

import argparse
import hashlib
import os
import subprocess
import sys

OLDEST = (3, 11)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "setup.stamp")
INPUTS = ("pyproject.toml", "constraints.txt", os.path.join("tools", "setup.py"))


def wanted_key():
    """Return the hash of what `.venv` is made from: the inputs, this Python, and the place (scripts hold it)."""
    key = hashlib.sha256(repr((sys.version, VENV)).encode())
    for name in INPUTS:
        with open(os.path.join(ROOT, name), "rb") as file:
            key.update(hashlib.sha256(file.read()).digest())
    return key.hexdigest()


def is_current():
    """Return whether `.venv` was made from what is here now."""
    try:
        with open(STAMP) as file:
            return os.path.exists(PYTHON) and file.read() == wanted_key()
    except OSError:
        return False


def run(*command):
    """Run a command, shown first. Raises `CalledProcessError`."""
    sys.stdout.write("+ " + " ".join(command) + "\n")
    sys.stdout.flush()
    subprocess.check_call(command, cwd=ROOT, stdin=subprocess.DEVNULL)


def make_venv():
    """Create `.venv`, or keep one that this Python made here."""
    code = "import sys; print(sys.version, sys.prefix)"
    try:
        found = subprocess.check_output([PYTHON, "-c", code]).decode().strip()
    except (OSError, subprocess.CalledProcessError):
        found = None
    if found != f"{sys.version} {VENV}":
        run(sys.executable, "-m", "venv", "--clear", VENV)


def install():
    """Install everything into `.venv`; the stamp is written last, so that a broken run is repeated."""
    if os.path.exists(STAMP):
        os.remove(STAMP)
    make_venv()
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    pip += ["-c", "constraints.txt"]
    run(*pip, "torch")
    run(*pip, "scikit-build-core")  # the build backend: used without isolation, at the pinned version
    run(*pip, "--no-build-isolation", "-e", ".[dev]")
    run(PYTHON, "-m", "pip", "check")
    with open(STAMP, "w") as file:
        file.write(wanted_key())


def main():
    """Set up, or with `--check` only say by the exit status whether there is nothing to do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="do nothing; exit 0 if .venv is up to date, else 1"
    )
    arguments = parser.parse_args()
    if sys.version_info < OLDEST:
        found = ".".join(str(part) for part in sys.version_info[:3])
        sys.exit(
            f"Headrace needs Python {OLDEST[0]}.{OLDEST[1]} or newer, but {sys.executable} is {found}; "
            "name another one: make setup PYTHON=python3.12"
        )
    if arguments.check:
        sys.exit(0 if is_current() else 1)
    if is_current():
        sys.stdout.write("setup: .venv is up to date\n")
        return
    try:
        install()
    except subprocess.CalledProcessError as error:
        sys.exit("setup: failed, see above: " + " ".join(error.cmd))
    sys.stdout.write("setup: done; the command is .venv/bin/headrace\n")


if __name__ == "__main__":
    main()
