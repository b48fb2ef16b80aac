"""Who this process is to the server. Files are read anew for every connection, so that renewed ones count.

nats-py reads a certificate and an NKey once, and a credentials file without its markers for ever.
"""

from __future__ import annotations

import base64
import codecs
import re
import ssl
from pathlib import Path
from typing import Final
from urllib.parse import ParseResult, unquote

import nats.errors
import nkeys
from nacl.exceptions import CryptoError

from inferbus.workers.config import BusSettings

_JWT: Final = re.compile(r"\beyJ[\w-]+=*\.[\w-]+=*\.[\w-]+=*")
_SEED: Final = re.compile(r"\bSU[A-Z2-7]{56}\b")
"""By their own form: other systems write other markers around them, or none."""


class LoginError(nats.errors.Error):  # type: ignore[misc]  # nats-py has no types
    """A file cannot be used; nats-py tries again later."""


class Login:
    """The login of one connection.

    Args:
        settings: Of the connection.
    """

    def __init__(self, settings: BusSettings) -> None:
        self._settings = settings

    def check(self) -> None:
        """Reads every file once.

        Raises:
            LoginError: One cannot be used.
        """
        self.context()
        self.fields("", None)

    def fields(self, nonce: str, url: ParseResult | None) -> dict[str, str]:
        """What CONNECT says.

        Args:
            nonce: Of the server, to be signed.
            url: Of the server; its user information counts where nothing else is set.

        Raises:
            LoginError: A file cannot be used.
        """
        settings = self._settings
        if settings.creds is not None:
            text = _text(settings.creds, "credentials")
            token, seed = _JWT.search(text), _SEED.search(text)
            if token is None or seed is None:
                raise LoginError("the credentials file holds no user JWT and NKey seed")
            return {"jwt": token[0], "sig": _signed(seed[0], nonce)[1]}
        if settings.nkey is not None:
            seed = _SEED.search(_text(settings.nkey, "NKey"))
            if seed is None:
                raise LoginError("the NKey file holds no user seed")
            public, signature = _signed(seed[0], nonce)
            return {"nkey": public, "sig": signature}
        if settings.user is not None and settings.password is not None:
            return {"user": settings.user, "pass": settings.password}
        if settings.token is not None:
            return {"auth_token": settings.token}
        if url is None or url.username is None:
            return {}
        if url.password is None:
            return {"auth_token": unquote(url.username)}
        return {"user": unquote(url.username), "pass": unquote(url.password)}

    @property
    def wants_tls(self) -> bool:
        """Whether a connection without TLS is an error."""
        settings = self._settings
        own = settings.tls_ca, settings.tls_cert
        return (
            settings.tls_first or own != (None, None) or any(url.startswith("tls:") for url in settings.urls)
        )

    def context(self) -> ssl.SSLContext:
        """For TLS, where the server asks for it.

        Raises:
            LoginError: A file cannot be used.
        """
        settings = self._settings
        try:
            context = ssl.create_default_context(cafile=settings.tls_ca)
            if settings.tls_cert is not None:
                context.load_cert_chain(settings.tls_cert, settings.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise LoginError(f"the TLS files cannot be used: {error}") from error
        return context


def _text(path: Path, what: str) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise LoginError(f"the {what} file cannot be read: {error}") from error
    wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return raw.decode("utf-16" if wide else "utf-8", errors="replace")


def _signed(seed: str, nonce: str) -> tuple[str, str]:
    """The public key, and the signature of a nonce."""
    try:
        pair = nkeys.from_seed(bytearray(seed.encode()))
        return pair.public_key.decode(), base64.b64encode(pair.sign(nonce.encode())).decode()
    except (nkeys.NkeysError, CryptoError, ValueError, TypeError, LookupError) as error:
        raise LoginError("the NKey seed is damaged") from error
