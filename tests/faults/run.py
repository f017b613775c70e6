"""Planted faults: each goes through all gates of a backend.

And through requests that users could send, which shows what the gates are worth.

In: which faults, a backend. Out: for each fault and place how far it moves a logit, which gates refuse it and with
which words; and the score: of the faults that move a logit by more than the target's tolerance, the share that some
gate caught.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import surroundings

from faults.case import GATES, Case, Setting, plant, prepare, try_all, try_engines
from faults.fault import ASSEMBLY, RUNTIME, Fault
from faults.models import make, start
from faults.table import FAULTS
from lockstep import CheckError, InputError
from lockstep.backends.cpu import THREADS_VARIABLE, thread_count
from lockstep.config.backends import backends
from lockstep.targets import is_quantized
from lockstep.tolerances import NOISE, Tolerances

PRECISIONS = ("fp32", "fp16", "bf16", "w8a16", "w4a16", "w8a8", "w4a8", "w8a8-fp8")
LOCAL_BACKENDS = ("onnxruntime", "openvino")  # that run in this Python
# The largest difference of a logit that is no harm: a number, for harm is judged without the gates.
HARMLESS = {
    "fp32": 1e-3, "fp16": 5e-2, "bf16": 0.4, "w8a16": 2e-2, "w4a16": 2e-2, "w8a8": 2e-2, "w4a8": 2e-2, "w8a8-fp8": 2e-2,
}  # fmt: skip
_PACKAGES = ("onnx", "onnxruntime", "polygraphy", "torch", "transformers")
Progress = Callable[[dict[str, Any]], None]


def choose(backend: str, only: Sequence[str] = (), models: Sequence[str] = ()) -> list[Fault]:
    """Return the faults of a backend: those named, in these models.

    Raises InputError for a name that is none's, and where none is left.
    """
    unknown = sorted(set(only) - set(FAULTS))
    if unknown:
        raise InputError(f"faults: expected names of the table in records/faults.md, found {', '.join(unknown)}")
    chosen = [
        fault
        for fault in FAULTS.values()
        if backend in fault.backends and (not only or fault.name in only) and (not models or fault.model in models)
    ]
    if not chosen:
        raise InputError(
            f"faults: expected at least one for the backend {backend}, found none: {', '.join((*only, *models))}"
        )
    return chosen


def run(
    faults: Sequence[Fault],
    backend: str = "onnxruntime",
    precisions: Sequence[str] = PRECISIONS,
    jobs: int = 1,
    options: Mapping[str, Any] | None = None,
    work: Path | None = None,
    progress: Progress | None = None,
    loosen: float = 1.0,
    checkpoint: Path | None = None,
) -> dict[str, Any]:
    """Plant and try `faults`.

    `progress`, if given, is called with the whole record each time a fault has been tried.

    options: of the build. work: a scratch folder.
    loosen: so many times the default tolerances for the gates. checkpoint: of Llama's kind, in place of the demo's.
    """
    precisions = [precision for precision in precisions if precision in backends()[backend].precisions]
    judged = {precision: HARMLESS[precision] for precision in precisions}
    given = {precision: asdict(Tolerances(precision, backend, loosen * NOISE)) for precision in precisions}
    cases = [(fault.name, precision) for fault in faults for precision in precisions if precision in fault.precisions]
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def found() -> dict[str, Any]:
        return _report(backend, judged, [row for case in cases for row in rows.get(case, ())], checkpoint is not None)

    with tempfile.TemporaryDirectory(dir=work) as scratch:
        setting = Setting(scratch, backend, dict(options or {}), given, judged)
        here = backend in LOCAL_BACKENDS
        with _workers(jobs) as each:
            models = sorted({(FAULTS[fault].model, precision) for fault, precision in cases})
            for _ in each(start, [(name, Path(scratch), checkpoint) for name in sorted({name for name, _ in models})]):
                pass
            for _ in each(_make, [(setting, *model, here) for model in models]):
                pass
            for (fault, precision), tried in each(
                _try, [(setting, *case, here, checkpoint is not None) for case in cases]
            ):
                rows[fault, precision] = tried
                if here and progress is not None:
                    progress(found())
        if not here:
            validated = rows
            rows = {}
            try:
                _elsewhere(setting, models, list(validated))
            finally:  # what it came to, even where it is ended
                for (fault, precision), records in _read(setting):
                    rows[fault, precision] = [
                        _row(FAULTS[fault], precision, record, validated[fault, precision][0]["validate"])
                        for record in records
                    ]
                if progress is not None:
                    progress(found())
    return found()


def check(record: Mapping[str, Any]) -> None:
    """Raises CheckError, naming them, for harmful faults that no gate caught, or not the one that must."""
    harmful = [row for row in record["faults"] if row["harmful"]]
    missed = sorted({_place(row) for row in harmful if not row["caught_by"]})
    if missed:
        raise CheckError(
            f"planted faults: expected some gate to catch all {record['harmful']} harmful ones, "
            f"found {len(missed)} that passed all: {_several(missed)}"
        )
    if late := sorted(f"{_place(row)} by {must}" for row in harmful if (must := missed_by(record, row))):
        raise CheckError(f"planted faults: expected each to be caught by its gate, found {_several(late)} not to be")


def missed_by(record: Mapping[str, Any], row: Mapping[str, Any]) -> str | None:
    """Return the gate that the table says must catch a harmful fault, where it did not; None where it did.

    Of graphs, assemblies and the runtime, in this Python's backends.
    """
    must = FAULTS[row["fault"]].caught_by
    looked = record["backend"] in LOCAL_BACKENDS and row["where"] != "engine"
    return must if looked and must not in row["caught_by"] else None


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['fault']} ({row['where']}, {row['precision']})"


def _several(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@contextmanager
def _workers(jobs: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Give a call of a function with each of some arguments.

    Here or in `jobs` processes; what comes back is given as it comes.
    """
    if jobs == 1:
        yield lambda function, calls: (function(*arguments) for arguments in calls)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults.run", "lockstep.verify.validate"])
    with ProcessPoolExecutor(jobs, context, _share, (max(1, thread_count(None) // jobs),)) as pool:

        def each(function: Callable[..., Any], calls: Sequence[tuple]) -> Iterator[Any]:
            futures = [pool.submit(function, *arguments) for arguments in calls]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                for future in futures:
                    future.cancel()

        yield each


def _share(threads: int) -> None:
    """Runs first in each process."""
    os.environ[THREADS_VARIABLE] = str(threads)
    torch.set_num_threads(threads)


def _make(setting: Setting, name: str, precision: str, here: bool) -> None:
    """Make a model without faults. Raises CheckError where a gate refuses it."""
    make(name, precision, Path(setting.work))
    case = Case(setting, name, precision)
    with case.cleared():
        message = case.validate()
    if message is not None:
        raise CheckError(f"{case.target} without a fault: expected validate to pass, found: {message}")
    if here:
        prepare(case)


def _try(
    setting: Setting, fault: str, precision: str, here: bool, may_lack: bool
) -> tuple[tuple[str, str], list[dict[str, Any]]]:
    """Plant a fault and send it through the gates.

    All of them, or validate alone where engines are built and run elsewhere. may_lack: no row for a fault of what the
    model has not, such as a head of its own.
    """
    case = Case(setting, FAULTS[fault].model, precision, fault)
    if here:
        with case.cleared():
            try:
                plant(case)
            except ValueError:
                if may_lack:
                    return (fault, precision), []
                raise
            message = _validated(case)
            return (fault, precision), [_row(case.fault, precision, record, message) for record in try_engines(case)]
    plant(case)
    return (fault, precision), [{"validate": _validated(case)}]


def _validated(case: Case) -> str | None:
    """Return what validate says; it does not see the runtime."""
    return case.validate() if case.fault.place != RUNTIME else None


def _elsewhere(setting: Setting, models: Sequence[tuple[str, str]], cases: Sequence[tuple[str, str]]) -> None:
    """Engines of all cases, in this process, since a GPU's backend starts once."""
    try_all(asdict(setting), models, cases, str(_lines(setting)))


def _read(setting: Setting) -> Iterator[tuple[tuple[str, str], list[dict[str, Any]]]]:
    """Read what `_elsewhere` wrote: of each (fault, precision) the records."""
    for line in _lines(setting).read_text().splitlines() if _lines(setting).exists() else ():
        fault, precision, records = json.loads(line)
        yield (fault, precision), records


def _lines(setting: Setting) -> Path:
    return Path(setting.work) / "records.jsonl"


def _row(fault: Fault, precision: str, record: Mapping[str, Any], validated: str | None) -> dict[str, Any]:
    """Return a row of the table. validate sees graphs and assemblies, not engines and the runtime."""
    said = dict(record["gates"])
    if record["where"] in ("graph", ASSEMBLY):
        said["validate"] = validated
    caught_by = [gate for gate in GATES if said.get(gate) is not None]
    largest = record["largest_logit_difference"]
    return {
        "fault": fault.name, "about": fault.about, "model": fault.model, "where": record["where"],
        "precision": precision, "largest_logit_difference": largest if largest is None else float(f"{largest:.3g}"),
        "scenario": record["scenario"], "refused": record["refused"], "harmful": record["harmful"],
        "caught_by": caught_by, "message": said[caught_by[0]] if caught_by else None,
    }  # fmt: skip


def _report(
    backend: str, judged: Mapping[str, float], rows: Sequence[dict[str, Any]], of_checkpoint: bool
) -> dict[str, Any]:
    harmful = [row for row in rows if row["harmful"]]
    caught = sum(bool(row["caught_by"]) for row in harmful)
    names = ["faults", *([backend] if backend != "onnxruntime" else [])]
    if all(map(is_quantized, judged)):  # a record of its own, beside that of the others
        names.append("quantized")
    names += [model for model in ("ranks", "experts") if rows and all(row["model"] == model for row in rows)]
    if of_checkpoint:
        names.append("checkpoint")
    return {
        "benchmark": "-".join(names), "backend": backend, "tolerance": dict(judged),
        "distinct": len({row["fault"] for row in rows}), "planted": len(rows), "harmful": len(harmful),
        "harmful_caught": caught, "score": round(caught / len(harmful), 4) if harmful else 1.0, "faults": list(rows),
        **surroundings(*_PACKAGES),
    }  # fmt: skip
