"""The set-up script, with a toy uv, toy interpreters and nothing else on PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# fmt: off
TOOLS = (
    "bash", "cat", "cut", "df", "dirname", "env", "flock", "grep", "ln", "mkdir", "paste", "readlink",
    "realpath", "rm", "sed", "sha256sum", "sort", "tail",
)
# fmt: on

UV = """#!/usr/bin/env bash
echo "$* index=${{UV_DEFAULT_INDEX:-}} extra=${{UV_INDEX:-}} cert=${{SSL_CERT_FILE:-}}" >>{log}
case $1 in
    --version) echo "uv 1" ;;
    venv) mkdir -p .venv/bin && ln -sf {python} .venv/bin/python ;;
    pip) exit {status} ;;
    *) exit 1 ;;
esac
"""

# What stands in .venv/bin/python.
VENV_PYTHON = "python-of-the-environment"

# The private uv is what this interpreter's pip would install.
PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
    "-c "*) echo {version} ;;
    "--version ") echo "Python {version}.0" ;;
    "-m venv") {venv} ;;
    "-m pip") {pip} ;;
    "-W ignore") {loads} ;;
    *) exit 1 ;;
esac
"""


class Machine:
    """A checkout on a machine that has only what a test gives it."""

    def __init__(self, directory: Path) -> None:
        self.checkout = directory / "checkout"
        self.bin = directory / "bin"
        self.log = directory / "uv.log"
        self.env: dict[str, str] = {}
        for folder in (self.checkout / "scripts", self.checkout / "requirements", self.bin):
            folder.mkdir(parents=True)
        shutil.copy(ROOT / "scripts/bootstrap", self.checkout / "scripts")
        for name in ("cpu", "gpu", "dev"):
            (self.checkout / f"requirements/{name}.txt").write_text(f"{name}==1\n")
        (self.checkout / "pyproject.toml").touch()
        self.add_python(VENV_PYTHON, loads="exit 0")
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None
            (self.bin / tool).symlink_to(found)

    def add(self, name: str, script: str) -> Path:
        """Put a program on PATH."""
        path = self.bin / name
        path.write_text(script)
        path.chmod(0o755)
        return path

    def add_uv(self, name: str = "uv", *, status: int = 0) -> Path:
        return self.add(name, UV.format(log=self.log, python=self.bin / VENV_PYTHON, status=status))

    def add_python(
        self,
        name: str = "python3",
        *,
        version: str = "3.11",
        venv: str = "exit 1",
        pip: str = "exit 1",
        loads: str = "exit 1",
    ) -> Path:
        return self.add(name, PYTHON.format(version=version, venv=venv, pip=pip, loads=loads))

    def set_up(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the script."""
        env = {"PATH": str(self.bin), "HOME": str(self.checkout), **self.env}
        command = [str(self.checkout / "scripts/bootstrap"), *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)

    def installed(self) -> list[str]:
        """What uv was told to install since the last look."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.partition(" index=")[0] for line in lines if line.startswith("pip ")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def ready(machine: Machine) -> Machine:
    """A machine with uv and a Python that fits."""
    machine.add_uv()
    machine.add_python()
    return machine


INSTALL = "pip install --quiet --python .venv/bin/python"


def test_everything_comes_from_the_pinned_lists_without_resolving(ready: Machine) -> None:
    assert ready.set_up("dev").returncode == 0
    assert ready.installed() == [
        f"{INSTALL} --no-deps -r requirements/cpu.txt",
        f"{INSTALL} --no-deps --editable .",
        f"{INSTALL} --no-deps -r requirements/dev.txt",
    ]


def test_a_second_set_up_does_nothing_and_says_nothing(ready: Machine) -> None:
    ready.set_up("dev")
    ready.installed()
    again = ready.set_up("dev")
    assert (again.returncode, again.stderr, ready.installed()) == (0, "", [])


def test_tools_for_tests_come_on_top_of_what_runs(ready: Machine) -> None:
    ready.set_up()
    ready.installed()
    ready.set_up("dev")
    assert ready.installed() == [f"{INSTALL} --no-deps -r requirements/dev.txt"]
    ready.set_up()
    assert ready.installed() == []


def test_a_changed_list_is_installed_again(ready: Machine) -> None:
    ready.set_up()
    ready.installed()
    (ready.checkout / "requirements/cpu.txt").write_text("cpu==2\n")
    assert "up to date" in ready.set_up().stderr
    assert len(ready.installed()) == 2


def test_a_failed_installation_is_tried_again(ready: Machine) -> None:
    ready.add_uv(status=1)
    failed = ready.set_up()
    assert failed.returncode == 1
    assert "installing packages failed" in failed.stderr
    ready.installed()
    ready.add_uv()
    assert ready.set_up().returncode == 0
    assert len(ready.installed()) == 2


def test_an_engine_that_cannot_be_loaded_is_said_so(ready: Machine) -> None:
    ready.add_python(VENV_PYTHON, loads="echo 'ImportError: libnuma.so.1' >&2; exit 1")
    failed = ready.set_up()
    assert failed.returncode == 1
    assert "ImportError: libnuma.so.1" in failed.stderr
    assert "SGLang is installed, but cannot be loaded" in failed.stderr
    ready.add_python(VENV_PYTHON, loads="exit 0")
    assert ready.set_up().returncode == 0


def test_a_gpu_is_used_unless_the_cpu_is_asked_for(ready: Machine) -> None:
    ready.add("nvidia-smi", "#!/usr/bin/env bash\necho 'GPU 0'\n")
    ready.set_up()
    assert f"{INSTALL} --no-deps -r requirements/gpu.txt" in ready.installed()
    ready.env["INFERBUS_CPU"] = "1"
    ready.set_up()
    assert f"{INSTALL} --no-deps -r requirements/cpu.txt" in ready.installed()


def test_a_shim_that_fails_is_passed_over(machine: Machine) -> None:
    machine.add_uv()
    machine.add("python3", "#!/usr/bin/env bash\necho 'pyenv: python3: command not found' >&2\nexit 127\n")
    machine.add_python("python3.12", version="3.12")
    assert "creating .venv with Python 3.12.0" in machine.set_up().stderr


@pytest.mark.parametrize("version", ["3.10", "3.13", "2.7"])
def test_another_python_is_refused_with_what_to_do(machine: Machine, version: str) -> None:
    machine.add_uv()
    machine.add_python(version=version)
    refused = machine.set_up()
    assert refused.returncode == 1
    assert f"needs Python 3.11 or 3.12, and no such interpreter runs here (found: Python {version}.0)" in (
        refused.stderr
    )
    assert "PYTHON=/path/to/python3.12" in refused.stderr


def test_a_named_python_that_does_not_fit_is_not_replaced_by_another(ready: Machine) -> None:
    ready.env["PYTHON"] = str(ready.add_python("old", version="3.9"))
    refused = ready.set_up()
    assert refused.returncode == 1
    assert "not a working Python 3.11 or 3.12" in refused.stderr


def test_without_uv_it_is_installed_into_a_private_environment(machine: Machine) -> None:
    uv = machine.add_uv("toy-uv")
    inner = machine.add_python(
        "inner", pip=f'[[ $3 == config ]] || cp_uv="$(ln -sf {uv} .cache/uv-tool/bin/uv)"'
    )
    machine.add_python(venv=f"mkdir -p $3/bin && ln -sf {inner} $3/bin/python")
    done = machine.set_up()
    assert done.returncode == 0, done.stderr
    assert "no uv on PATH: installing" in done.stderr
    assert len(machine.installed()) == 2
    assert os.path.realpath(machine.checkout / ".venv/bin/uv") == str(uv)


def test_where_neither_uv_nor_pip_can_be_had_it_says_what_helps(machine: Machine) -> None:
    machine.add_python(
        venv="echo 'No module named venv' >&2; exit 1", pip="echo 'No module named pip' >&2; exit 1"
    )
    refused = machine.set_up()
    assert refused.returncode == 1
    for part in (
        "No module named venv",
        "No module named pip",
        "install uv:",
        "python3-venv",
        "PIP_INDEX_URL",
    ):
        assert part in refused.stderr
    assert not (machine.checkout / ".cache/uv-tool").exists()


PIP_SETTINGS = """[[ $3 == config ]] && printf '%s\\n' \
    ":env:.cert='/ca.pem'" \
    "global.index-url='https://mirror/simple'" "global.extra-index-url='https://more'" """


def test_packages_come_from_the_index_that_pip_uses(machine: Machine) -> None:
    machine.add_uv()
    machine.add_python(pip=PIP_SETTINGS)
    machine.set_up()
    assert "index=https://mirror/simple extra=https://more cert=/ca.pem" in machine.log.read_text()


def test_an_index_that_is_set_for_uv_comes_before_that_of_pip(machine: Machine) -> None:
    machine.add_uv()
    machine.add_python(pip=PIP_SETTINGS)
    machine.env["UV_DEFAULT_INDEX"] = "https://own/simple"
    machine.set_up()
    assert "index=https://own/simple extra= " in machine.log.read_text()


def test_an_unknown_word_shows_the_usage(ready: Machine) -> None:
    shown = ready.set_up("everything")
    assert shown.returncode == 2
    assert "scripts/bootstrap dev" in shown.stderr
