"""Planted faults: each goes through all gates of its backends.

And through requests that users could send, which shows what the gates are worth.

In: which faults, backends. Out: for each fault and place how far it moves a logit, which gates refuse it and with
which words; and the score: of the faults that move a logit by more than the target's tolerance, the share that some
gate caught.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.measure import surroundings

from faults.case import GATES, Case, Setting, plant, prepare, try_all, try_engines
from faults.fault import ALL, ASSEMBLY, HOST, RUNTIME, Fault
from faults.models import CHECKPOINT, make, start
from faults.table import FAULTS
from lockstep import CheckError, InputError
from lockstep.artifacts.files import sha256_json
from lockstep.backends.cpu import THREADS_VARIABLE, thread_count
from lockstep.config.backends import backends as known_backends
from lockstep.provenance.code_identity import code_digests
from lockstep.tolerances import NOISE, Tolerances

# The largest difference of a logit that is no harm: a number, for harm is judged without the gates.
HARMLESS = {
    "fp32": 1e-3, "fp16": 5e-2, "bf16": 0.4, "w8a16": 2e-2, "w4a16": 2e-2, "w8a8": 2e-2, "w4a8": 2e-2, "w8a8-fp8": 2e-2,
}  # fmt: skip
_PACKAGES = ("onnx", "onnxruntime", "openvino", "torch", "transformers")
_SHARE = 0.1  # of the demo's faults, that are planted in a trained checkpoint too
Progress = Callable[[dict[str, Any]], None]


class Planting(NamedTuple):
    """A fault in one model, precision and backend."""

    model: str
    precision: str
    backend: str
    fault: str


def choose(backends: Sequence[str], only: Sequence[str] = (), models: Sequence[str] = ()) -> list[Fault]:
    """Return the faults of backends: those named, in these models.

    Raises InputError for a name that is none's, and where none is left.
    """
    unknown = sorted(set(only) - set(FAULTS))
    if unknown:
        raise InputError(f"faults: expected names of the table in records/faults.md, found {', '.join(unknown)}")
    chosen = [
        fault
        for fault in FAULTS.values()
        if set(backends) & set(fault.backends)
        and (not only or fault.name in only)
        and (not models or fault.model in models)
    ]
    if not chosen:
        places = ", ".join((*backends, *only, *models))
        raise InputError(f"faults: expected at least one for the backends and models, found none: {places}")
    return chosen


def benchmark(backends: Sequence[str]) -> str:
    """Return the name of the record."""
    return "faults" if set(backends) <= set(HOST) else f"faults-{backends[0]}"


def plantings(
    faults: Sequence[Fault], backends: Sequence[str], precisions: Sequence[str], draw: int, with_checkpoint: bool
) -> list[Planting]:
    """Return where faults are planted, sorted, the checkpoint's last, which take longest.

    draw: in that many of the pairs of precision and backend that each has, drawn by its name, or by its model's where
    that is not the demo; 0 for all. with_checkpoint: one of ten of the demo's also in the checkpoint that is given.
    """
    offered = []
    for backend in backends:
        settings = known_backends()[backend]
        runs_here = [item for item in settings.precisions if item in precisions and not settings.lacks_here(item)]
        offered += [(precision, backend) for precision in runs_here]
    places = []
    for fault in faults:
        pairs = [pair for pair in offered if pair[0] in fault.precisions and pair[1] in fault.backends]
        is_in_checkpoint = with_checkpoint and fault.model == "demo" and _lot(CHECKPOINT, fault.name) < _SHARE
        for model in (fault.model, *([CHECKPOINT] if is_in_checkpoint else [])):
            drawer = fault.name if model == "demo" else model
            drawn = sorted(pairs, key=lambda pair: _lot(drawer, *pair))[: draw or None]
            places += [Planting(model, *pair, fault.name) for pair in drawn]
    return sorted(places, key=lambda place: (place.model == CHECKPOINT, place))


def _lot(*names: str) -> float:
    """Return a number from 0 to 1 that names draw."""
    return random.Random(" ".join(names)).random()


def run(
    faults: Sequence[Fault],
    backends: Sequence[str] = HOST,
    precisions: Sequence[str] = ALL,
    draw: int = 0,
    jobs: int = 1,
    options: Mapping[str, Any] | None = None,
    work: Path | None = None,
    progress: Progress | None = None,
    loosen: float = 1.0,
    checkpoint: Path | None = None,
    earlier: Mapping[str, Any] | None = None,
    sample: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Plant and try `faults` (`plantings`) on backends that run in this Python, or on another one alone.

    `progress`, if given, is called with the whole record each time a fault has been tried. Rows of `earlier`, a record
    of the same packages and limits of harm, stay until their planting is tried again: not where the code is the same.

    options: of the build. work: a scratch folder. sample, seed: try that many plantings, drawn; 0 for all.
    loosen: that many times the default tolerances for the gates. checkpoint: of Llama's kind.
    """
    on_host = set(backends) <= set(HOST)
    if not on_host and len(backends) > 1:
        raise InputError(f"faults: expected {', '.join(HOST)}, or another backend alone, found {', '.join(backends)}")
    places = plantings(faults, backends, precisions, draw, checkpoint is not None)
    report = partial(_report, backends=backends, draw=draw)
    rows = _rows_of(earlier, report({}))

    def is_tried(place: Planting) -> bool:
        codes = {row["code"] for row in rows.get(place, ())}
        return codes == {gates_code(place.backend)}

    waiting = [place for place in places if not is_tried(place)]
    if sample:
        waiting = sorted(random.Random(seed).sample(waiting, min(sample, len(waiting))), key=places.index)
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        settings = {}
        for backend in backends:
            tolerances = {name: asdict(Tolerances(name, backend, loosen * NOISE)) for name in precisions}
            settings[backend] = Setting(scratch, backend, dict(options or {}), tolerances, HARMLESS)
        validated: dict[Planting, str | None] = {}
        with _workers(jobs) as run_all:
            models = sorted({place.model for place in waiting})
            for _ in run_all(start, [(name, Path(scratch), checkpoint) for name in models]):
                pass
            for (name, precision), group in groupby(waiting, key=lambda place: place[:2]):
                planted = list(group)
                make(name, precision, Path(scratch))
                users = sorted({place.backend for place in planted})
                for _ in run_all(_prepare, [(settings[backend], name, precision, on_host) for backend in users]):
                    pass
                for place, tried in run_all(_try, [(settings[place.backend], place, on_host) for place in planted]):
                    if not on_host:
                        validated[place] = tried[0]["validate"]
                        continue
                    rows[place] = tried
                    if progress is not None:
                        progress(report(rows))
        if not on_host:
            try:
                _elsewhere(settings[backends[0]], list(validated))
            finally:  # also the rows of a run that is interrupted
                for place, records in _read(settings[backends[0]]):
                    rows[place] = [_row(place, record, validated[place]) for record in records]
                if progress is not None:
                    progress(report(rows))
    return report(rows)


