"""Users with the permissions that deploy/nats/users.conf ships."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inferbus.workers.config import BusSettings
from inferbus.workers.stack.server import NatsServer

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nats" / "users.conf"
OWNERS = ("acme", "globex")

WORKER: dict[str, Any] = {
    "nats_user": "worker",
    "nats_password": "worker",
    "reply_prefix": "_INBOX.,_INBOX_acme.,_INBOX_globex.,_INBOX_operator.,_INBOX_gateway.",
}
"""Settings of a worker, by the names of their environment variables."""


def configuration() -> str:
    """The shipped users, a second owner, and `root`, who may do everything; a password is its user's name."""
    text = CONFIGURATION.read_text().replace('include "nats.conf"', "")
    first, second = OWNERS
    permissions = text[text.index("FOR_ACME: {") : text.index("# What a client needs")]
    permissions = permissions.replace(first, second).replace("FOR_ACME", "FOR_GLOBEX")
    text = text.replace('"_INBOX_acme.>", "_INBOX_op', '"_INBOX_acme.>", "_INBOX_globex.>", "_INBOX_op')
    text = text.replace("authorization {", f"{permissions}\nauthorization {{")
    more = "{user: globex, password: globex, permissions: $FOR_GLOBEX}\n    {user: root, password: root}"
    text = text.replace("{user: worker,", f"{more}\n    {{user: worker,")
    for user in ("worker", "acme", "operator", "gateway"):
        text = text.replace(f"${user.upper()}_PASSWORD", user)
    return text


def login(server: NatsServer, user: str) -> BusSettings:
    """A user's settings; clients have inboxes of their own."""
    inboxes = "_INBOX" if user in ("root", "worker") else f"_INBOX_{user}"
    return BusSettings(urls=(server.url,), user=user, password=user, inbox_prefix=inboxes)
