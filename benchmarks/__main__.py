"""Commands of `python -m benchmarks`.

Each prints its record as JSON, or writes it, with its tables, into a folder of records.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

import lockstep
from benchmarks.measure import dump_json, read_json, write_json
from lockstep import InputError
from lockstep.cli.guarded import SETTINGS, GuardedGroup

_RESULTS = click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("results"),
    show_default=True,
    help="The results tree.",
)
_DOCS = click.option(
    "--write",
    "docs",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write bench/NAME.json and the tables into this folder.",
)


@click.group(cls=GuardedGroup, context_settings=SETTINGS)
def bench() -> None:
    """Speed, memory and coverage, measured here."""


def _deliver(record: Mapping[str, Any], docs: Path | None) -> None:
    if docs is None:
        click.echo(dump_json(record), nl=False)
    else:
        write_json(docs / "bench" / f"{record['benchmark']}.json", record)
        click.echo(docs / "bench" / f"{record['benchmark']}.json")


_SHAPES = click.option(
    "--shape",
    "shapes",
    multiple=True,
    default=("llama-2-7b", "llama-3-70b"),
    show_default=True,
    help="A shape that comes with the benchmark.",
)
_PRECISION = click.option("--precision", type=click.Choice(["fp32", "fp16", "bf16"]), default="fp16", show_default=True)
_CONTEXT = click.option(
    "--context",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Tokens in the cache when decoding begins.",
)
_THREADS = click.option(
    "--threads", type=click.IntRange(min=1), help="CPU threads of each.  [default: LOCKSTEP_THREADS, else all]"
)
_ROUNDS = click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds that count; medians are taken."
)


@bench.command()
@click.option(
    "--model", "models", multiple=True, metavar="FOLDER|SHAPE", default=("llama-1024x8", "resources/demo-llama"), show_default=True,  # noqa: E501
    help="A checkpoint folder, or a shape that gets random weights; may be given several times.",
)  # fmt: skip
@click.option("--batch", "batches", multiple=True, type=click.IntRange(min=1), default=(1, 4), show_default=True)
@_CONTEXT
@click.option("--steps", type=click.IntRange(min=1), default=32, show_default=True, help="Decode steps of a round.")
@click.option("--precision", type=click.Choice(["fp32", "fp16"]), default="fp32", show_default=True)
@_THREADS
@_ROUNDS
@_DOCS
def decode(
    models: tuple[str, ...], batches: tuple[int, ...], precision: str, docs: Path | None, **settings: Any
) -> None:
    """Measure a decode step beside one monolithic ONNX graph and transformers eager.

    The contestants take turns in one process.
    """
    from benchmarks.decode import run_models

    _deliver(run_models(models, precision, batches, **settings), docs)


@bench.command("small-weights")
@click.option(
    "--model", metavar="FOLDER|SHAPE", default="llama-1024x8", show_default=True, help="As for decode, but one."
)
@click.option("--batch", "batches", multiple=True, type=click.IntRange(min=1), default=(1, 4), show_default=True)
@click.option(
    "--prompt", type=click.IntRange(min=0), default=512, show_default=True, help="Tokens of a timed prompt; 0: none."
)
@click.option("--group", "groups", multiple=True, type=int, default=(32, 128), show_default=True, help="Group sizes.")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    type=click.Choice(["onnxruntime", "openvino"]),
    default=("onnxruntime", "openvino"),
    show_default=True,
    help="Beside ONNX Runtime's fp32.",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(["fp32", "bf16", "w8a16", "w4a16"]),
    default=("fp32", "bf16", "w8a16", "w4a16"),
    show_default=True,
    help="Of each backend that has it.",
)
@_CONTEXT
@click.option("--steps", type=click.IntRange(min=1), default=32, show_default=True, help="Decode steps of a round.")
@_THREADS
@click.option("--cpu-time", is_flag=True, help="CPU seconds of one thread: for a machine that does other work.")
@click.option(
    "--beside",
    multiple=True,
    type=click.Choice(["genai", "llama.cpp"]),
    help="Also onnxruntime-genai's int4, llama.cpp's Q4_0, in environments of their own, which pip installs.",
)
@click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where these environments and the peers' models are kept.  [default: a temporary folder]",
)
@_ROUNDS
@_DOCS
def small_weights(docs: Path | None, **settings: Any) -> None:
    """Measure a decode step in bf16, w8a16 and w4a16 beside fp32, in turn.

    The bandwidth of memory is measured too.
    """
    from benchmarks.small_weights import run

    _deliver(run(**settings), docs)


@bench.command()
@click.option("--shape", default="llama-1024x8", show_default=True, help="A shape, which gets random weights.")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(min=1), default=(1, 4), show_default=True)
@click.option("--rank", type=click.IntRange(1, 128), default=16, show_default=True, help="Of each adapter.")
@click.option("--adapters", type=click.IntRange(1, 64), default=4, show_default=True, help="Resident together.")
@_THREADS
@click.option("--cpu-time", is_flag=True, help="CPU seconds of one thread: for a machine that does other work.")
@_ROUNDS
@_DOCS
def adapters(docs: Path | None, **settings: Any) -> None:
    """Measure steps with an adapter in each row, with none, and without room for any.

    Two forms of an adapter's products are measured too.
    """
    from benchmarks.adapters import run

    _deliver(run(**settings), docs)


@bench.command()
@click.option(
    "--target", "targets", multiple=True, help="A target of a finished run, with its limits; instead of models."
)
@click.option("--model", "models", multiple=True, metavar="FOLDER|SHAPE", help="As for decode.  [default: as there]")
@click.option("--requests", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--batch", type=click.IntRange(min=1), default=16, show_default=True, help="Of models: requests in flight together."
)
@click.option("--mean-prompt", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens of a prompt.")
@click.option("--mean-new", type=click.IntRange(min=1), default=32, show_default=True, help="New tokens of a request.")
@click.option(
    "--prefix", type=click.IntRange(min=0), default=2048, show_default=True, help="Tokens that prompts share."
)
@click.option("--precision", type=click.Choice(["fp32", "fp16"]), default="fp32", show_default=True, help="Of models.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: LOCKSTEP_THREADS, else all]")
@_RESULTS
@_ROUNDS
@_DOCS
def throughput(models: tuple[str, ...], targets: tuple[str, ...], docs: Path | None, **settings: Any) -> None:
    """Measure requests through the engine beside its bare steps.

    And reused prefixes, sampling, and the scheduler alone.
    """
    from benchmarks.throughput import run

    chosen = models or (() if targets else ("llama-1024x8", "resources/demo-llama"))
    _deliver(run(chosen, targets, **settings), docs)


@bench.command()
@click.option(
    "--model", "models", multiple=True, metavar="FOLDER|SHAPE", default=("llama-1024x8", "resources/demo-llama"), show_default=True,  # noqa: E501
    help="A checkpoint folder, or a shape that gets random weights; may be given several times.",
)  # fmt: skip
@click.option("--streams", type=click.IntRange(min=1), default=4, show_default=True, help="Requests at a time.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of the engine.  [default: one core is left]")
@_ROUNDS
@_DOCS
def serving(models: tuple[str, ...], streams: int, threads: int | None, rounds: int, docs: Path | None) -> None:
    """Measure the server beside the bare engine on this CPU.

    In tokens/s, and in CPU time of the API process.
    """
    import os

    from benchmarks.serving import measured

    used = threads or max(1, len(os.sched_getaffinity(0)) - 1)
    _deliver(measured(models, streams, rounds, used), docs)


@bench.command()
@click.option("--target", required=True, help="A target of a finished run, such as demo-llama/fp32/all.")
@_RESULTS
@click.option("--minutes", type=click.FloatRange(min=0.1), default=10, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--kills", is_flag=True, help="Kill the engine once a minute.")
@click.option("--kv-bytes", default="16M", show_default=True, help="The server's, so small that all of it is used.")
@_DOCS
def soak(docs: Path | None, **settings: Any) -> None:
    """Run the server for long under a mixed load whose clients leave.

    Memory, descriptors and pages are looked at all along.
    """
    from benchmarks.soak import run
    from lockstep import CheckError

    record = run(**settings)
    _deliver(record, None if record["faults"] else docs)
    if lines := record["faults"]:
        raise CheckError(f"soak: {lines[0]}{f'; {len(lines) - 1} more in `faults`' if lines[1:] else ''}")


@bench.command()
@_SHAPES
@_PRECISION
@_ROUNDS
@_DOCS
def export(shapes: tuple[str, ...], precision: str, rounds: int, docs: Path | None) -> None:
    """Measure the export of a model's shape from its config.json alone.

    In seconds, peak memory and bytes written.
    """
    from benchmarks.export import run

    _deliver(run(shapes, precision, rounds), docs)


@bench.command()
@_SHAPES
@click.option(
    "--backend", type=click.Choice(["cuda", "tensorrt_rtx"]), default="tensorrt_rtx", show_default=True, help="Which builds without a GPU."  # noqa: E501
)  # fmt: skip
@_PRECISION
@_ROUNDS
@_DOCS
def builds(shapes: tuple[str, ...], backend: str, precision: str, rounds: int, docs: Path | None) -> None:
    """Build engine sets for a model's shape, without a GPU.

    Measures seconds and bytes, and that two builds are the same bytes.
    """
    from benchmarks.builds import run

    _deliver(run(shapes, precision, backend, rounds), docs)


@bench.command()
@click.option("--cores", default="all", show_default=True, help="As Snakemake's --cores.")
@_ROUNDS
@_DOCS
def demo(cores: str, rounds: int, docs: Path | None) -> None:
    """Time the demo workflow: a full run in a new folder, and one with nothing to do."""
    from benchmarks.demo import run

    _deliver(run(cores, rounds), docs)


@bench.command()
@click.option(
    "--targets", multiple=True, type=click.IntRange(min=10), default=(100, 1000), show_default=True, help="To plan."
)
@click.option(
    "--finished", multiple=True, type=click.IntRange(min=10), default=(100, 1000), show_default=True,
    help="To plan again once they are there, and to take from the queue.",
)  # fmt: skip
@click.option(
    "--before",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    metavar="CHECKOUT",
    help="Another checkout of the repository, to be timed beside this one.",
)
@_ROUNDS
@_DOCS
def dag(
    targets: tuple[int, ...], finished: tuple[int, ...], before: Path | None, rounds: int, docs: Path | None
) -> None:
    """Many targets: planning, a run with nothing to do, the scheduler's part of a job."""
    from benchmarks.dag import run

    _deliver(run(targets, finished, rounds, before and before.absolute()), docs)


