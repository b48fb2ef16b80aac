"""Ways to log in, and TLS, against real servers that demand them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import nkeys
import pytest

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection import natspy
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.config import BusSettings
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.jwts import Operator, credentials

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and a server's and a client's certificate made by it."""
    home = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=home, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test ca")
    (home / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", "names", "-out", f"{name}.pem"),
        )
    return home


def tls(certificates: Path, *, verify: bool = False, first: str = "false") -> str:
    """A server's configuration."""
    return f"""tls {{
        handshake_first: {first}
        cert_file: "{certificates}/server.pem"
        key_file: "{certificates}/server.key"
        ca_file: "{certificates}/ca.pem"
        verify: {str(verify).lower()}
    }}"""


@needs_openssl
async def test_a_connection_is_encrypted_and_made_again_after_a_restart(
    tmp_path: Path, certificates: Path
) -> None:
    async with NatsServer(tmp_path, extra=tls(certificates)) as server:
        bus = await Bus.connect(
            BusSettings(urls=(server.url.replace("nats:", "tls:"),), tls_ca=certificates / "ca.pem"),
            name="test",
        )
        assert natspy.is_encrypted(bus.nc)
        await server.kill()
        await server.restart()
        await eventually(lambda: bus.reconnects == 1 and bus.connected)
        await bus.flush()
        assert natspy.is_encrypted(bus.nc)
        await bus.close()


@needs_openssl
async def test_a_client_certificate_is_presented(tmp_path: Path, certificates: Path) -> None:
    async with NatsServer(tmp_path, extra=tls(certificates, verify=True)) as server:
        trust = BusSettings(urls=(server.url,), tls_ca=certificates / "ca.pem")
        own = {"tls_cert": certificates / "client.pem", "tls_key": certificates / "client.key"}
        bus = await Bus.connect(msgspec.structs.replace(trust, **own), name="test")
        await bus.flush()
        await bus.close()
        with pytest.raises(BusUnavailable):
            await Bus.connect(trust, name="test")


@needs_openssl
async def test_a_server_that_nobody_vouches_for_is_refused(tmp_path: Path, certificates: Path) -> None:
    async with NatsServer(tmp_path, extra=tls(certificates)) as server:
        with pytest.raises(BusUnavailable, match=r"TLS with .* failed: .*certificate verify failed"):
            await Bus.connect(BusSettings(urls=(server.url,)), name="test")


async def test_tls_files_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("not a certificate")
    with pytest.raises(BusUnavailable, match="the TLS files cannot be used"):
        await Bus.connect(BusSettings(tls_ca=tmp_path / "ca.pem"), name="test")


async def test_an_nkey_logs_in(tmp_path: Path) -> None:
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    (tmp_path / "seed").write_bytes(bytes(seed) + b"\n")
    (tmp_path / "other").write_bytes(bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)))
    async with NatsServer(
        tmp_path / "nats", extra=f"authorization {{ users: [ {{ nkey: {public} }} ] }}"
    ) as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), nkey=tmp_path / "seed"), name="test")
        await bus.flush()
        await bus.close()
        with pytest.raises(BusUnavailable, match="refuses these credentials"):
            await Bus.connect(BusSettings(urls=(server.url,), nkey=tmp_path / "other"), name="test")


async def test_a_file_that_holds_no_seed_is_told(tmp_path: Path) -> None:
    (tmp_path / "seed").write_text("nothing")
    with pytest.raises(BusUnavailable, match="the NKey file holds no user seed"):
        await Bus.connect(BusSettings(nkey=tmp_path / "seed"), name="test")


async def test_a_token_logs_in(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, extra='authorization { token: "t0ken" }') as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), token="t0ken"), name="test")
        await bus.flush()
        await bus.close()


async def test_a_urls_password_is_percent_decoded(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, extra='authorization { user: "a@b", password: "p/w:d%" }') as server:
        url = server.url.replace("nats://", "nats://a%40b:p%2Fw%3Ad%25@")
        bus = await Bus.connect(BusSettings(urls=(url,)), name="test")
        await bus.flush()
        await bus.close()


@needs_openssl
async def test_a_server_that_begins_with_tls_is_reached(tmp_path: Path, certificates: Path) -> None:
    # It waits so long for the handshake before it says INFO, as which it tells the test that it is there.
    async with NatsServer(tmp_path, extra=tls(certificates, first="500ms")) as server:
        settings = BusSettings(urls=(server.url,), tls_ca=certificates / "ca.pem", tls_first=True)
        bus = await Bus.connect(settings, name="test")
        await server.kill()
        await server.restart()
        await eventually(lambda: bus.reconnects == 1 and bus.connected)
        assert natspy.is_encrypted(bus.nc)
        await bus.close()
        impatient = msgspec.structs.replace(settings, tls_first=False, connect_timeout=0.2)
        with pytest.raises(BusUnavailable, match="--nats-tls-first"):
            await Bus.connect(impatient, name="test")


