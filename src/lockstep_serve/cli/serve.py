"""The command that serves a target or bundle: `lockstep serve TARGET`."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from signal import SIGINT
from types import SimpleNamespace
from typing import Any

import click

from lockstep.cli.guarded import GroupedCommand
from lockstep.cli.opened import BUNDLE_SUFFIX, SPECULATIVE, complete_target, runnable, speculative
from lockstep.cli.options import AT_LEAST_0, AT_LEAST_1, PATH, RESULTS
from lockstep.errors import PREFIX, Ended
from lockstep.targets import MAX_RANKS
from lockstep_serve.cli.serve_options import run_server
from lockstep_serve.protocols import ProtocolPlugin, protocol_plugins
from lockstep_serve.settings import EngineOptions, ServiceLimits

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}  # of 1,024, with or without the "i" of GiB


class _Seconds(click.FloatRange):
    """A finite number of seconds in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        # click's range lets "inf" and "nan" pass.
        if not math.isfinite(seconds):
            self.fail(f"expected a finite number of seconds, found {value}", param, ctx)
        return seconds


_SECONDS = _Seconds(min=0)
_POSITIVE = _Seconds(min=0, min_open=True)


class _Bytes(click.ParamType):
    """A parameter type: a number of bytes, such as 1048576, 1M or 1.5GiB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(value), re.IGNORECASE | re.ASCII)
        if match is None or not (size := int(float(match[1]) * _UNITS[match[2].upper()])):
            self.fail(f"expected bytes, such as 1048576, 512M or 1.5G; found {value!r}", param, ctx)
        return size


def _option_names(plugin: ProtocolPlugin) -> str:
    return " ".join(option.opts[0][2:] for option in plugin.options)


class _Serve(GroupedCommand):
    groups = {
        "Where it listens": "host port unix api-key-file until-stdin-ends",
        "Sizes and scheduling": "max-model-len max-num-seqs kv-bytes chunk-size long-prefill-token-threshold admission "
        "no-prefix-caching threads speculative tensor-parallel max-loaded-models",
        "What requests may do": "served-model-name models allow-adapter-loading allow-weight-updates tool-call-parser "
        "reasoning-parser max-queue max-queue-tokens queue-timeout grammar-timeout max-body body-timeout slow-reader",
        "Operation": "check drain stall metrics-prefix log-level request-log otlp-traces-endpoint",
        **{plugin.title: _option_names(plugin) for plugin in protocol_plugins()},
    }


@click.command(cls=_Serve)
@click.argument("targets", metavar="TARGET|BUNDLE.tar...", nargs=-1, shell_complete=complete_target)
@click.option(
    "--models",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Serve the bundles in it, too.  [default: none]",
)
@click.option("--weights", type=PATH, help="For a bundle without weights: their folder.")
@click.option("--host", default="127.0.0.1", help="Address to listen at; 0.0.0.0: all.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="0: any that is free.  [default: 8000; with --unix no port at all]"
)
@click.option("--unix", type=PATH, help="Serve HTTP at this Unix socket, for processes of this user only.")
@click.option("--until-stdin-ends", is_flag=True, help="Shut down, as by SIGTERM, when stdin is closed.")
@click.option(
    "--allow-adapter-loading",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Let requests name folders in it as adapters, which are checked and loaded on first use.  [default: none]",
)
@click.option(
    "--allow-weight-updates",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Let POST /update_weights replace the weights by those of a folder in it, unchecked.  [default: none]",
)
@click.option(
    "--served-model-name",
    "served_model_names",
    metavar="NAME",
    multiple=True,
    help="The model's name in requests; of several models, once for each.  [default: as in TARGET]",
)
@click.option(
    "--max-loaded-models",
    type=AT_LEAST_1,
    help="Models whose weights are in memory at a time; the least recently used one makes room.  [default: all]",
)
@click.option(
    "--api-key-file", type=PATH, help="API keys, one per line, each with the models it opens or none for all."
)
@click.option(
    "--max-model-len",
    type=click.IntRange(min=2),
    help="Tokens of a request, prompt and answer.  [default: limits.max_seq_len, to which the target is checked]",
)
@click.option("--max-num-seqs", type=AT_LEAST_1, help="Requests that run at a time.  [default: limits.max_batch_size]")
@click.option(
    "--kv-bytes",
    type=_Bytes(),
    help="Memory for the KV cache, of each GPU, such as 8G.  [default: for the longest requests in all slots, at most "
    "0.9 of the free memory of a GPU; a quarter of a CPU's]",
)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(1, MAX_RANKS),
    help="Ranks that the target must be split over.  [default: as it was exported]",
)
@click.option(
    "--chunk-size",
    type=AT_LEAST_1,
    help="Long prompts are cut at multiples of it.  [default: 256 with onnxruntime, 64 on a GPU]",
)
@click.option(
    "--long-prefill-token-threshold",
    type=AT_LEAST_1,
    help="Tokens of one prompt in a step with requests that decode, at most.  [default: a chunk on a CPU, none on a "
    "GPU]",
)
@click.option(
    "--admission",
    type=click.Choice(["guaranteed", "optimistic"]),
    default="guaranteed",
    help="optimistic: admit before all of a request's memory is sure; swap when it runs out.",
)
@click.option("--no-prefix-caching", is_flag=True, help="Compute each prompt from its start.")
@click.option(
    "--threads",
    type=AT_LEAST_1,
    help="CPU threads of the engine.  [default: LOCKSTEP_THREADS, else one fewer than there are]",
)
@SPECULATIVE
@click.option(
    "--max-queue",
    type=AT_LEAST_0,
    default=ServiceLimits.max_queue,
    help="Requests that may wait for a slot; more get 429.",
)
@click.option(
    "--max-queue-tokens", type=AT_LEAST_1, default=ServiceLimits.max_queue_tokens, help="Tokens of their prompts."
)
@click.option(
    "--queue-timeout",
    type=_POSITIVE,
    default=ServiceLimits.queue_timeout,
    help="Seconds in the queue, after which a request gets 503.",
)
@click.option(
    "--slow-reader",
    type=_POSITIVE,
    default=ServiceLimits.slow_reader,
    help="Seconds after which a client that does not read its answer is disconnected.",
)
@click.option(
    "--grammar-timeout",
    type=_POSITIVE,
    default=EngineOptions.grammar_seconds,
    help="CPU seconds for compiling a grammar.",
)
@click.option(
    "--tool-call-parser",
    metavar="NAME",
    help="How the model writes tool calls; json: plain JSON, none: no tools.  [default: as its chat template tells]",
)
@click.option(
    "--reasoning-parser",
    metavar="NAME",
    help="How the model marks its reasoning; none: it stays in the content.  [default: as its chat template tells]",
)
@click.option("--max-body", type=_Bytes(), default="4M", help="Largest body of a request.")
@click.option("--body-timeout", type=_POSITIVE, default=30.0, help="Seconds for receiving a body.")
@click.option(
    "--check",
    is_flag=True,
    help="Compare the answers to each model's golden prompts with those of the golden check, and end.",
)
@click.option("--drain", type=_SECONDS, default=30.0, help="Seconds for running requests to finish after SIGTERM.")
@click.option(
    "--stall",
    type=_POSITIVE,
    default=ServiceLimits.stall,
    help="Seconds after which an engine that does not respond is restarted.",
)
@click.option(
    "--metrics-prefix",
    default="lockstep",
    help="Prefix of the series at /metrics; vllm: for dashboards that use vLLM's names.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="Level of the lines on stderr; debug: also lines of each request in the engine, by its id.",
)
@click.option("--request-log", type=PATH, help="A JSON line for each request; -: stderr.")
@click.option(
    "--otlp-traces-endpoint",
    metavar="URL",
    envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
    help="Send OpenTelemetry traces there, such as to http://localhost:4318, a span for each request.  [default: "
    "OTEL_EXPORTER_OTLP_ENDPOINT, else nowhere]",
)
@RESULTS
def serve(
    targets: tuple[str, ...],
    models: Path | None,
    weights: Path | None,
    results: Path,
    drafts: str | None,
    **options: Any,
) -> None:
    """Serve a target, such as demo-llama/fp16, or a bundle.

    Or several that share their engines. OpenAI's and Triton's APIs, health, metrics and a web page over HTTP; Triton's
    over gRPC, too.

    Prints one line when it is ready. SIGTERM or Ctrl-C: takes nothing new, finishes what runs, ends.
    """
    names = list(targets)
    if models is not None:
        names += map(str, sorted(models.glob(f"*{BUNDLE_SUFFIX}")))
    if not names:
        raise click.UsageError("expected a target or a bundle, found none; name one, or a folder of bundles (--models)")
    try:
        with contextlib.ExitStack() as stack:
            opened_models = [stack.enter_context(runnable(name, weights, results)) for name in names]
            drafting = speculative(drafts, results)
            run_server(opened_models, SimpleNamespace(**options, results=results, speculative=drafting))
    # A server that is ready handles signals itself.
    except KeyboardInterrupt as error:
        event = "interrupted"
        number = SIGINT.value
        if isinstance(error, Ended):
            event = f"ended by {error}"
            number = error.number
        click.echo(f"{PREFIX}{event} before the server was ready", err=True)
        raise SystemExit(128 + number) from None


# Plug-ins' options are not known when the command is defined; click reads them from this list.
for _plugin in protocol_plugins():
    serve.params += _plugin.options
