"""The command that serves what was built and checked: `lockstep serve TARGET`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.opened import runnable
from lockstep.cli.stages import RESULTS
from lockstep.errors import InputError
from lockstep.targets import MOST_RANKS

if TYPE_CHECKING:
    from lockstep.bundle.opened import Opened
    from lockstep.serve.adapter_folders import AdapterFolders

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = click.FloatRange(min=0)
_POSITIVE = click.FloatRange(min=0, min_open=True)


class _Bytes(click.ParamType):
    """A number of bytes: 1048576, 1M, 1.5GiB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(value), re.IGNORECASE | re.ASCII)
        if found is None or not (size := int(float(found[1]) * _UNITS[found[2].upper()])):
            self.fail(f"expected bytes, such as 1048576, 512M or 1.5G; found {value!r}", param, ctx)
        return size


@click.command()
@click.argument("target", required=False)
@click.option(
    "--bundle", "archive", type=click.Path(path_type=Path), help="Instead: a file that `lockstep bundle` made."
)
@click.option("--weights", type=click.Path(path_type=Path), help="For a bundle without weights: their folder.")
@click.option(
    "--python",
    metavar="INTERPRETER",
    help="The Python that the engines run in.  [default: as the config says; of a bundle, this one]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0: all.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="0: any that is free.  [default: 8000; with --unix no port at all]"
)
@click.option(
    "--unix", type=click.Path(path_type=Path), help="Serve HTTP at this Unix socket, for this user's processes only."
)
@click.option(
    "--triton-repository",
    type=click.Path(path_type=Path),
    help="A repository that `lockstep triton` wrote: its options are used instead of those here.",
)
@click.option("--until-stdin-ends", is_flag=True, help="End, as by SIGTERM, when whoever holds its stdin is gone.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), help="Serve Triton's gRPC too; 0: any.  [default: none]")
@click.option(
    "--fold-token-ids",
    is_flag=True,
    help="Triton's API: take ids beyond the vocabulary modulo its size, for benchmarks that send random ones.",
)
@click.option(
    "--allow-adapter-loading",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Let requests name folders in it as adapters, which are checked and loaded on first use.  [default: none]",
)
@click.option("--served-model-name", metavar="NAME", help="The model's name in requests.  [default: as in TARGET]")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="API keys, one a line; requests must bring one.")
@click.option(
    "--kv-bytes",
    type=_Bytes(),
    help="Memory for the KV cache, of each GPU, such as 8G.  [default: for the longest requests in all slots, at most "
    "0.9 of what is free on a GPU; a quarter of a CPU's]",
)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(1, MOST_RANKS),
    help="Ranks that the target must be split over.  [default: as it was exported]",
)
@click.option(
    "--chunk-size", type=click.IntRange(min=1), help="Long prompts are cut at multiples of it.  [default: 256]"
)
@click.option(
    "--long-prefill-token-threshold",
    type=click.IntRange(min=1),
    help="Tokens of one prompt in a step beside requests that decode, at most.  [default: a chunk on a CPU, none on a "
    "GPU]",
)
@click.option(
    "--admission",
    type=click.Choice(["guaranteed", "optimistic"]),
    default="guaranteed",
    show_default=True,
    help="optimistic: admit before all of a request's memory is sure; swap when it runs out.",
)
@click.option("--no-prefix-caching", is_flag=True, help="Compute each prompt from its start.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="CPU threads of the engine.  [default: LOCKSTEP_THREADS, else one fewer than there are]",
)
@click.option(
    "--max-queue",
    type=click.IntRange(min=0),
    default=128,
    show_default=True,
    help="Requests that may wait for a slot; more get 429.",
)
@click.option(
    "--max-queue-tokens",
    type=click.IntRange(min=1),
    default=1 << 20,
    show_default=True,
    help="Tokens of their prompts.",
)
@click.option("--queue-timeout", type=_POSITIVE, default=60.0, show_default=True, help="Seconds that one may wait.")
@click.option(
    "--slow-reader", type=_POSITIVE, default=60.0, show_default=True, help="Seconds that a client may not read."
)
@click.option(
    "--grammar-timeout",
    type=_POSITIVE,
    default=5.0,
    show_default=True,
    help="Seconds that a grammar may take to compile.",
)
@click.option("--max-body", type=_Bytes(), default="4M", show_default=True, help="Largest body of a request.")
@click.option("--body-timeout", type=_POSITIVE, default=30.0, show_default=True, help="Seconds that one may take.")
@click.option(
    "--drain",
    type=_SECONDS,
    default=30.0,
    show_default=True,
    help="Seconds for running requests to finish after SIGTERM.",
)
@click.option(
    "--stall",
    type=_POSITIVE,
    default=60.0,
    show_default=True,
    help="Seconds without a sign of life after which the engine is started anew.",
)
@click.option(
    "--metrics-prefix",
    default="lockstep",
    show_default=True,
    help="Of the series at /metrics; vllm: for dashboards that ask for its names.",
)
@click.option("--request-log", type=click.Path(path_type=Path), help="A JSON line for each request; -: stderr.")
@RESULTS
def serve(target: str | None, archive: Path | None, weights: Path | None, results: Path, **given: Any) -> None:
    """Serve a target, such as demo-llama/fp16/all, or a bundle, over HTTP: OpenAI's API, Triton's, health, metrics,
    a web page; and Triton's over gRPC.

    Prints one line when it is ready and warm. SIGTERM or Ctrl-C: takes nothing new, finishes what runs, ends."""
    with runnable("serve", "TARGET", target, archive, weights, results) as found:
        _serve(found, given)


