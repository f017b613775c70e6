"""Parts of an HTML page: texts in, markup out.

A page needs nothing but itself: no script, no font, no request.
"""

from __future__ import annotations

import html
import os
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

_STYLE = """
:root { color-scheme: light dark; --line: #d8dce2; --soft: #f4f6f8; --pass: #1a7f4b; --fail: #b3261e; --wait: #8a6100;
  --mark: #ffd9d6; --text: #1d232b; --quiet: #5b6573; --page: #ffffff; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --line: #363d47; --soft: #20262e; --pass: #5fd095; --fail: #ff8a80;
  --wait: #e6bb55; --mark: #6d2722; --text: #e5e9ee; --quiet: #9aa5b2; --page: #14181d; --link: #7db7f5; } }
body { margin: 0 auto; max-width: 1080px; padding: 24px 20px 64px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 8px 0 4px; } h2 { font-size: 18px; margin: 36px 0 8px; } h3 { font-size: 15px; }
a { color: var(--link); } p { margin: 6px 0; } .quiet { color: var(--quiet); }
.scroll { overflow-x: auto; } table + .scroll { margin-top: 18px; } table { border-collapse: collapse; width: 100%; }
th, td { padding: 6px 12px 6px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } .number { text-align: right; font-variant-numeric: tabular-nums; }
.pass { color: var(--pass); } .fail { color: var(--fail); } .wait { color: var(--wait); }
.result { font-weight: 600; }
td > a, td > .result { white-space: nowrap; }
code, .text { font-family: ui-monospace, monospace; font-size: 13px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext; }
.prompt { border: 1px solid var(--line); border-radius: 6px; padding: 10px 14px; margin: 12px 0; }
.prompt th { width: 150px; } .prompt tr:last-child > * { border-bottom: 0; }
mark { background: var(--mark); color: inherit; border-radius: 3px; outline: 2px solid var(--mark); }
svg { max-width: 100%; height: auto; } ul { padding-left: 20px; }
"""
_CLASSES = {"pass": "pass", "fail": "fail", "not run": "wait"}
# Control characters as their pictures: HTML has no such characters.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}


def page(title: str, parts: Sequence[str]) -> bytes:
    """Return a whole page."""
    head = f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{text(title)}</title>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">'
    body = "\n".join(parts)
    whole = f"{head}\n{view}\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    return whole.encode("utf-8", "xmlcharrefreplace")


def text(value: object) -> str:
    """Return any text, escaped."""
    return html.escape(str(value).translate(_PICTURES))


def tag(name: str, inside: str, kind: str = "") -> str:
    """Return an element around markup."""
    return f'<{name} class="{kind}">{inside}</{name}>' if kind else f"<{name}>{inside}</{name}>"


def link(path: Path, page_path: Path, name: str) -> str:
    """Return a link to a file, from the page at `page_path`."""
    place = urllib.parse.quote(Path(os.path.relpath(path, page_path.parent)).as_posix())
    return f'<a href="{html.escape(place)}">{text(name)}</a>'


def result(value: str, said: str = "") -> str:
    """Return a verdict, or the text `said`, in the verdict's colour."""
    return tag("span", text(said or value), f"result {_CLASSES.get(value, 'wait')}")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table.

    headings: texts; rows: markup by cell; numbers: the columns that are aligned to the right.
    """
    kinds = ["number" if column in numbers else "" for column in range(len(headings))]
    head = "".join(tag("th", text(heading), kind) for heading, kind in zip(headings, kinds))
    body = [tag("tr", "".join(tag("td", cell, kind) for cell, kind in zip(row, kinds))) for row in rows]
    return tag("div", tag("table", "\n".join([tag("tr", head), *body])), "scroll")


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of names and markup."""
    return tag("table", "\n".join(tag("tr", tag("th", text(name)) + tag("td", cell)) for name, cell in rows))


def items(lines: Sequence[str]) -> str:
    """Return a list of markup."""
    return tag("ul", "\n".join(tag("li", line) for line in lines))