def check(record: Mapping[str, Any]) -> None:
    """Raises CheckError, naming them, for harmful faults that no gate caught, or not the one that must."""
    harmful = [row for row in record["faults"] if row["harmful"]]
    missed = sorted({_place(row) for row in harmful if not row["caught_by"]})
    if missed:
        raise CheckError(
            f"planted faults: expected some gate to catch all {record['harmful']} harmful ones, "
            f"found {len(missed)} that passed all: {_several(missed)}"
        )
    missed = sorted(f"{_place(row)} by {missed_by(row)}" for row in harmful if missed_by(row))
    if missed:
        raise CheckError(f"planted faults: expected each to be caught by its gate, found {_several(missed)} not to be")


def missed_by(row: Mapping[str, Any]) -> str | None:
    """Return the gate that the table says must catch a harmful fault, where it did not; None where it did.

    Of graphs, assemblies and the runtime, in this Python's backends.
    """
    must = FAULTS[row["fault"]].caught_by
    return must if row["backend"] in HOST and row["where"] != "engine" and must not in row["caught_by"] else None


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['fault']} ({row['where']}, {row['precision']} on {row['backend']})"


@functools.cache
def gates_code(backend: str) -> str:
    """Return the digest of all code that the gates of a backend run."""
    stages = "build", "validate", "compare", "golden", "adapted"
    return sha256_json({stage: code_digests(f"stages.{stage}", backend) for stage in stages})


def _several(names: Sequence[str]) -> str:
    listed = ", ".join(names[:8])
    return listed if len(names) <= 8 else f"{listed} and {len(names) - 8} more"


