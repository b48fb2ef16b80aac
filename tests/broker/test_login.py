"""Ways to log in, and TLS, against real servers that demand them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import nkeys
import pytest

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus import natspy
from inferbus.workers.bus.connection import Bus
from inferbus.workers.config import BusSettings
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually

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


def tls(certificates: Path, *, verify: bool = False) -> str:
    """A server's configuration."""
    return f"""tls {{
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
    with pytest.raises(BusUnavailable, match="cannot connect"):
        await Bus.connect(BusSettings(nkey=tmp_path / "seed"), name="test")


async def test_a_token_logs_in(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, extra='authorization { token: "t0ken" }') as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), token="t0ken"), name="test")
        await bus.flush()
        await bus.close()


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
