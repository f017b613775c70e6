"""`models`: which of the published families (published.py) work, each as a tiny model through all stages in fp32.

Activations are like those of trained models. In: names of families (default: all). Out: for each whether it works (with
the error of its logits against transformers' eager forward, its activations, and the numbers of block classes and
attention variants), is refused (with the reason), or why no tiny model could be made. Each runs in a child process.
Rows that the same code and packages wrote before are kept, so that a run that was cut short can be resumed;
rows of another code are dropped.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import options
from benchmarks.markdown import paragraph
from benchmarks.measure import deliver, surroundings
from benchmarks.published import FAMILIES
from lockstep import InputError
from lockstep.artifacts.files import sha256_json, write_json
from lockstep.provenance.code_identity import code_digests
from lockstep.tolerances import EXPORT

OPTIONS = (
    options.option("names", metavar="[FAMILY]...", many=True),
    options.number("--jobs", 1, "Models tried at a time."), options.WRITE,
)  # fmt: skip
GPU_BACKENDS = ("cuda", "tensorrt")
PACKAGES = ("onnx", "onnxruntime", "onnxscript", "torch", "transformers")
WORKS = "works"
REFUSED = "refused"
NO_MODEL = "no tiny model"
WRONG = "wrong"
BROKEN = "broken"
RESULTS = {
    WORKS: "logits equal those of transformers",
    REFUSED: "the export says why",
    NO_MODEL: "transformers makes no model of the config, however small",
    WRONG: "passes the export's gates, and fails a later check or gives other logits than transformers",
    BROKEN: "ends in an error that is no refusal",
}
STAGES = "resolve, architecture, export, convert, build, validate, compare, reference, golden, served"
_CPU_SECONDS = 600
_WALL_SECONDS = 3000  # for machines that do other work too
_MEMORY = 14 << 30


def main(names: Sequence[str], jobs: int, write: Path | None) -> None:
    """Try which published families work, each as a tiny model.

    Each goes through all stages.  [default: all]
    """
    done: dict[str, dict[str, Any]] = {}

    def tell(name: str, tried: dict[str, Any]) -> None:
        print(f"{name}: {tried['result']}", file=sys.stderr)
        done[name] = tried
        if write is not None:  # each as it is made: the whole takes an hour
            write_json(
                write / "bench" / "models.json",
                _with_earlier_rows(_record(dict(done)), write / "bench" / "models.json"),
            )

    record = run(names or None, jobs, tell)
    if write is not None:
        record = _with_earlier_rows(record, write / "bench" / "models.json")
    deliver(record, write)
    if write is not None:
        print(write_page(record, write))


def run(
    names: Iterable[str] | None = None, jobs: int = 1, progress: Callable[[str, dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Try families, `jobs` at a time.

    `progress`, if given, is called with each name and record as it is made.
    """
    chosen = [*FAMILIES] if names is None else list(names)
    if unknown := sorted(set(chosen) - set(FAMILIES)):
        raise InputError(f"expected families ({', '.join([*FAMILIES][:3])} ...), found {', '.join(unknown)}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.tiny"])

    def measure(name: str) -> dict[str, Any]:
        record = _in_a_process(context, name)
        if progress is not None:
            progress(name, record)
        return record

    with ThreadPoolExecutor(jobs) as pool:
        return _record(dict(zip(chosen, pool.map(measure, chosen), strict=True)))


def _record(records: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "benchmark": "models",
        "tolerance": EXPORT,
        "stages": STAGES,
        "code": sha256_json(code_digests("cli.main")),
        "families": dict(records),
        **surroundings(*PACKAGES, threads=1),
    }


