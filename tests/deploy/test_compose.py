"""compose.yaml, the Dockerfile and the NATS configuration, as far as they can be checked without a daemon."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from inferbus.workers.cli.fleet import health
from inferbus.workers.cli.serve import worker
from inferbus.workers.config import WorkerSettings, options, resolve
from inferbus.workers.stack.server import find_binary
from tests.support.eventually import eventually

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose.yaml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
NATS_CONFIG = ROOT / "deploy" / "nats" / "nats.conf"
WORKERS = ("prefill", "decode", "prefill-gpu", "decode-gpu")
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+):-([^}]*)\}")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    # Every variable takes its default, as for a user who has set none.
    loaded: dict[str, Any] = yaml.safe_load(VARIABLE.sub(r"\2", COMPOSE.read_text()))
    return loaded


def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


def test_plain_up_starts_a_fleet_on_the_cpu_and_nothing_for_a_gpu(compose: dict[str, Any]) -> None:
    started = {name for name, service in services(compose).items() if "profiles" not in service}
    assert started == {"nats", "models", "prefill", "decode", "gateway"}
    assert services(compose)["prefill"]["image"] == services(compose)["models"]["image"] == "inferbus:cpu"


def test_the_gpu_profile_asks_for_nvidia_devices(compose: dict[str, Any]) -> None:
    for name in ("prefill-gpu", "decode-gpu"):
        service = services(compose)[name]
        assert service["profiles"] == ["gpu"]
        [device] = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert services(compose)["models-gpu"]["build"]["target"] == "gpu"


def test_ports_are_published_on_the_loopback_interface_only(compose: dict[str, Any]) -> None:
    published = [port for service in services(compose).values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_is_started_by_a_command_that_exists(compose: dict[str, Any], name: str) -> None:
    program, subcommand, *arguments = shlex.split(services(compose)[name]["command"])
    assert (program, subcommand) == ("inferbus", "worker")
    with worker.make_context("worker", arguments) as context:
        assert context.params["role"] == name.removesuffix("-gpu")
        # What the command does not know goes on to SGLang; these are flags of SGLang's.
        flags = {flag for flag in context.params["engine_flags"] if flag.startswith("--")}
    assert flags - {"--base-gpu-id"} == {"--model-path"}


def test_the_gateway_listens_where_its_port_is_published(compose: dict[str, Any]) -> None:
    service = services(compose)["gateway"]
    assert shlex.split(service["command"]) == ["inferbus", "gateway"]
    settings = resolve({}, service["environment"]).gateway
    assert (settings.address, settings.keys) == (("0.0.0.0", 8000), {})
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    match = re.fullmatch(r"(\d+)m", service["stop_grace_period"])
    assert match
    assert int(match[1]) * 60 > settings.grace


def test_the_health_check_is_a_command_that_exists() -> None:
    checks = re.findall(r"^HEALTHCHECK .*CMD (\[.+\])$", DOCKERFILE.read_text(), re.MULTILINE)
    assert len(checks) == 2
    for check in checks:
        program, subcommand, *arguments = json.loads(check)
        assert (program, subcommand) == ("inferbus", "health")
        with health.make_context("health", arguments) as context:
            assert context.params["here"]


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_can_be_scaled(compose: dict[str, Any], name: str) -> None:
    assert not services(compose)[name].keys() & {"container_name", "ports", "hostname", "network_mode"}


@pytest.mark.parametrize("name", WORKERS)
def test_a_stopped_worker_has_time_to_drain(compose: dict[str, Any], name: str) -> None:
    match = re.fullmatch(r"(\d+)m", services(compose)[name]["stop_grace_period"])
    assert match
    assert int(match[1]) * 60 > WorkerSettings().grace + 15


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_waits_for_nats_and_its_model(compose: dict[str, Any], name: str) -> None:
    models = "models-gpu" if name.endswith("gpu") else "models"
    assert services(compose)[name]["depends_on"] == {
        "nats": {"condition": "service_healthy"},
        models: {"condition": "service_completed_successfully"},
    }


def test_environment_variables_of_ours_exist(compose: dict[str, Any]) -> None:
    known = {option.env for option in options()} | {"INFERBUS_CACHE"}
    used = {
        variable
        for service in services(compose).values()
        for variable in service.get("environment", {})
        if variable.startswith("INFERBUS_")
    }
    used |= set(re.findall(r"INFERBUS_\w+", DOCKERFILE.read_text() + COMPOSE.read_text()))
    assert used <= known


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_reaches_the_fleets_nats(compose: dict[str, Any], name: str) -> None:
    assert services(compose)[name]["environment"]["INFERBUS_NATS_URL"] == "nats://nats:4222"


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_serves_its_metrics_where_the_documentation_says(compose: dict[str, Any], name: str) -> None:
    port = services(compose)[name]["environment"]["INFERBUS_METRICS_PORT"]
    assert f"type: A, port: {port}" in (ROOT / "docs" / "operating.md").read_text()


def test_nothing_runs_with_more_rights_than_it_needs(compose: dict[str, Any]) -> None:
    for service in services(compose).values():
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_files_that_are_mounted_or_copied_exist(compose: dict[str, Any]) -> None:
    mounted = [
        volume.split(":")[0]
        for service in services(compose).values()
        for volume in service.get("volumes", [])
        if volume.startswith("./")
    ]
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE.read_text(), re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert mounted
    assert copied
    assert [path for path in (*mounted, *copied) if not (ROOT / path).exists()] == []


def test_everything_copied_is_let_through_by_dockerignore() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE.read_text(), re.MULTILINE):
        assert {source.split("/")[0] for source in line.split()[:-1]} <= allowed


def test_images_run_as_somebody_else_than_root() -> None:
    _, *stages = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE)
    named = {stage.split()[2]: stage for stage in stages}
    assert {"client", "cpu", "gpu"} <= named.keys()
    for target in ("client", "cpu", "gpu"):
        assert re.search(r"^USER 10001:10001$", named[target], re.MULTILINE)
        assert not re.search(r"^USER root", named[target], re.MULTILINE)


def test_images_say_what_they_are_and_of_which_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', DOCKERFILE.read_text()))
    assert {name: labels[name] for name in ("title", "licenses", "version")} == {
        "title": project["name"],
        "licenses": project["license"],
        "version": project["version"],
    }


@pytest.mark.parametrize(
    ("pinned", "extra"),
    [("cpu.txt", "worker"), ("cpu.txt", "gateway"), ("gpu.txt", "gpu"), ("gpu.txt", "gateway")],
)
def test_an_image_has_what_the_package_asks_for(pinned: str, extra: str) -> None:
    lines = (ROOT / "requirements" / pinned).read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(line) for line in project["dependencies"]]
    for requirement in (*asked, *required_by(extra, project["optional-dependencies"])):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])


def required_by(extra: str, extras: dict[str, list[str]]) -> Iterator[Requirement]:
    """What an extra asks for, through other extras of ours as well."""
    for requirement in map(Requirement, extras[extra]):
        if requirement.name == "inferbus":
            for other in requirement.extras:
                yield from required_by(other, extras)
        else:
            yield requirement


def test_docker_compose_reads_the_file() -> None:
    if not (program := shutil.which("docker-compose")):
        pytest.skip("needs docker-compose")
    for profile in ([], ["--profile", "gpu"]):
        done = subprocess.run(
            [program, "-f", str(COMPOSE), *profile, "config", "-q"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_server_reads_its_configuration() -> None:
    done = subprocess.run(
        [find_binary(), "-t", "-c", NATS_CONFIG], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_server_stores_where_it_is_started_and_the_container_on_its_volume(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    server = services(compose)["nats"]
    assert f"jetstream:{server['working_dir']}" in server["volumes"]
    config = tmp_path / "nats.conf"
    config.write_text(NATS_CONFIG.read_text().replace(":4222", ":-1").replace(":8222", ":-1"))
    child = subprocess.Popen([find_binary(), "-c", config], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stderr is not None
        said = next(line for line in child.stderr if "Server is ready" in line or "[FTL]" in line)
        assert "Server is ready" in said
        assert (tmp_path / "jetstream").is_dir()
    finally:
        child.terminate()
        child.communicate()


def test_an_acknowledged_job_is_on_disk() -> None:
    assert re.search(r"^\s*sync_interval: always$", NATS_CONFIG.read_text(), re.MULTILINE)


APT_IS_HELD = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 1 (apt-get)"


class Machine:
    """A machine whose programs only look like Docker's, for the script that brings Docker up."""

    def __init__(self, folder: Path, **programs: str) -> None:
        self.state, self.scratch, bin = folder / "state", folder / "scratch", folder / "bin"
        for made in (self.state, self.scratch, bin):
            made.mkdir()
        self.descriptors = self.state / "descriptors"
        fakes = {
            # A daemon answers once there is one, has every image, and starts nothing.
            "docker": f'[[ $1 != run ]] && {{ [[ $1 != info ]] || [[ -e "{self.descriptors}" ]]; }}',
            "dockerd": f'find /proc/$$/fd -type l -printf "%f\\n" >"{self.descriptors}"; sleep 5',
            "dpkg-query": "echo install ok installed",
            "id": "echo 0",
            "df": "echo 100",
            "apt-get": "exit 1",
        }
        for name, script in (fakes | programs).items():
            (bin / name.replace("_", "-")).write_text(f"#!/usr/bin/env bash\n{script}\n")
            (bin / name.replace("_", "-")).chmod(0o755)
        self._environment = {
            "PATH": f"{bin}:{os.environ['PATH']}",
            "INFERBUS_DOCKER_STATE": str(self.state),
            "INFERBUS_STAND_IN": "1",
            "TMPDIR": str(self.scratch),
        }

    def bring_up(self, **more: Any) -> subprocess.Popen[str]:
        return self.runs(ROOT / "tests/deploy/bring_up_docker.sh", **more)

    def runs(self, script: Path, **more: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", script], env=self._environment, stderr=subprocess.PIPE, text=True, **more
        )


