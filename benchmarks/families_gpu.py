"""`families-gpu`: which published families (published.py) run on a GPU backend, each as a tiny model.

In: names of families (default: all). Out: for each precision of each whether it works (the error of its logits in a
batch relative to transformers in fp32, and that of transformers in the same precision; whether a request alone has the
same bits), or the stage that failed and why. Each family runs in a child process, through all stages. A run that was
cut short can be resumed: rows that the same code wrote are kept, families without a row come first, and those whose row
is of other code (each row has the digest of its code) come last.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks import options
from benchmarks.measure import deliver, read_json, surroundings, write_json
from benchmarks.models import BROKEN, GPU_BACKENDS, PACKAGES, ask_child, gpu_record, write_page
from benchmarks.published import FAMILIES
from lockstep import InputError
from lockstep.artifacts.files import sha256_json
from lockstep.provenance.code_identity import code_digests

OPTIONS = (
    options.option("names", metavar="[FAMILY]...", many=True),
    options.choice("--backend", *GPU_BACKENDS),
    options.option("--precisions", "With commas between them.", "fp16"),
    options.number("--jobs", 1, "Families tried at a time."),
    options.number("--seconds", 36000, "No family is tried for longer than until then."),
    options.option("--published-widths", "As wide as published, with few layers and tokens.", False, bool),
    options.WRITE,
)  # fmt: skip

AS_WIDE = ", published widths"


def main(
    names: Sequence[str], backend: str, precisions: str, jobs: int, seconds: int, published_widths: bool,
    write: Path | None,
) -> None:  # fmt: skip
    """Try which published families run on a GPU backend, each as a tiny model.

    Each goes through all stages.  [default: all]

    With --published-widths hidden sizes, heads and experts are those of the checkpoint, in 4 to 20 GB of memory a job.
    """
    deadline = time.monotonic() + seconds
    if unknown := sorted(set(names) - set(FAMILIES)):
        raise InputError(f"expected families ({', '.join([*FAMILIES][:3])} ...), found {', '.join(unknown)}")
    record: dict[str, Any] = {"benchmark": f"families-{backend}", **surroundings(*PACKAGES, threads=1), "families": {}}
    code = sha256_json(code_digests("cli.main"))[:12]
    path = None if write is None else gpu_record(write, backend)
    if path is not None and path.is_file():
        earlier = read_json(path)
        if earlier["versions"] == record["versions"]:
            record["families"] = earlier["families"]
    families = record["families"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.tiny"])

    writing = Lock()

    def measure(name: str, column: str) -> None:
        tried = _in_a_process(context, name, backend, column, deadline)
        if tried is None:
            return
        print(f"{name} {column}: {tried['result']} {tried.get('reason', '')}", file=sys.stderr, flush=True)
        with writing:
            families.setdefault(name, {})[column] = tried | {"code": code}
            if path is not None:
                write_json(path, record)

    columns = precisions.split(",")
    if published_widths:
        columns = [f"{precision}{AS_WIDE}" for precision in columns]
    missing = []
    of_other_code = []
    for column in columns:
        for name in names or FAMILIES:
            row = families.get(name, {}).get(column)
            if row is None:
                missing.append((name, column))
            elif row["code"] != code:
                of_other_code.append((name, column))
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda case: measure(*case), missing + of_other_code))
    if write is None:
        deliver(record, None)
    else:
        write_json(gpu_record(write, backend), record)
        print(gpu_record(write, backend))
        cpu_record = write / "bench" / "models.json"
        if cpu_record.is_file():
            print(write_page(read_json(cpu_record), write))
    for column in columns:
        results = Counter(rows[column]["result"] for rows in families.values() if column in rows)
        print(column, ", ".join(f"{count} {result}" for result, count in results.most_common()), file=sys.stderr)


def _in_a_process(context: Any, name: str, backend: str, column: str, deadline: float) -> dict[str, Any] | None:
    """Return what came of a family; None if there was no time for it."""
    if time.monotonic() > deadline:
        return None
    began = time.monotonic()
    arguments = (name, backend, column)
    record, exit_code, is_late = ask_child(context, _child, arguments, max(0.0, deadline - began))
    if is_late:
        return None
    record = record or {"result": BROKEN, "reason": f"the process ended with exit code {exit_code}"}
    return record | {"seconds": round(time.monotonic() - began, 1)}


def _child(name: str, backend: str, column: str, send: Any) -> None:
    """Run in a process forked from one that has the imports."""
    from benchmarks.tiny import try_on_gpu

    precision = column.removesuffix(AS_WIDE)
    with tempfile.TemporaryDirectory() as folder:
        send.send(try_on_gpu(name, backend, precision, Path(folder), column != precision))