@bench.command()
@click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Scratch folder: checkpoint, environments, models (25 GB for 1.1B).",
)
@click.option(
    "--shape", default="llama-1.1b", show_default=True, help="A shape that comes with the benchmark, or a config.json."
)
@click.option("--only", multiple=True, metavar="NAME", help="A contestant; may be given several times.  [default: all]")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=2, show_default=True, help="Timed runs in each round of decoding."
)
@_CONTEXT
@click.option("--steps", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens decoded in one run.")
@_THREADS
@_DOCS
def peers(
    work: Path, shape: str, only: tuple[str, ...], threads: int | None, docs: Path | None, **settings: int
) -> None:
    """Compare with optimum, onnxruntime-genai, torch.onnx.export and transformers.

    Side by side, on one random checkpoint.
    """
    from benchmarks import peers as benchmark
    from benchmarks import peers_table
    from benchmarks.measure import thread_count

    chosen = benchmark.Settings(threads=thread_count(threads), **settings)
    record = benchmark.run(work, shape, chosen, only or tuple(benchmark.CONTESTANTS))
    for path in peers_table.write(record, docs) if docs else ():
        click.echo(path)
    if not docs:
        click.echo(peers_table.render(record), nl=False)


@bench.command()
@click.argument("types", nargs=-1, metavar="[TYPE]...")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Types tried at a time.")
@_DOCS
def models(types: tuple[str, ...], jobs: int, docs: Path | None) -> None:
    """Try which causal-LM types of transformers work, each as a tiny model.

    Each goes through all stages.  [default: all types]
    """
    from benchmarks.models import run, write_page

    record = run(types or None, jobs, lambda found: click.echo(f"{found['type']}: {found['result']}", err=True))
    _deliver(record, docs)
    if docs is not None:
        click.echo(write_page(record, docs / "models.md"))


def _settings(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """{name: value} of NAME=JSON."""
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            raise click.BadParameter(
                f"expected NAME=JSON, such as optimization_level=3 or tactics='\"record\"', found {text!r}"
            ) from None
    return found


_SETTING = click.option(
    "--option", "options", multiple=True, metavar="NAME=JSON", callback=_settings,
    help="An option of the build, such as optimization_level=3 of tensorrt; may be given several times.",
)  # fmt: skip


@bench.command()
@click.option(
    "--backend", type=click.Choice(["onnxruntime", "openvino", "tensorrt"]), default="onnxruntime", show_default=True
)
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="A fault of the table in records/faults.md; may be given several times.  [default: all]",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice(["demo", "gemma2", "window", "bias", "ranks", "adapters"]),
    help="Faults of this model alone; may be given several times.",
)
@click.option("--limit", type=click.IntRange(min=1), help="So many faults at most, taken evenly from all.")
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(["fp32", "fp16", "w8a16", "w4a16"]),
    default=("fp32", "fp16", "w8a16", "w4a16"),
    show_default=True,
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Faults tried at a time.")
@click.option(
    "--python",
    metavar="INTERPRETER",
    help="The Python that engines run in, as backends.tensorrt.python.  [default: this one]",
)
@_SETTING
@click.option(
    "--loosen",
    type=click.FloatRange(min=1),
    default=1.0,
    show_default=True,
    help="So many times the default tolerances for the gates: how much room they have.",
)
@click.option(
    "--work",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Scratch folder.  [default: the system's]",
)
@_DOCS
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="A checkpoint of Llama's kind in place of the demo's, as `make real` leaves one; takes the demo's faults.",
)
def faults(
    backend: str, only: tuple[str, ...], models: tuple[str, ...], limit: int | None, docs: Path | None, **settings: Any
) -> None:
    """Send planted faults through all gates.

    Exit code 1 where a harmful one passes them all.
    """
    from benchmarks.faults import page
    from benchmarks.faults import run as benchmark

    def keep(record: dict[str, Any]) -> None:
        if docs is not None:
            write_json(docs / "bench" / f"{record['benchmark']}.json", record)

    if settings["checkpoint"] is not None:
        models = ("demo",)
    record = benchmark.run(benchmark.choose(backend, only, limit, models), backend, progress=keep, **settings)
    _deliver(record, docs)
    if docs is not None:
        click.echo(page.write(docs))
    benchmark.check(record)


_BACKEND = click.option("--backend", type=click.Choice(["cuda", "tensorrt"]), default="cuda", show_default=True)
_PYTHON = click.option(
    "--python",
    metavar="INTERPRETER",
    help="The Python that engines run in, such as backends.tensorrt.python.  [default: this one]",
)


def _require(python: str | None, backend: str) -> None:
    """Raise InputError where engines do not run, before anything is made."""
    lockstep.ask_python(python, "benchmarks.gpu:device", backend=backend)


def _record(docs: Path | None, work: Path, name: str, backend: str) -> Path:
    """Return where a record goes; that of TensorRT is named after it."""
    own = name if backend == "cuda" else f"{name}-{backend}"
    return (docs / "gpu" if docs else work).absolute() / f"{own}.json"


_WORK = click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Scratch folder: random weights and engines (14 GB for 7B).",
)


