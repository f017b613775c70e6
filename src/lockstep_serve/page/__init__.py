"""The web page at `/`, one file, and the headers that it is sent with."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

_FILE = Path(__file__).with_name("index.html")


def page() -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers: the browser runs the page's own script only, and talks to this server only."""
    html = _FILE.read_bytes()
    digests = {tag: _digest(html, tag) for tag in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {digests['script']}; style-src {digests['style']}; connect-src 'self'; "
        f"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _digest(html: bytes, tag: str) -> str:
    """Return the CSP source of the one inline element `tag` (w3.org/TR/CSP3/#match-element-to-source-list)."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
