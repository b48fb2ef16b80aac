"""The page at `/`: models, workers, queues, an example, a chat to try. It loads nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

PAGE_HEADERS: Final = {
    # All of the page is in this one file.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
