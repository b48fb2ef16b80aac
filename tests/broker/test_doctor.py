"""`inferbus doctor` on set-ups that are as they should be, and on such that are not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from inferbus.schemas.fleet import Load, Role, Signature, State, WorkerInfo
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.cli import main
from inferbus.workers.config import BusSettings, Settings, StreamSettings
from inferbus.workers.doctor import Finding, clocks, examine, fleet, machine, permissions
from inferbus.workers.doctor.permissions import User
from inferbus.workers.stack.server import NatsServer
from tests.support.fleet import MODEL
from tests.support.fleet import fleet as started
from tests.support.users import configuration, login

pytestmark = pytest.mark.asyncio(loop_scope="module")

ACCOUNTS = """
accounts {
  plain { users: [{user: plain, password: plain}] }
  small { jetstream: {max_mem: 0, max_file: 8MB}, users: [{user: small, password: small}] }
}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def users(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    """A server with the users that are shipped, and the streams."""
    directory = tmp_path_factory.mktemp("doctor")
    async with NatsServer(directory, sync_interval=None, extra=configuration()) as server:
        bus = await Bus.connect(login(server, "root"), name="test")
        await provision(bus, StreamSettings())
        await bus.close()
        yield server


def settings(server: NatsServer, user: str, **streams: Any) -> Settings:
    return Settings(bus=login(server, user), streams=StreamSettings(**streams))


def named(findings: list[Finding], name: str) -> Finding:
    """The only finding of that name."""
    found = [each for each in findings if each.name == name]
    assert len(found) == 1, findings
    return found[0]


def levels(findings: list[Finding]) -> dict[str, str]:
    return {each.name: each.level for each in findings}


async def test_nothing_is_found_where_a_pair_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        NatsServer(tmp_path / "nats", sync_interval=None) as server,
        started(server, tmp_path) as found,
    ):
        await found.start("prefill", ack_wait=30)
        await found.start("decode", ack_wait=30)
        findings = await examine(Settings(bus=BusSettings(urls=(server.url,))))
        assert {each.level for each in findings} == {"ok"}, findings
        assert named(findings, f"model {MODEL}").found == "1 prefill, 1 decode"
        assert named(findings, "streams").found == f"{len(layout.CONTRACT)} streams as the settings ask"
        assert await asyncio.to_thread(main, ["doctor", "--nats-url", server.url]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert f"ok    model {MODEL}: 1 prefill, 1 decode" in lines


async def test_a_server_that_is_not_there_is_told_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = "nats://127.0.0.1:9"
    assert await asyncio.to_thread(main, ["doctor", "--nats-url", url, "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert (finding["name"], finding["level"]) == ("nats", "fail")
    assert finding["mend"].startswith("start nats-server (deploy/nats/nats.conf), or set --nats-url")


async def test_a_wrong_password_is_told_apart_from_a_server_that_is_not_there(users: NatsServer) -> None:
    wrong = BusSettings(urls=(users.url,), user="acme", password="no")
    finding = named(await examine(Settings(bus=wrong)), "nats")
    assert finding.level == "fail"
    assert finding.mend.startswith("log in as one of the server's users")


@pytest.mark.parametrize("user", ["client", "worker", "operator", "gateway"])
async def test_the_users_that_are_shipped_may_do_what_their_role_does(users: NatsServer, user: User) -> None:
    name = {"client": "acme"}.get(user, user)
    given = login(users, name)
    inboxes = given.subjects.worker_inboxes if user == "worker" else None
    bus = await Bus.connect(given, name="test", inbox_prefix=inboxes)
    try:
        finding = await permissions.check(bus, user, "acme")
    finally:
        await bus.close()
    assert finding.level == "ok", finding


async def test_inboxes_that_the_user_may_not_have_are_told(users: NatsServer) -> None:
    given = msgspec.structs.replace(login(users, "acme"), inbox_prefix="_INBOX")
    finding = named(await examine(Settings(bus=given)), "nats")
    assert finding.level == "fail"
    assert "--nats-inbox-prefix" in finding.mend


async def test_a_permission_that_is_missing_is_named_with_its_subject_and_purpose(users: NatsServer) -> None:
    findings = await examine(settings(users, "acme"), owner="globex")
    finding = named(findings, "permissions (client)")
    assert finding.level == "fail"
    assert "submit jobs" in finding.found
    assert "send live requests" not in finding.found
    assert "allow it to publish: infer.jobs.inferbus-doctor.batch.globex.tokens" in finding.mend
    assert "allow it to subscribe: infer.results.globex." in finding.mend
    # What a client may not look at is no failure.
    assert levels(findings)["streams"] == levels(findings)["jetstream"] == "skip"


async def test_the_examination_stores_and_removes_nothing(users: NatsServer) -> None:
    bus = await Bus.connect(login(users, "root"), name="test")
    try:
        jetstream = JetStream(bus)
        for subject in ("infer.cancel.acme.j", "infer.objects.acme.o.0", "infer.stream.acme.j"):
            await jetstream.store(subject, b"")
        info = await jetstream.call(f"STREAM.INFO.{layout.DEAD}")
        entrance = info["config"]["subjects"][0].replace(">", "m.tokens")
        await jetstream.store(entrance, b"a letter")

        async def stored() -> dict[str, int]:
            streams = (await jetstream.call("STREAM.LIST"))["streams"]
            return {each["config"]["name"]: each["state"]["messages"] for each in streams}

        before = await stored()
        assert sum(before.values()) == 4
        for user in ("client", "operator"):
            await examine(settings(users, "root"), user=user)
        await permissions.check(bus, "worker", "acme")
        assert await stored() == before
    finally:
        await bus.close()


async def test_accounts_without_jetstream_or_with_little_room_are_told(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "nats", sync_interval=None, extra=ACCOUNTS) as server:
        without = named(await examine(settings(server, "plain")), "jetstream")
        findings = await examine(settings(server, "small"))
    assert without.level == "fail"
    assert "jetstream" in without.mend
    assert named(findings, "jetstream").found.startswith("the account may store 8 MiB, and the streams ask")
    assert named(findings, "streams").mend.startswith("start a worker, or run `inferbus streams --adopt`")
    assert named(findings, "workers").level == "fail"


async def test_a_store_without_memory_matters_where_several_copies_are_asked_for(tmp_path: Path) -> None:
    memory = f"jetstream {{store_dir: {json.dumps(str(tmp_path / 'store'))}, max_memory_store: 0}}"
    async with NatsServer(tmp_path / "nats", sync_interval=None, extra=memory) as server:
        bus = BusSettings(urls=(server.url,))
        one = named(await examine(Settings(bus=bus)), "memory store")
        three = Settings(bus=bus, streams=StreamSettings(replicas=3))
        several = named(await examine(three), "memory store")
    assert (one.level, several.level) == ("warn", "fail")
    assert "max_memory_store" in several.mend


async def test_a_small_payload_and_weaker_streams_are_told(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "nats", sync_interval=None, max_payload=64 * 1024) as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,)), name="test")
        await provision(bus, StreamSettings())
        await bus.close()
        given = Settings(bus=BusSettings(urls=(server.url,)), streams=StreamSettings(results_max_age=1e6))
        findings = await examine(given)
    assert named(findings, "payload").level == "warn"
    weaker = named(findings, "streams")
    assert weaker.level == "fail"
    assert "INFER_RESULTS: max_age is 604800 s, wanted 1e+06 s" in weaker.found
    assert "inferbus streams --adopt" in weaker.mend