@bench.command()
@click.option(
    "--shape",
    default="llama-2-7b",
    show_default=True,
    help="A Llama shape that comes with the benchmark, or a config.json.",
)
@_BACKEND
@_PYTHON
@_WORK
@_SETTING
@click.option(
    "--write",
    "docs",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write the record to gpu/SHAPE.json in this folder; of tensorrt to gpu/SHAPE-tensorrt.json.",
)
@_ROUNDS
def gpu(
    shape: str, backend: str, python: str | None, work: Path, options: dict[str, Any], rounds: int, docs: Path | None
) -> None:
    """Measure one GPU: build, load, decode and prefill of a Llama in fp16.

    With random weights, beside transformers; of TensorRT its builder too.
    """
    from benchmarks.export import SHAPES

    path = SHAPES / f"{shape}.json" if (SHAPES / f"{shape}.json").is_file() else Path(shape)
    config = _llama(path)
    _require(python, backend)
    graphs, out = (work / "graphs").absolute(), _record(docs, work, path.stem, backend)
    lockstep.export_config(config, "fp16", graphs)
    names = {
        "assembly": str(graphs / "assembly.json"),
        "work": str(work.absolute()),
        "out": str(out),
        "python": python,
        "transformers": sys.executable,
    }
    lockstep.run_in_python(
        python, "benchmarks.gpu:measure", **names, rounds=rounds, backend=backend, options=options, config=config
    )
    click.echo(out)


