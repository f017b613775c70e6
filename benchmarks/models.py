"""`models`: which models work: every causal-LM type of the installed transformers is tried.

Each as a tiny model through all stages, whose activations are like those of trained ones.

In: model types (default: all). Out: for each whether it works (with the error of its logits against transformers' eager
forward in fp32 and fp16, its activations, and the numbers of block classes and attention variants), is refused (with
the reason), or why no tiny model could be made. Each type has a process of its own.
"""

from __future__ import annotations

import multiprocessing
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import options
from benchmarks.markdown import paragraph
from benchmarks.measure import deliver, surroundings
from lockstep import InputError

OPTIONS = (
    options.Option("types", metavar="[TYPE]...", many=True),
    options.number("--jobs", 1, "Types tried at a time."), options.WRITE,
)  # fmt: skip
PACKAGES = ("onnx", "onnxruntime", "onnxscript", "torch", "transformers")
WORKS, REFUSED, NO_MODEL, WRONG, BROKEN = "works", "refused", "no tiny model", "wrong", "broken"
RESULTS = {
    WORKS: "logits equal those of transformers",
    REFUSED: "the export says why",
    NO_MODEL: "transformers makes no model of the type's default config, however small",
    WRONG: "passes the export's gates and gives other logits than transformers",
    BROKEN: "ends in an error that is no refusal",
}
TOLERANCE = 1e-4  # of the logits' standard deviation; fp32 sums in another order give 1e-6 to 2e-5
OWN_ERRORS = 4  # times what transformers in fp32 differs from itself in fp64, where that is more; fp16 from fp32
_CPU_SECONDS = 300
_WALL_SECONDS = 1500  # for machines that do other work too
_MEMORY = 14 << 30


def main(types: Sequence[str], jobs: int, write: Path | None) -> None:
    """Try which causal-LM types of transformers work, each as a tiny model.

    Each goes through all stages.  [default: all types]
    """
    record = run(types or None, jobs, lambda tried: print(f"{tried['type']}: {tried['result']}", file=sys.stderr))
    deliver(record, write)
    if write is not None:
        print(write_page(record, write / "models.md"))


def run(
    types: Iterable[str] | None = None, jobs: int = 1, progress: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Try `types`, `jobs` at a time.

    `progress`, if given, is called with each record as it is made.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    chosen = sorted(known) if types is None else list(types)
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        raise InputError(f"expected causal-LM types of transformers, found {', '.join(unknown)}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.tiny"])

    def one(model_type: str) -> dict[str, Any]:
        record = _in_a_process(context, model_type)
        if progress is not None:
            progress(record)
        return record

    with ThreadPoolExecutor(jobs) as pool:
        records = list(pool.map(one, chosen))
    counts = Counter(record["result"] for record in records)
    return {
        "benchmark": "models",
        "tolerance": TOLERANCE,
        "counts": {result: counts[result] for result in RESULTS if counts[result]},
        "models": {record.pop("type"): record for record in records},
        **surroundings(*PACKAGES, threads=1),
    }


def _in_a_process(context: Any, model_type: str) -> dict[str, Any]:
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(model_type, send))
    began = time.perf_counter()
    process.start()
    send.close()
    record = None
    if receive.poll(_WALL_SECONDS):
        try:
            record = receive.recv()
        except EOFError:
            pass
    if record is None:
        process.kill()
    process.join()
    if record is None:
        what = {
            -signal.SIGXCPU: f"more than {_CPU_SECONDS} s of processor time",
            -signal.SIGKILL: f"more than {_WALL_SECONDS} s",
        }
        record = {
            "type": model_type,
            "result": BROKEN,
            "reason": what.get(process.exitcode, f"the process ended with exit code {process.exitcode}"),
        }
    return record | {"seconds": round(time.perf_counter() - began, 1)}


def _child(model_type: str, send: Any) -> None:
    """Runs in a process forked from one that has the imports."""
    from benchmarks.tiny import try_type

    in_use = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if Path("/proc/self/statm").exists()
        else 0
    )
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _MEMORY, in_use + _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    with tempfile.TemporaryDirectory() as folder:
        record = try_type(model_type, Path(folder))
    send.send({"type": model_type, **record})


def write_page(report: dict[str, Any], path: Path) -> Path:
    """Write the report as a page for people."""
    versions, counts = report["versions"], report["counts"]
    lines = [
        "# Which models work",
        "",
        paragraph(
            f"Every causal-LM type of transformers {versions['transformers']}, each as a tiny model through all stages "
            f"(fp32 and fp16, ONNX Runtime {versions['onnxruntime']}): `python -m benchmarks models` made this page. "
            "Weights are random, but activations are like those of trained models, where the class lets them: a few "
            "channels of the hidden state are 50 to 500 times the others, the first token has most of the attention, "
            "logits have a standard deviation of 5 (`lockstep.export.lifelike`; outlier and first token below). A "
            "type works when the logits of four requests (one of 300 tokens, of mixtures at least 100), prefilled "
            "together and then decoded, and of the long one again, in chunks of 97 tokens beside the others' decoding, "
            "equal those of each request alone and whole: they differ from transformers' eager forward by at most "
            f"{report['tolerance']:.0e} of their standard deviation, or by at most four times what transformers in "
            "fp32 differs from itself in fp64 (the third column; weights may make a model that sensitive). In fp16 it "
            "is held to four times what transformers in fp16 differs from itself in fp32; of a mixture but for one "
            "token of 20, for a router near a tie may choose another expert."
        ),
        "",
        "| result | types | meaning |",
        "|---|---|---|",
        *(f"| {result} | {counts[result]} | {meaning} |" for result, meaning in RESULTS.items() if result in counts),
        "",
        "## Works",
        "",
        "| type | logit error | of transformers itself | in fp16 | of transformers itself | outlier | first token | "
        "block classes | attention variants |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    models = report["models"]
    lines += [
        f"| {name} | {model['logit_error']:.1e} | {model['transformers_error']:.1e} | {_half(model)} | "
        f"{model['classes']} | {model['kinds']} |"
        for name, model in models.items()
        if model["result"] == WORKS
    ]
    halves = [
        f"| {name} | {_cell(model['fp16_refused'])} |" for name, model in models.items() if "fp16_refused" in model
    ]
    if halves:
        lines += ["", "Refused in fp16:", "", "| type | reason |", "|---|---|", *halves]
    for result in (REFUSED, NO_MODEL, WRONG, BROKEN):
        rows = [f"| {name} | {_cell(model['reason'])} |" for name, model in models.items() if model["result"] == result]
        if rows:
            lines += ["", f"## {result.capitalize()}", "", "| type | reason |", "|---|---|", *rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def _half(model: dict[str, Any]) -> str:
    """Return the cells of errors in fp16, and of activations."""
    found, first = model["activations"], model["activations"]["first"]
    share = "-" if first is None else f"{first:.0%}"
    half = "refused" if "fp16_refused" in model else f"{model['fp16_error']:.1e}"
    return f"{half} | {model['transformers_fp16_error']:.1e} | {found['outlier']:.0f} | {share}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