@needs_openssl
async def test_a_connection_with_tls_ends_without_a_word(
    tmp_path: Path, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with NatsServer(tmp_path, extra=tls(certificates)) as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), tls_ca=certificates / "ca.pem"), name="test")
        await bus.close()
        lost = await Bus.connect(BusSettings(urls=(server.url,), tls_ca=certificates / "ca.pem"), name="test")
        await server.stop()
        await eventually(lambda: not lost.connected)
        await lost.close()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


@needs_openssl
async def test_a_renewed_certificate_is_presented_at_the_next_connection(
    tmp_path: Path, certificates: Path
) -> None:
    mine = {"tls_cert": tmp_path / "mine.pem", "tls_key": tmp_path / "mine.key"}
    for kind in ("pem", "key"):
        shutil.copy(certificates / f"client.{kind}", tmp_path / f"mine.{kind}")
    async with NatsServer(tmp_path / "nats", extra=tls(certificates, verify=True)) as server:
        trust = BusSettings(urls=(server.url,), tls_ca=certificates / "ca.pem")
        bus = await Bus.connect(msgspec.structs.replace(trust, **mine), name="test")
        (tmp_path / "mine.pem").write_text("it is being written")
        await server.kill()
        await server.restart()
        await eventually(lambda: bus.errors)
        shutil.copy(certificates / "client.pem", tmp_path / "mine.pem")
        await eventually(lambda: bus.connected)
        await bus.flush()
        await bus.close()


WRITTEN: dict[str, Callable[[str, str], str]] = {
    "as nsc writes it": credentials,
    "other line ends": lambda jwt, seed: credentials(jwt, seed).replace("\n", "\r\n"),
    "text around it": lambda jwt, seed: f"# for staging\n\n{credentials(jwt, seed)}\n*** IMPORTANT ***\n",
    "fewer dashes": lambda jwt, seed: credentials(jwt, seed).replace("-----", "--"),
    "no markers": lambda jwt, seed: f"  {jwt}\n{seed}",
    "a byte order mark": lambda jwt, seed: "\ufeff" + credentials(jwt, seed),
}
"""Credentials files by those who write them."""


@pytest.mark.parametrize("written", WRITTEN.values(), ids=list(WRITTEN))
async def test_a_credentials_file_is_read_however_it_was_written(
    tmp_path: Path, written: Callable[[str, str], str]
) -> None:
    operator = Operator()
    (tmp_path / "creds").write_bytes(written(*operator.user(valid=600)).encode())
    async with NatsServer(tmp_path / "nats", extra=operator.server) as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), creds=tmp_path / "creds"), name="test")
        await bus.flush()
        await bus.close()


async def test_a_login_that_expires_goes_on_with_what_its_file_says_by_then(tmp_path: Path) -> None:
    operator = Operator()
    path = tmp_path / "creds"
    path.write_text(credentials(*operator.user(valid=3)))
    async with NatsServer(tmp_path / "nats", extra=operator.server) as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), creds=path), name="test")
        got: list[bytes] = []
        await bus.subscribe("a", lambda message: got.append(message.data))
        await eventually(lambda: not bus.connected)
        # Refused once more before somebody renews the file, a little late.
        errors = bus.errors
        await eventually(lambda: bus.errors > errors)
        assert not bus.closed.is_set()
        path.write_text(credentials(*operator.user(valid=600)))
        await eventually(lambda: bus.connected)
        bus.send("a", b"x")
        await eventually(lambda: got == [b"x"])
        await bus.close()


async def test_a_login_that_stays_refused_closes_the_connection_and_calls_fail_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferbus.workers.bus.connection.bus.REFUSED_FOR", 5.0)
    operator = Operator()
    path = tmp_path / "creds"
    path.write_text(credentials(*operator.user(valid=3)))
    async with NatsServer(tmp_path / "nats", extra=operator.server) as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), creds=path), name="test")
        await eventually(bus.closed.is_set, within=40)
        assert bus.failure is not None
        assert "the login stays refused" in bus.failure
        with pytest.raises(BusUnavailable, match="the login stays refused"):
            await bus.request("a", timeout=3600)
        with pytest.raises(BusUnavailable):
            await bus.flush(timeout=3600)


@pytest.mark.faults
async def test_credentials_that_end_while_it_runs_are_told_once_and_tried_again(tmp_path: Path) -> None:
    from structlog.testing import capture_logs

    login = 'authorization { user: u, password: "%s" }'
    async with NatsServer(tmp_path / "a", extra=login % "old") as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), user="u", password="old"), name="test")
        await server.stop()
        with capture_logs() as logs:
            async with NatsServer(tmp_path / "b", port=server.port, extra=login % "new"):
                before = bus.errors
                await eventually(lambda: bus.errors > before + 4)
                assert not bus.connected
                assert not bus.closed.is_set()
        told = [entry for entry in logs if entry["log_level"] == "warning" and "uthoriz" in str(entry)]
        assert len(told) <= 1
        await server.start()
        await eventually(lambda: bus.connected)
        await bus.close()
