"""Parts of an HTML page: texts in, markup out.

A page needs nothing but itself: no script, no font, no request.
"""

from __future__ import annotations

import html
import itertools
import os
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

_STYLE = """
:root { color-scheme: light dark; --line: #d8dce2; --soft: #f4f6f8; --pass: #1a7f4b; --fail: #b3261e; --wait: #8a6100;
  --mark: #ffd9d6; --text: #1d232b; --quiet: #5b6573; --page: #ffffff; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --line: #363d47; --soft: #20262e; --pass: #5fd095; --fail: #ff8a80;
  --wait: #e6bb55; --mark: #6d2722; --text: #e5e9ee; --quiet: #9aa5b2; --page: #14181d; --link: #7db7f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 24px 20px 64px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; } h2 { font-size: 19px; margin: 40px 0 8px; }
h3 { font-size: 15px; }
a { color: var(--link); } p { margin: 6px 0; } .quiet { color: var(--quiet); } .headline { font-size: 18px; }
table { border-collapse: collapse; width: 100%; margin: 12px 0; }
th, td { padding: 6px 14px 6px 0; text-align: left; vertical-align: top; }
tbody { border-bottom: 1px solid var(--line); } thead { border-bottom: 2px solid var(--line); }
th { font-weight: 600; vertical-align: bottom; overflow-wrap: normal; } .number { text-align: right; }
.number { font-variant-numeric: tabular-nums; } .number:last-child { padding-right: 0; }
.pairs th { width: 150px; vertical-align: top; color: var(--quiet); font-weight: 400; }
.pass { color: var(--pass); } .fail { color: var(--fail); } .wait { color: var(--wait); }
.result { font-weight: 600; } td > .result { white-space: nowrap; }
td.title a { white-space: nowrap; }
.below td { padding-top: 0; } .below table { margin: 6px 0 10px; } .below details { margin: 0; }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--quiet); } summary b { color: var(--text); }
.said > summary { color: inherit; }
details details, .below table { background: var(--soft); } .below table th, .below table td { padding-left: 10px; }
.below table tbody:last-child { border-bottom: 0; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
code, .text { font-family: ui-monospace, monospace; font-size: 13px; }
.text { white-space: pre-wrap; unicode-bidi: plaintext; }
.prompt { border: 1px solid var(--line); border-radius: 6px; padding: 4px 14px; margin: 12px 0; }
.prompt tbody { border-bottom: 0; } .prompt table { margin: 4px 0; }
mark { background: var(--mark); color: inherit; border-radius: 3px; outline: 2px solid var(--mark); }
svg { display: block; width: 100%; max-width: 480px; height: auto; } ul { padding-left: 20px; margin: 6px 0; }
@media (max-width: 700px) {
  body { padding: 16px 16px 48px; }
  table, tbody, tr, th, td { display: block; } thead { display: none; }
  tbody { padding: 8px 0; } th, td, .number:last-child { padding: 2px 0; }
  .pairs th { width: auto; padding-top: 6px; }
  td[data-label] { display: flex; justify-content: space-between; gap: 16px; text-align: right; }
  td[data-label]::before { content: attr(data-label); color: var(--quiet); text-align: left; flex: none; }
  td.title { text-align: left; font-weight: 600; } td.title a { white-space: normal; }
  td.title::before, td.none { display: none; }
  .below table { padding: 0 10px; } .below table th, .below table td { padding-left: 0; }
}
"""
_CLASSES = {"pass": "pass", "fail": "fail", "not run": "wait"}
# Control characters as their pictures: HTML has no such characters.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}


def page(title: str, parts: Sequence[str]) -> bytes:
    head = f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{text(title)}</title>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">'
    body = "\n".join(parts)
    whole = f"{head}\n{view}\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    return whole.encode("utf-8", "xmlcharrefreplace")


def text(value: object) -> str:
    """Return any text, escaped."""
    return html.escape(str(value).translate(_PICTURES))


def tag(name: str, inside: str, kind: str = "") -> str:
    return f'<{name} class="{kind}">{inside}</{name}>' if kind else f"<{name}>{inside}</{name}>"


def link(path: Path, page_path: Path, name: str) -> str:
    place = urllib.parse.quote(Path(os.path.relpath(path, page_path.parent)).as_posix())
    return f'<a href="{html.escape(place)}">{text(name)}</a>'


def result(value: str, said: str = "") -> str:
    """Return a verdict, or the text `said`, in the verdict's colour."""
    return tag("span", text(said or value), f"result {_CLASSES.get(value, 'wait')}")


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), below: Sequence[str] = ()
) -> str:
    """Return a table, of which a narrow screen shows each row as a list of headings and values.

    headings: texts; rows: markup by cell, "" or "-" where there is none; numbers: the columns that are aligned to the
    right. below: of each row, what is shown below it over all columns. A column in which no row has anything is left
    out.
    """
    shown = [column for column in range(len(headings)) if any(row[column] for row in rows)]
    head = "".join(tag("th", text(headings[column]), "number" * (column in numbers)) for column in shown)
    parts = [tag("thead", tag("tr", head))]
    for row, more in itertools.zip_longest(rows, below, fillvalue=""):
        cells = ""
        for column in shown:
            cell = row[column]
            kinds = ["number" * (column in numbers), "title" * (column == 0), "none" * (cell in ("", "-"))]
            kind = f' class="{" ".join(filter(None, kinds))}"' if any(kinds) else ""
            cells += f'<td{kind} data-label="{text(headings[column])}">{cell}</td>'
        under = tag("tr", f'<td colspan="{len(shown)}">{more}</td>', "below") if more else ""
        parts.append(tag("tbody", tag("tr", cells) + under))
    return tag("table", "\n".join(parts))


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    return tag("table", "\n".join(tag("tr", tag("th", text(name)) + tag("td", cell)) for name, cell in rows), "pairs")


def items(lines: Sequence[str]) -> str:
    return tag("ul", "\n".join(tag("li", line) for line in lines))
