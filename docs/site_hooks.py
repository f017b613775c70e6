"""What `make docs` does to pages: badges go, Mermaid graphs become SVG, and what is requested from elsewhere ends it.

In: the HTML of pages, then the HTML and CSS that mkdocs has written. Raises PluginError, which ends the build, with one
line for each request. Links that a reader may follow are no requests.
"""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
# Relations of <link> that a browser loads, or opens a connection for, by itself.
LOADED = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "preconnect", "dns-prefetch", "manifest"}
OUTSIDE = re.compile(r"\s*(?:[a-z]+:)?//", re.IGNORECASE)
STYLE = re.compile(r"(?:url\(|@import)\s*['\"]?\s*((?:https?:)?//[^'\")\s;]+)", re.IGNORECASE)

GRAPH = re.compile(r'<pre><code class="language-mermaid">(.*?)</code></pre>', re.DOTALL)


class _Requests(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(LOADING[tag]) if tag in LOADING else None
        if tag == "link" and LOADED & set((given.get("rel") or "").lower().split()):
            address = given.get("href")
        if address and OUTSIDE.match(address):
            self.found.append(f"{tag} {address}")
        self.found += STYLE.findall(given.get("style") or "")


def outside_requests(file: Path) -> list[str]:
    """Return what a page or style sheet would have a browser load from elsewhere."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".css":
        return STYLE.findall(text)
    parser = _Requests()
    parser.feed(text)
    return parser.found


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"^\[!\[.*\n", "", markdown, flags=re.MULTILINE)


def on_page_content(content: str, **_: Any) -> str:
    import mermaidx  # of envs/docs.txt, with Mermaid itself

    def drawn(match: re.Match[str]) -> str:
        # Its styles name the graph's id, of which a page has each once.
        return mermaidx.render(html.unescape(match[1])).svg().replace("my-svg", f"graph-{match.start()}")

    return GRAPH.sub(drawn, content)


def on_post_build(config: Any) -> None:
    from mkdocs.exceptions import PluginError

    site = Path(config["site_dir"])
    files = sorted(path for path in site.rglob("*") if path.suffix in (".html", ".css"))
    lines = [f"{file.relative_to(site)}: {request}" for file in files for request in outside_requests(file)]
    if lines:
        raise PluginError("expected pages that request nothing from elsewhere, found\n" + "\n".join(lines))
