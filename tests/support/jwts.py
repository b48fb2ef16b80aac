"""An operator, its accounts and users as JWTs, made by hand: there is no `nsc` in the tests' environment."""

from __future__ import annotations

import base64
import json
import os
import time
from typing import Any

import nkeys


class Key:
    """An NKey pair."""

    def __init__(self, kind: int) -> None:
        seed = bytes(nkeys.encode_seed(os.urandom(32), kind))
        self._pair = nkeys.from_seed(bytearray(seed))
        self.seed = seed.decode()
        self.public: str = self._pair.public_key.decode()

    def signed(self, subject: str, nats: dict[str, Any], **claims: Any) -> str:
        """A JWT about `subject`, issued by this key."""
        body = {"jti": os.urandom(16).hex(), "iat": int(time.time()), "iss": self.public, "sub": subject}
        body |= claims | {"name": subject, "nats": nats | {"version": 2}}
        head = ".".join(map(_base64, (b'{"typ": "JWT", "alg": "ed25519-nkey"}', json.dumps(body).encode())))
        return f"{head}.{_base64(self._pair.sign(head.encode()))}"


def _base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


class Operator:
    """An operator with one account.

    Attributes:
        server: The configuration of a server that trusts it.
    """

    def __init__(self) -> None:
        operator, self._account = Key(nkeys.PREFIX_BYTE_OPERATOR), Key(nkeys.PREFIX_BYTE_ACCOUNT)
        system = Key(nkeys.PREFIX_BYTE_ACCOUNT).public
        names = "subs", "data", "payload", "imports", "exports", "conn", "leaf"
        stores = "mem_storage", "disk_storage", "streams", "consumer"
        limits: dict[str, Any] = dict.fromkeys(names, -1) | {"wildcards": True}
        own = operator.signed(operator.public, {"type": "operator", "system_account": system})
        account = operator.signed(
            self._account.public, {"type": "account", "limits": limits | dict.fromkeys(stores, -1)}
        )
        systems = operator.signed(system, {"type": "account", "limits": limits})
        self.server = (
            f'operator: "{own}"\nsystem_account: {system}\nresolver: MEMORY\n'
            f'resolver_preload {{ {self._account.public}: "{account}", {system}: "{systems}" }}\n'
        )

    def user(self, *, valid: float) -> tuple[str, str]:
        """A user's JWT, valid for so many seconds, and its seed."""
        user = Key(nkeys.PREFIX_BYTE_USER)
        nats = {"type": "user", "subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {}}
        return self._account.signed(user.public, nats, exp=int(time.time() + valid)), user.seed


def credentials(jwt: str, seed: str) -> str:
    """A credentials file as `nsc` writes it."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