def _with_earlier_rows(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a record with the rows of an earlier one of the same code that it does not have itself."""
    earlier = json.loads(path.read_text()) if path.is_file() else {}
    if any(earlier.get(key) != record[key] for key in ("code", "stages", "versions")):
        return record
    families = {**earlier.get("families", {}), **record["families"]}
    return record | {"families": {name: families[name] for name in FAMILIES if name in families}}


def _in_a_process(context: Any, name: str) -> dict[str, Any]:
    began = time.perf_counter()
    record, exit_code, _ = ask_child(context, _child, (name,), _WALL_SECONDS)
    if record is None:
        what = {
            -signal.SIGXCPU: f"more than {_CPU_SECONDS} s of processor time",
            -signal.SIGKILL: f"more than {_WALL_SECONDS} s",
        }
        record = {"result": BROKEN, "reason": what.get(exit_code, f"the process ended with exit code {exit_code}")}
    return record | {"seconds": round(time.perf_counter() - began, 1)}


def gpu_record(records: Path, backend: str) -> Path:
    """Return the record of `families-gpu` in a folder of records."""
    return records / "gpu" / f"{backend}-published.json"


def ask_child(
    context: Any, target: Callable[..., None], arguments: tuple[Any, ...], seconds: float
) -> tuple[dict[str, Any] | None, int | None, bool]:
    """Return what a child process sends, its exit code, and whether it was killed after `seconds`.

    target: called with `arguments` and the pipe that it sends its record by. The record is None where it sends none.
    """
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, send))
    process.start()
    send.close()
    record = None
    is_late = not receive.poll(seconds)
    if not is_late:
        with contextlib.suppress(EOFError):
            record = receive.recv()
    if record is None:
        process.kill()
    process.join()
    return record, process.exitcode, is_late


def _child(name: str, send: Any) -> None:
    """Runs in a process forked from one that has the imports."""
    from benchmarks.tiny import try_family

    in_use = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if Path("/proc/self/statm").exists()
        else 0
    )
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _MEMORY, in_use + _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    with tempfile.TemporaryDirectory() as folder:
        send.send(try_family(name, Path(folder)))


def write_page(report: dict[str, Any], records: Path) -> Path:
    """Write models.md: the report, and what `families-gpu` left in the same folder of records."""
    versions = report["versions"]
    lines = [
        "# Which models work",
        "",
        paragraph(
            "The families of models that are downloaded most, with the settings of their published "
            f"checkpoints, each as a tiny model through all stages (ONNX Runtime {versions['onnxruntime']}): "
            "`python -m benchmarks models` made this page. Weights are random, but activations are like those of "
            "trained models, where the class lets them: a few channels of the hidden state are 50 to 500 times the "
            "others, the first token has most of the attention, logits have a standard deviation of 5 "
            f"(`tests.lifelike`; outlier and first token below). {_passes(report)}A model works when the logits of "
            "four requests (one of 300 tokens, of mixtures at least 100), prefilled together and then decoded, and of "
            "the long one again, in chunks of 97 tokens beside the others' decoding, equal those of each request alone "
            "and whole: they differ from transformers' eager forward by at most "
            f"{report['tolerance']:.0e} of their standard deviation, or by at most four times what transformers in "
            "fp32 differs from itself in fp64 (the column behind; weights may make a model that sensitive)."
        ),
        "",
        *_families(report["families"]),
        *_on_a_gpu(records),
    ]
    path = records / "models.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n")
    return path


def _passes(report: Mapping[str, Any]) -> str:
    """Return which stages a model must pass; an older record says of none that it ran."""
    stages = report.get("stages")
    return f"Every stage of the workflow must pass on ONNX Runtime in fp32 ({stages}). " if stages else ""


def _families(families: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the rows of published families; weights that are quantised as published are read, or it says why not."""
    counts = Counter(family["result"] for family in families.values())
    lines = [
        "## Published families",
        "",
        f"{len(families)}: {', '.join(f'{counts[result]} {result}' for result in RESULTS if counts[result])}.",
        "",
        "| family | a checkpoint | type | quantised | result | logit error | of transformers itself | outlier | "
        "first token |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for name in [name for name in FAMILIES if name in families]:  # not as a record has them, by their letters
        family = families[name]
        marks = family.get("quantized", "")
        if "not_read" in family:
            marks += " (not read)"
        cells = [name, FAMILIES[name].example, FAMILIES[name].config["model_type"], marks, family["result"]]
        if family["result"] == WORKS:
            activations = family["activations"]
            first = activations["first"]
            cells += [f"{family['logit_error']:.1e}", f"{family['transformers_error']:.1e}"]
            cells += [f"{activations['outlier']:.0f}", "-" if first is None else f"{first:.0%}"]
        lines.append(f"| {' | '.join(cells + [''] * (9 - len(cells)))} |")
        notes += [f"| {name} | {_cell(family[key])} |" for key in ("reason", "not_read") if key in family]
    return [*lines, "", "| family | reason |", "|---|---|", *notes, ""] if notes else [*lines, ""]


def _on_a_gpu(records: Path) -> list[str]:
    """Return a table of the families on the GPU backends that have a record."""
    columns = {}
    for backend in GPU_BACKENDS:
        path = gpu_record(records, backend)
        if not path.is_file():
            continue
        families = json.loads(path.read_text())["families"]
        for precision in sorted(set().union(*families.values())):
            rows = {name: row[precision] for name, row in families.items() if precision in row}
            columns[f"{backend} {precision}"] = rows
    if not columns:
        return []
    text = (
        "`python -m benchmarks families-gpu`: all stages as above, then logits in company and alone. Numbers are the "
        "largest error relative to transformers in fp32, in units of the logits' standard deviation; in parentheses "
        "that of transformers' own model in this precision. `golden` judges them, along the engines' own choices of "
        "experts, for which these numbers are blind: two are above four times the other. On `cuda` the logits of a "
        "request alone must have the bits that they have in company. Empty: not tried."
    )
    lines = ["## On a GPU", "", paragraph(text), ""]
    for column, rows in columns.items():
        counts = Counter(row["result"] for row in rows.values())
        lines.append(f"- {column}: {', '.join(f'{count} {result}' for result, count in counts.most_common())}")
    lines += ["", f"| family | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    notes = []
    for name in FAMILIES:
        cells = [name]
        for column, rows in columns.items():
            row = rows.get(name, {})
            cell = row.get("result", "")
            if cell == WORKS:
                cell = f"{row['logit_error']:.2g} ({row['transformers_error']:.2g})"
            elif cell not in ("", REFUSED):
                notes.append(f"| {name}, {column} | {_cell(row['reason'])} |")
            cells.append(cell)
        lines.append(f"| {' | '.join(cells)} |")
    if notes:
        lines += ["", "| family | what failed |", "|---|---|", *notes]
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
