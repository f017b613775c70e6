"""The tables of `python -m benchmarks peers` as Markdown, from the record.

They stand between two marks in `records/benchmarks.md`.

In: the record of `peers.run`. Out: text, or `records/bench/peers.json` and the part of `records/benchmarks.md` that is
this benchmark's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.markdown import item, paragraph
from benchmarks.measure import atomic_path, write_json
from benchmarks.peers import CONTESTANTS, OURS

BEGIN, END = "<!-- peers: written by `python -m benchmarks peers` -->", "<!-- /peers -->"
_TITLE = "# Benchmarks\n"
_AIMS = (
    ("seconds", "a runnable model 10 times faster", 10.0),
    ("peak_memory", "8 times less memory", 8.0),
    ("decode", "decoding no slower", 1.0),
)


def write(record: Mapping[str, Any], docs: Path) -> list[Path]:
    """Put record and tables into the folder `docs`.

    What else stands in benchmarks.md stays.
    """
    data, page = Path(docs) / "bench" / "peers.json", Path(docs) / "benchmarks.md"
    data.parent.mkdir(parents=True, exist_ok=True)
    write_json(data, record)
    text = page.read_text() if page.is_file() else _TITLE
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] if rest else ""
    with atomic_path(page) as temporary:
        temporary.write_text(f"{before.rstrip()}\n\n{BEGIN}\n{render(record)}{END}\n\n{after.lstrip()}".rstrip() + "\n")
    return [data, page]


def render(record: Mapping[str, Any]) -> str:
    """Return the whole section, ending in a newline."""
    # JSON sorts them
    contestants = {name: record["contestants"][name] for name in CONTESTANTS if name in record["contestants"]}
    exports = _table(
        ("", "seconds", "CPU seconds", "peak memory", "written", "transformers"),
        (_export_row(entry) for entry in contestants.values() if "export" in entry),
    )
    relative = record.get("lockstep_relative_to", {})
    decodes = _table(
        (
            "",
            "tokens/s",
            "slowest to fastest",
            "lockstep's speed by this one's",
            "ready after",
            "peak memory",
            "logits off by",
            "same tokens",
        ),
        (
            _decode_row(entry, relative.get("decode", {}).get(name))
            for name, entry in contestants.items()
            if "decode" in entry
        ),
    )
    absent = [
        f"{entry['label']} is not in a table: {entry['reason']}." for entry in contestants.values() if "reason" in entry
    ]
    notes = [f"{entry['label']}: {note}" for entry in contestants.values() for note in entry["notes"]]
    return "\n".join([
        "## Side by side with other exporters", "", paragraph(_intro(record)), "",
        "To a runnable ONNX model, packages' imports included:", "", exports, "",
        f"Decoding with that model, batch 1, behind {record['context']} tokens:", "", decodes, "",
        *map(item, (*_aims(record), *absent, *notes)), "", paragraph(_surroundings(record)), "",
    ])  # fmt: skip


def _intro(record: Mapping[str, Any]) -> str:
    return (
        f"One checkpoint of the shape `{record['shape']}` with random weights "
        f"({_size(record['checkpoint_bytes'])}), {record['precision']} throughout, "
        f"{record['threads']} threads for each. Every contestant runs in processes of its own, one at a "
        f"time, {record['rounds']} round{'s' * (record['rounds'] > 1)} in turn; "
        "medians. Peak memory is the resident memory of the largest process, mapped files included. What is "
        "written is what lies in the output folder: "
        "this project writes graphs, engines and manifests, and reads the weights where they are."
    )


def _export_row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    export = entry["export"]
    return (
        entry["label"],
        f"{export['seconds']['median']:.1f}",
        f"{export['cpu_seconds']['median']:.1f}",
        _megabytes(export["peak_memory_mb"]["median"]),
        _size(export["bytes_written"]),
        entry["versions"].get("transformers", ""),
    )


def _decode_row(entry: Mapping[str, Any], relative: Mapping[str, float] | None) -> tuple[str, ...]:
    decode = entry["decode"]
    rate = decode["tokens_per_second"]
    return (
        entry["label"], f"{rate['median']:.2f}", f"{rate['min']:.2f} - {rate['max']:.2f}",
        f"{relative['median']:.2f} ({relative['min']:.2f} - {relative['max']:.2f})" if relative else "",
        f"{decode['open_seconds']['median']:.1f} s", _megabytes(decode["peak_memory_mb"]["median"]),
        f"{decode['largest_logit_difference']:.0e}" if "largest_logit_difference" in decode else "",
        {True: "yes", False: "no", None: ""}[decode.get("tokens_equal")],
    )  # fmt: skip


def _aims(record: Mapping[str, Any]) -> list[str]:
    """Return a line for each aim, against the best of the other contestants.

    The best is the one that comes closest to us.
    """
    lines = []
    for key, what, aim in _AIMS:
        relative = record.get("lockstep_relative_to", {}).get(key, {})
        others = {name: relative[name]["median"] for name in CONTESTANTS if name in relative}
        if others:
            best = min(others, key=others.__getitem__)
            verdict = "reached" if others[best] >= aim else "missed"
            each = ", ".join(f"{record['contestants'][name]['label']} {value:.2f}" for name, value in others.items())
            lines.append(f"Aim: {what} than the best of them: {verdict} ({each}).")
    if "export" in (ours := record["contestants"].get(OURS, {})):
        written, weights = ours["export"]["bytes_written"], record["checkpoint_bytes"]
        lines.append(
            f"Aim: no weight bytes written: {'reached' if written < weights / 10 else 'missed'} "
            f"({_size(written)} of graphs and manifests)."
        )
    return lines


def _surroundings(record: Mapping[str, Any]) -> str:
    cpu, load = record["cpu"], record["load_average"]
    amx = (
        ", ".join(flag for flag in cpu["isa"] if flag.startswith(("amx", "avx512_")) or flag == "avx2")
        or "no vector extensions known"
    )
    versions = sorted(
        {f"{name} {version}" for entry in record["contestants"].values() for name, version in entry["versions"].items()}
    )
    return (
        f"Measured on {record['threads']} threads of a {cpu['vendor']} {cpu['architecture']} CPU, family and "
        f"model {cpu['family']} ({amx}); "
        f"load average while measuring {load['min']:.1f} to {load['max']:.1f}, so other work ran beside it "
        f"wherever that is above {record['threads']}. "
        f"{', '.join(versions)}. Record: [bench/peers.json](bench/peers.json). Command: `{record['command']}`."
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    rule = "|".join([" --- ", *(" ---: " for _ in head[1:])])
    return "\n".join(["| " + " | ".join(head) + " |", f"|{rule}|", *("| " + " | ".join(row) + " |" for row in rows)])


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _megabytes(count: float) -> str:
    """From the kernel's units of 2^20 bytes."""
    return _size(count * (1 << 20))