@bench.command()
@click.option("--shape", default="llama-2-7b", show_default=True, help="A shape that comes with the benchmark.")
@_BACKEND
@_PYTHON
@_WORK
@_SETTING
@click.option(
    "--vllm",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="A record of vLLM on the same machine, to be put beside.",
)
@click.option(
    "--write",
    "docs",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write gpu/batches.json and .md into this folder; of N ranks gpu/batches-N.json and .md, of tensorrt "
    "gpu/batches-tensorrt.json and .md.",
)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    help="Ranks, each on a GPU of its own: with what sums over them take.",
)
@click.option("--alike", is_flag=True, help="All layers take the first one's weights, which lie on disk once.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
def batches(
    shape: str,
    backend: str,
    python: str | None,
    work: Path,
    options: dict[str, Any],
    vllm: Path | None,
    rounds: int,
    docs: Path | None,
    tensor_parallel: int,
    alike: bool,
) -> None:
    """Measure one GPU at every batch size.

    Decoding, prompts beside it, and many requests at once. What does not fit is left out and named.
    """
    from benchmarks.batches import page
    from benchmarks.export import SHAPES

    _require(python, backend)
    graphs, name = (work / "graphs").absolute(), f"batches-{tensor_parallel}" if tensor_parallel > 1 else "batches"
    out = _record(docs, work, name, backend)
    lockstep.export_config(read_json(SHAPES / f"{shape}.json"), "fp16", graphs, tensor_parallel)
    names = {
        "assembly": str(graphs / "assembly.json"),
        "work": str(work.absolute()),
        "out": str(out),
        "python": python,
        "vllm": str(vllm.absolute()) if vllm else None,
    }
    lockstep.run_in_python(
        python, "benchmarks.batches:measure", **names, rounds=rounds, backend=backend, options=options, alike=alike
    )
    out.with_suffix(".md").write_text(page(read_json(out)), encoding="utf-8")
    click.echo(out)


@bench.command("adapters-gpu")
@click.option("--shape", default="llama-2-7b", show_default=True, help="A shape that comes with the benchmark.")
@click.option("--adapters", type=click.IntRange(1, 64), default=8, show_default=True, help="Resident together.")
@_BACKEND
@_PYTHON
@_WORK
@_SETTING
@click.option("--graphs-only", is_flag=True, help="Export into the scratch folder, and measure nothing.")
@click.option("--no-forms", is_flag=True, help="Leave out the forms of an adapter's products, of TensorRT.")
@click.option(
    "--vllm",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="A record of benchmarks/vllm_adapters.py on the same machine, to be put beside.",
)
@click.option(
    "--write",
    "docs",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write gpu/adapters.json into this folder; of tensorrt gpu/adapters-tensorrt.json.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
def adapters_gpu(
    shape: str,
    adapters: int,
    backend: str,
    python: str | None,
    work: Path,
    options: dict[str, Any],
    graphs_only: bool,
    no_forms: bool,
    vllm: Path | None,
    docs: Path | None,
    rounds: int,
) -> None:
    """Measure one GPU with adapters of rank 16 in 16 rows.

    Beside none, and beside graphs without room for any.
    """
    from benchmarks.export import SHAPES

    work, out = work.absolute(), _record(docs, work, "adapters", backend)
    config = read_json(SHAPES / f"{shape}.json")
    if not graphs_only:
        _require(python, backend)
    for folder, room in (("graphs-plain", None), ("graphs", {"max_adapters": adapters, "max_lora_rank": 16})):
        if not (work / folder / "assembly.json").is_file():
            lockstep.export_config(config, "fp16", work / folder, adapters=room)
    if graphs_only:
        click.echo(work)
        return
    names = {
        "plain": str(work / "graphs-plain" / "assembly.json"),
        "taking": str(work / "graphs" / "assembly.json"),
        "work": str(work),
        "out": str(out),
        "vllm": str(vllm.absolute()) if vllm else None,
    }
    forms = backend == "tensorrt" and not no_forms
    lockstep.run_in_python(
        python, "benchmarks.adapters_gpu:measure", **names, rounds=rounds, backend=backend, options=options, forms=forms
    )
    click.echo(out)


@bench.command()
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    default=("llama-2-7b", "llama-3-70b"),
    show_default=True,
    help="A Llama shape that comes with the benchmark, or a config.json; may be given several times.",
)
@click.option(
    "--ranks",
    "degrees",
    multiple=True,
    type=click.IntRange(1, 16),
    help="How many ranks; may be given several times.  [default: 1, 2 and 4, of the 70B shape 4; what the GPUs allow]",
)
@_BACKEND
@_PYTHON
@_WORK
@_SETTING
@click.option(
    "--write",
    "docs",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write gpu/ranks.json and gpu/ranks.md into this folder; of tensorrt gpu/ranks-tensorrt.json and .md.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
def ranks(
    shapes: tuple[str, ...],
    degrees: tuple[int, ...],
    backend: str,
    python: str | None,
    work: Path,
    options: dict[str, Any],
    docs: Path | None,
    rounds: int,
) -> None:
    """Measure several GPUs.

    Builds, readiness, decoding, prompts and logits beside transformers, with the aims beside the numbers. A run that
    was cut short goes on where it was, with the same folder.
    """
    from benchmarks import ranks as bench_ranks
    from benchmarks.export import SHAPES

    paths = [SHAPES / f"{shape}.json" if (SHAPES / f"{shape}.json").is_file() else Path(shape) for shape in shapes]
    wanted = {path: degrees or bench_ranks.RANKS.get(path.stem, (1, 2, 4)) for path in paths}
    configs = {path: _llama(path) for path in paths}
    _require(python, backend)
    most = max(max(counts) for counts in wanted.values())
    gpus = lockstep.ask_python(python, "benchmarks.ranks:count_gpus", ranks=most)
    if gpus < (least := min(min(counts) for counts in wanted.values())):
        raise InputError(
            f"ranks: expected {least} GPUs or more, for the fewest ranks that are asked for, found {gpus}; make more "
            "visible (CUDA_VISIBLE_DEVICES), or ask for fewer with --ranks"
        )
    cases: dict[str, dict[str, Any]] = {}
    for path, counts in wanted.items():
        folder = (work / path.stem).absolute()
        for count in (count for count in counts if count <= gpus):
            out, place = _record(None, folder, str(count), backend), folder / backend / str(count)
            if not out.is_file():
                lockstep.export_config(configs[path], "fp16", place / "graphs", count)
                lockstep.run_in_python(
                    python,
                    "benchmarks.ranks:measure",
                    assembly=str(place / "graphs" / "assembly.json"),
                    work=str(place),
                    weights=str(folder / "weights"),
                    out=str(out),
                    rounds=rounds,
                    backend=backend,
                    options=options,
                    python=python,
                    transformers=sys.executable,
                    config=configs[path],
                    alike=path.stem in bench_ranks.ALIKE,
                    layers=bench_ranks.CHECK_LAYERS.get(path.stem, ("all",)),
                )
            cases.setdefault(path.stem, {})[str(count)] = read_json(out)
            record = bench_ranks.record_of(cases, bool(os.environ.get(bench_ranks.ONE_GPU)))
            written = _record(docs, work, "ranks", backend)
            write_json(written, record)
            written.with_suffix(".md").write_text(bench_ranks.page(record), encoding="utf-8")
    click.echo(written)


def _llama(path: Path) -> dict[str, Any]:
    """Read the config.json of a Llama. Raises InputError for another model's."""
    config = read_json(path)
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != "llama":
        raise InputError(
            f"{path}: model_type: expected llama, which is what runs beside it in transformers, "
            f"found {kind!r}; name another shape"
        )
    return config


@bench.command("serving-gpu")
@click.option(
    "--work",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    required=True,
    help="The scratch folder of `batches`, with its engines and weights.",
)
@_BACKEND
@_PYTHON
@click.option("--kv-bytes", type=click.IntRange(min=1), help="Memory for the KV cache, where others need some too.")
@click.option(
    "--beside", multiple=True, metavar="NAME=URL", help="A server that gets the same requests, such as vLLM's."
)
@click.option("--rate", "rates", multiple=True, default=("8", "24", "inf"), show_default=True, help="Requests/s.")
@click.option("--requests", type=click.IntRange(min=1), default=200, show_default=True)
@_ROUNDS
def serving_gpu(
    work: Path,
    backend: str,
    python: str | None,
    kv_bytes: int | None,
    beside: tuple[str, ...],
    rates: tuple[str, ...],
    requests: int,
    rounds: int,
) -> None:
    """Measure the server on one GPU.

    Beside the bare engine, under Poisson arrivals, and when a long prompt comes.
    """
    from benchmarks.batches import LIMITS
    from benchmarks.serving import Place, run

    others = dict(each.partition("=")[::2] for each in beside)
    engines, assembly, weights = (
        str(work / name) for name in (f"{backend}/engines.json", "graphs/assembly.json", "weights/weights.json")
    )
    place = Place(engines, assembly, weights, LIMITS, None, python, kv_bytes)
    about = lockstep.ask_python(python, "benchmarks.gpu:described", engines=engines)
    found = run(place, (16, 64), rates, requests, rounds, True, others)
    click.echo(dump_json({"benchmark": "serving-gpu", **about, **found}), nl=False)


if __name__ == "__main__":
    bench(prog_name="python -m benchmarks")
