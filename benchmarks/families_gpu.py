"""`families-gpu`: which published families (published.py) run on a GPU backend, each as a tiny model.

In: names of families (default: all). Out: for each precision of each whether it works (the error of its logits in a
batch relative to transformers in fp32, and that of transformers in the same precision; whether a request alone has the
same bits), or the stage that failed and why. Each family runs in a child process, through all stages. A run that was
cut short can be resumed: rows that the same code wrote are kept, families without a row come first, and those whose row
is of other code (each row has a digest of its own) come last.
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
    options.Option("names", metavar="[FAMILY]...", many=True),
    options.choice("--backend", *GPU_BACKENDS),
    options.Option("--precisions", "With commas between them.", "fp16"),
    options.number("--jobs", 1, "Families tried at a time."),
    options.number("--seconds", 36000, "No family is tried for longer than until then."), options.WRITE,
)  # fmt: skip


def main(names: Sequence[str], backend: str, precisions: str, jobs: int, seconds: int, write: Path | None) -> None:
    """Try which published families run on a GPU backend, each as a tiny model.

    Each goes through all stages.  [default: all]
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

    def measure(name: str, precision: str) -> None:
        tried = _in_a_process(context, name, backend, precision, deadline)
        if tried is None:
            return
        print(f"{name} {precision}: {tried['result']} {tried.get('reason', '')}", file=sys.stderr, flush=True)
        with writing:
            families.setdefault(name, {})[precision] = tried | {"code": code}
            if path is not None:
                write_json(path, record)

    missing = []
    of_other_code = []
    for precision in precisions.split(","):
        for name in names or FAMILIES:
            row = families.get(name, {}).get(precision)
            if row is None:
                missing.append((name, precision))
            elif row["code"] != code:
                of_other_code.append((name, precision))
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
    for precision in precisions.split(","):
        results = Counter(rows[precision]["result"] for rows in families.values() if precision in rows)
        print(precision, ", ".join(f"{count} {result}" for result, count in results.most_common()), file=sys.stderr)


def _in_a_process(context: Any, name: str, backend: str, precision: str, deadline: float) -> dict[str, Any] | None:
    """Return what came of a family; None if there was no time for it."""
    if time.monotonic() > deadline:
        return None
    began = time.monotonic()
    arguments = (name, backend, precision)
    record, exit_code, is_late = ask_child(context, _child, arguments, max(0.0, deadline - began))
    if is_late:
        return None
    record = record or {"result": BROKEN, "reason": f"the process ended with exit code {exit_code}"}
    return record | {"seconds": round(time.monotonic() - began, 1)}


def _child(name: str, backend: str, precision: str, send: Any) -> None:
    """Run in a process forked from one that has the imports."""
    from benchmarks.tiny import try_on_gpu

    with tempfile.TemporaryDirectory() as folder:
        send.send(try_on_gpu(name, backend, precision, Path(folder)))