async def test_another_deployment_in_the_account_is_named(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "nats", sync_interval=None) as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), prefix="acme.llm"), name="test")
        await provision(bus, StreamSettings())
        await bus.close()
        findings = await examine(Settings(bus=BusSettings(urls=(server.url,))))
    assert "or set --nats-prefix to that of ACME_LLM" in named(findings, "streams").mend
    assert named(findings, "prefix").found.endswith("other deployments in this account: ACME_LLM")


SIGNATURE = Signature(
    model="m",
    dtype="bf16",
    kv_dtype="bf16",
    page_size=1,
    layers=1,
    kv_heads=1,
    head_dim=1,
    tp=1,
    dp=1,
    pp=1,
    backend="nixl",
)


def worker(role: Role, state: State = "ready", signature: Signature = SIGNATURE) -> WorkerInfo:
    return WorkerInfo(
        worker=f"{role}-{state}",
        role=role,
        state=state,
        model="m",
        kinds=[],
        tokenizer=False,
        engine="scripted",
        version="0",
        host="h",
        started=1.0,
        load=Load(slots=1),
        signature=signature,
        reason="no memory" if state == "failed" else None,
    )


@pytest.mark.parametrize(
    ("workers", "level", "found"),
    [
        ([], "fail", "no worker is announced"),
        ([worker("both")], "ok", "1 both"),
        ([worker("prefill")], "fail", "1 prefill, and no decode worker: nothing is answered"),
        ([worker("decode")], "fail", "1 decode, and no prefill worker: jobs wait"),
        ([worker("decode"), worker("prefill", "starting")], "warn", "1 decode; prefill-starting: starting"),
        ([worker("decode"), worker("prefill")], "ok", "1 prefill, 1 decode"),
        ([worker("decode", "draining")], "fail", "no worker ready"),
        (
            [worker("decode"), worker("prefill", signature=msgspec.structs.replace(SIGNATURE, tp=2))],
            "fail",
            "no prefill worker has the signature of decode-ready",
        ),
    ],
)
async def test_a_model_that_cannot_be_served_is_told(
    workers: list[WorkerInfo], level: str, found: str
) -> None:
    finding = fleet.check(workers)[0]
    assert (finding.level, finding.found) == (level, found)


async def test_a_worker_that_failed_is_named_with_its_reason() -> None:
    found = fleet.check([worker("both"), worker("both", "failed")])
    assert named(found, "workers").found == "both-failed on h failed: no memory"


@pytest.mark.parametrize(("skew", "level"), [(0.1, "ok"), (-1.9, "ok"), (3.0, "warn"), (-60.0, "warn")])
async def test_a_clock_that_is_far_from_the_server_s_is_told(skew: float, level: str) -> None:
    assert clocks.judged(skew).level == level


async def test_a_machine_for_workers_has_its_versions_gpus_and_a_transfer() -> None:
    found = levels(await machine.check())
    assert {name: found[name] for name in ("python", "sglang", "nixl", "transfer")} == dict.fromkeys(
        ("python", "sglang", "nixl", "transfer"), "ok"
    )
    assert found["gpu"] in ("ok", "warn")