def _check_ranks(place: Opened, asked: int | None) -> None:
    """Raise InputError where another degree is asked for than that of the graphs."""
    from lockstep.artifacts.assembly import Assembly

    ranks = Assembly.load(place.assembly).tensor_parallel
    degree = 1 if ranks is None else ranks.degree
    if asked not in (None, degree):
        raise InputError(
            f"--tensor-parallel: expected {degree}, for {place.target} was exported for so many, found {asked}; set "
            f"tensor_parallel: {asked} for {place.target.model} in the config and run snakemake"
        )


def _serve(found: Any, given: dict[str, Any]) -> None:
    try:
        from lockstep.serve.bodies import Access
        from lockstep.serve.request_log import RequestLog
        from lockstep.serve.run import Address, serve
        from lockstep.serve.service import Service, ServiceLimits
        from lockstep.serve.triton_infer import Triton

        if given["grpc_port"] is not None:
            import lockstep.serve.grpc_server  # noqa: F401
    except ModuleNotFoundError as error:
        extra = "grpc" if (error.name or "").partition(".")[0] in ("grpc", "google") else "serve"
        raise InputError(
            f"serve: needs the Python package {error.name!r}, which is not installed here; install lockstep[{extra}]"
        ) from None
    from lockstep.artifacts.chat_template import ChatTemplate
    from lockstep.runtime.tokenizer import Tokenizer

    if given["triton_repository"] is not None:
        from lockstep.serve.triton_repository.options import serve_options

        given = {**given, **serve_options(given["triton_repository"])}
    place = found.place
    _check_ranks(place, given["tensor_parallel"])
    keys = _keys(given["api_key_file"])
    prefix = given["metrics_prefix"]
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix):
        raise InputError(f"--metrics-prefix: expected letters, digits and _, found {prefix!r}")
    asked = {
        "engines": str(place.engines),
        "assembly": str(place.assembly),
        "weights": str(place.weights),
        "adapters": None if place.adapters is None else str(place.adapters),
        "layers": place.target.layers,
        "limits": asdict(place.limits),
        "threads": given["threads"] or _threads(),
        "kv_bytes": given["kv_bytes"],
        "chunk_size": given["chunk_size"],
        "long_prefill_token_threshold": given["long_prefill_token_threshold"],
        "prefix_caching": not given["no_prefix_caching"],
        "admission": given["admission"],
        "grammar_seconds": given["grammar_timeout"],
        "checkpoint": None if place.checkpoint is None else str(place.checkpoint),
    }
    folders = _adapter_folders(place, given["allow_adapter_loading"])
    limits = ServiceLimits(
        max_queue=given["max_queue"],
        max_queue_tokens=given["max_queue_tokens"],
        queue_timeout=given["queue_timeout"],
        stall=given["stall"],
        slow_reader=given["slow_reader"],
    )
    name = given["served_model_name"] or place.target.model
    template = ChatTemplate.open(place.assembly)
    log = None if given["request_log"] is None else RequestLog(given["request_log"], name)
    python = given["python"] or found.python
    tokenizer = Tokenizer.open(place.assembly)
    service = Service(name, tokenizer, python, asked, limits, prefix, template, request_log=log, folders=folders)
    if given["until_stdin_ends"]:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    address = Address(given["host"], 8000 if given["port"] is None and given["unix"] is None else given["port"])
    access = Access(tuple(keys), given["max_body"], given["body_timeout"])
    triton = Triton(service, given["fold_token_ids"])
    with contextlib.closing(log) if log else contextlib.nullcontext():
        serve(service, address, access, given["drain"], click.echo, given["grpc_port"], triton, given["unix"])


def _adapter_folders(place: Opened, root: Path | None) -> AdapterFolders | None:
    """What `--allow-adapter-loading` allows. Raises InputError for a model that cannot take adapters."""
    from lockstep.artifacts.assembly import Assembly
    from lockstep.serve.adapter_folders import AdapterFolders

    if root is None:
        return None
    if Assembly.load(place.assembly).adapters is None:
        raise InputError(
            "--allow-adapter-loading: expected a model whose graphs take adapters, found one without; give "
            f"{place.target.model} `adapters` in the config and run snakemake"
        )
    if place.checkpoint is None:
        raise InputError(
            "--allow-adapter-loading: expected a target, whose checkpoint adapters are checked against, found a bundle"
        )
    return AdapterFolders(root)


def _end_with_stdin() -> None:
    while os.read(0, 1 << 12):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _threads() -> int | None:
    """One core is the API process's: with a thread on each, an engine's spinning threads starve it. None where the
    environment says how many."""
    if os.environ.get("LOCKSTEP_THREADS"):
        return None
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        keys = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a file of API keys, found none that can be read: {error}") from None
    if not keys:
        raise InputError(f"{path}: expected API keys, one a line, found none")
    return keys