def test_the_docker_daemon_inherits_no_descriptors(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with (tmp_path / "lock").open("w") as lock, machine.bring_up(pass_fds=[lock.fileno()]) as script:
        _, said = script.communicate(timeout=60)
    assert (script.returncode, "no container starts" in said) == (1, True), said
    # 255 is the script that the stand-in itself runs; `find` has the folder open.
    inherited = machine.descriptors.read_text().split()
    assert {int(number) for number in inherited} <= {0, 1, 2, 255}


def test_the_packages_of_docker_wait_for_another_program_that_uses_apt(tmp_path: Path) -> None:
    held = f'[[ -e "$TMPDIR/asked" ]] || {{ touch "$TMPDIR/asked"; echo "{APT_IS_HELD}"; exit 100; }}'
    machine = Machine(tmp_path, dpkg_query="exit 1", apt_get=held)
    with machine.bring_up() as script:
        _, said = script.communicate(timeout=60)
    assert "another program uses apt" in said
    assert machine.descriptors.exists()


async def test_a_signal_ends_all_that_brings_docker_up_and_leaves_no_files(tmp_path: Path) -> None:
    made, started = tmp_path / "made", tmp_path / "started"
    machine = Machine(
        tmp_path,
        docker="[[ $1 == info ]]",
        # Like the real one it waits for programs of its own.
        debootstrap=f'mkdir -p "$4"; sleep 600 & echo $$ $! >"{made}"; mv "{made}" "{started}"; wait',
    )
    with machine.bring_up() as script:
        try:
            await eventually(started.exists)
            script.terminate()
            await asyncio.to_thread(script.communicate, timeout=30)
        finally:
            script.kill()
    assert script.returncode == 128 + signal.SIGTERM
    assert list(machine.scratch.iterdir()) == []
    processes = [Path("/proc", process) for process in started.read_text().split()]
    await eventually(lambda: not any(process.exists() for process in processes))


def test_ci_passes_and_says_so_where_docker_cannot_be_brought_up(tmp_path: Path) -> None:
    machine = Machine(tmp_path, id="echo 1000", make="echo make $1")
    with machine.runs(ROOT / ".ci/run", stdout=subprocess.PIPE) as script:
        out, said = script.communicate(timeout=60)
    assert script.returncode == 0
    assert out.splitlines()[0] == "make test"
    assert "NOT TESTED" in out
    assert "run it as root" in said


def test_ci_fails_where_the_containers_do(tmp_path: Path) -> None:
    machine = Machine(tmp_path, make="[[ $1 == test ]]", timeout="exit 0")
    with machine.runs(ROOT / ".ci/run", stdout=subprocess.PIPE) as script:
        script.communicate(timeout=60)
    assert script.returncode == 1