@contextmanager
def _workers(jobs: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Give a call of a function with each of some arguments.

    Here or in `jobs` processes; results come in the order in which calls end.
    """
    if jobs == 1:
        yield lambda function, calls: (function(*arguments) for arguments in calls)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults.run", "lockstep.verify.validate"])
    with ProcessPoolExecutor(jobs, context, _share, (max(1, thread_count(None) // jobs),)) as pool:

        def run_all(function: Callable[..., Any], calls: Sequence[tuple]) -> Iterator[Any]:
            futures = [pool.submit(function, *arguments) for arguments in calls]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                for future in futures:
                    future.cancel()

        yield run_all


def _share(threads: int) -> None:
    """Runs first in each process."""
    os.environ[THREADS_VARIABLE] = str(threads)
    torch.set_num_threads(threads)


def _prepare(setting: Setting, name: str, precision: str, on_host: bool) -> None:
    """Hold a model without faults to the gates. Raises CheckError where one refuses it."""
    case = Case(setting, name, precision)
    with case.cleared():
        message = case.validate()
    if message is not None:
        raise CheckError(f"{case.target} without a fault: expected validate to pass, found: {message}")
    if on_host:
        prepare(case)


def _try(setting: Setting, place: Planting, on_host: bool) -> tuple[Planting, list[dict[str, Any]]]:
    """Plant a fault and send it through the gates: validate alone where engines are built and run elsewhere.

    No row for a fault of what a checkpoint has not, such as its own head.
    """
    case = Case(setting, place.model, place.precision, place.fault)
    if not on_host:
        plant(case)
        return place, [{"validate": _validated(case)}]
    with case.cleared():
        try:
            plant(case)
        except ValueError:
            if place.model == CHECKPOINT:
                return place, []
            raise
        message = _validated(case)
        return place, [_row(place, record, message) for record in try_engines(case)]


def _validated(case: Case) -> str | None:
    """Return what validate says; it does not see the runtime."""
    return case.validate() if case.fault.place != RUNTIME else None


def _elsewhere(setting: Setting, places: Sequence[Planting]) -> None:
    """Engines of all plantings, in this process, since a GPU's backend starts once."""
    models = sorted({(place.model, place.precision) for place in places})
    try_all(asdict(setting), models, [(place.fault, place.precision) for place in places], str(_lines(setting)))


def _read(setting: Setting) -> Iterator[tuple[Planting, list[dict[str, Any]]]]:
    """Read what `_elsewhere` wrote: of each planting the records."""
    for line in _lines(setting).read_text().splitlines() if _lines(setting).exists() else ():
        fault, precision, records = json.loads(line)
        yield Planting(FAULTS[fault].model, precision, setting.backend, fault), records


def _lines(setting: Setting) -> Path:
    return Path(setting.work) / "records.jsonl"


def _row(place: Planting, record: Mapping[str, Any], validated: str | None) -> dict[str, Any]:
    """Return a row of the table. validate sees graphs and assemblies, not engines and the runtime."""
    messages = dict(record["gates"])
    if record["where"] in ("graph", ASSEMBLY):
        messages["validate"] = validated
    caught_by = [gate for gate in GATES if messages.get(gate) is not None]
    largest = record["largest_logit_difference"]
    return {
        **place._asdict(), "about": FAULTS[place.fault].about, "where": record["where"],
        "code": gates_code(place.backend),
        "largest_logit_difference": largest if largest is None else float(f"{largest:.3g}"),
        "scenario": record["scenario"], "refused": record["refused"], "harmful": record["harmful"],
        "caught_by": caught_by, "message": messages[caught_by[0]] if caught_by else None,
    }  # fmt: skip


def _rows_of(earlier: Mapping[str, Any] | None, record: Mapping[str, Any]) -> dict[Planting, list[dict[str, Any]]]:
    """Return the rows of each planting in an earlier record; none of one of other packages or limits of harm."""
    if earlier is None or earlier["versions"] != record["versions"]:
        return {}
    if any(HARMLESS[name] != bound for name, bound in earlier["tolerance"].items()):
        return {}
    rows: dict[Planting, list[dict[str, Any]]] = {}
    for row in earlier["faults"]:
        if row["fault"] in FAULTS:
            rows.setdefault(Planting(*(row[name] for name in Planting._fields)), []).append(row)
    return rows


def _report(by_place: Mapping[Planting, list[dict[str, Any]]], backends: Sequence[str], draw: int) -> dict[str, Any]:
    order = list(FAULTS)
    by_place = dict(sorted(by_place.items(), key=lambda item: (order.index(item[0].fault), item[0])))
    rows = list(chain(*by_place.values()))
    precisions = {row["precision"] for row in rows}
    harmful = [row for row in rows if row["harmful"]]
    caught = sum(bool(row["caught_by"]) for row in harmful)
    return {
        "benchmark": benchmark(backends),
        "drawn": draw, "tolerance": {name: bound for name, bound in HARMLESS.items() if name in precisions},
        "distinct": len({row["fault"] for row in rows}), "planted": len(rows), "harmful": len(harmful),
        "harmful_caught": caught, "score": round(caught / len(harmful), 4) if harmful else 1.0, "faults": rows,
        **surroundings(*_PACKAGES),
    }  # fmt: skip
