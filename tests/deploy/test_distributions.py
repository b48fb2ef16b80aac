"""The wheel and the source distribution: what is in them, and a user's program that runs on the wheel."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from inferbus.workers.stack.server import NatsServer
from tests.support.fleet import MODEL, fleet

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}

# A program with top-level packages of the same names as the two folders of this checkout.
PROGRAM = """
import asyncio, json, sys

import schemas, workers

import inferbus
from inferbus import Client

BODY = {"token_ids": [1, 2], "max_tokens": 3}


async def main(url, model):
    async with Client.connect(url) as client:
        live = await client.tokens(model, **BODY).answer()
        job = await client.submit("tokens", model, BODY)
        durable = (await client.result(job, timeout=30)).answer
    print(json.dumps({
        "live": live.choices[0].token_ids,
        "durable": durable.choices[0].token_ids,
        "own": [schemas.OWN, workers.OWN],
        "inferbus": inferbus.__path__[0],
        "torch": "torch" in sys.modules,
    }))


asyncio.run(main(*sys.argv[1:]))
"""


def uv(*arguments: str | Path) -> None:
    """Runs uv; its messages are in the failure."""
    done = subprocess.run([UV, *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--quiet", "--out-dir", folder, ROOT)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Somebody's program."""
    folder = tmp_path / "project"
    for name in ("schemas", "workers"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"OWN = {name!r}\n")
    (folder / "main.py").write_text(PROGRAM)
    return folder


@pytest.fixture(params=["wheel", "editable"])
def environment(built: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A virtual environment with nothing but inferbus and what a scripted worker needs."""
    how: str = request.param
    folder = tmp_path / how
    [wheel] = built.glob("*.whl")
    what = [f"{wheel}[worker]"] if how == "wheel" else ["--editable", f"{ROOT}[worker]"]
    uv("venv", "--quiet", "--python", sys.executable, folder)
    pins = ROOT / "requirements" / "cpu.txt"
    uv("pip", "install", "--quiet", "--python", folder, "--constraint", pins, *what)
    return folder


def package_files() -> set[str]:
    """The files of the package, those behind its links included."""
    return {
        (Path(folder) / name).relative_to(ROOT).as_posix()
        for folder, _, names in os.walk(ROOT / "inferbus", followlinks=True)
        for name in names
        if not folder.endswith("__pycache__")
    }


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    [path] = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = {re.sub(r"^inferbus-[^/]+\.dist-info/", "", name) for name in wheel.namelist()}
    assert names - METADATA == package_files()
    assert names >= METADATA
    assert "inferbus/py.typed" in names


def test_the_source_distribution_holds_the_package_and_what_builds_it(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    # Files: where links are not followed, the wheel that is built from it would be empty.
    assert all(member.isfile() for member in members)
    names = {member.name.partition("/")[2] for member in members}
    assert names - package_files() == {".gitignore", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert package_files() <= names


async def test_a_program_with_packages_named_workers_and_schemas_gets_answers_through_the_client(
    environment: Path, project: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.toml"
    script.write_text("[[rules]]\nlength = 3\n")
    command = [str(environment / "bin/inferbus"), "worker", "both", "--scripted", str(script)]
    clean = {"PYTHONPATH": ""}
    async with (
        NatsServer(tmp_path / "nats", sync_interval=None) as server,
        fleet(server, tmp_path) as workers,
    ):
        await workers.ready(await workers.spawn("w1", command, clean), within=30)
        program = await asyncio.create_subprocess_exec(
            *(environment / "bin/python", "main.py", server.url, MODEL),
            cwd=project,
            env=os.environ | clean,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await program.communicate()
    assert program.returncode == 0, errors.decode()
    told = json.loads(out)
    assert told["live"] == told["durable"] == [3, 4, 5]
    assert told["own"] == ["schemas", "workers"]
    assert not told["torch"]
    where = ROOT if environment.name == "editable" else environment
    assert Path(told["inferbus"]).is_relative_to(where)
