"""The command that measures a server: `lockstep load URL`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.load_options import load_spec
from lockstep.cli.options import AT_LEAST_0, AT_LEAST_1, FOLDER, JSON, PATH
from lockstep.cli.terminal import echo_json
from lockstep.errors import CheckError, InputError

if TYPE_CHECKING:
    from lockstep.load.measure import LoadSpec
    from lockstep.load.records import Record
    from lockstep.load.report import LoadReport

_LATE = 0.005  # seconds: a quarter of a decode step's usual 20 ms


class _Rates(click.ParamType):
    """A parameter type: requests per second, several by commas. -1 and inf are all at once."""

    name = "rates"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            rates = tuple(math.inf if float(part) == -1 else float(part) for part in str(value).split(","))
        except ValueError:
            rates = ()
        if not rates or not all(rate > 0 for rate in rates) or len(set(rates)) < len(rates):
            self.fail(f"expected different numbers above 0, such as 2,4,8 or inf; found {value!r}", param, ctx)
        return rates


@click.command(context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
@click.argument("url")
@click.argument("workload", required=False, metavar="[WORKLOAD]")
@click.option("--dataset", type=PATH, help="Prompts from a file: JSON, or JSON lines.")
@click.option(
    "--token-norm-dist", metavar="IN,SD,OUT,SD", help="Or drawn: mean and deviation of prompt and answer, tokens."
)
@click.option("--histogram", type=PATH, help="Or drawn with lengths from a file of histograms.")
@click.option("--histogram-key", help="Which of them: KEY_ip and KEY_op.  [default: input and output]")
@click.option("--trace", type=PATH, help="Or requests with their times: JSON lines.")
@click.option("--input-mean", type=float, help="--token-norm-dist in four options.")
@click.option("--input-stdev", type=float, default=0.0)
@click.option("--output-mean", type=float)
@click.option("--output-stdev", type=float, default=0.0)
@click.option("--tokenizer-dir", type=PATH, help="Send texts as token ids: a folder with tokenizer.json.")
@click.option(
    "--tokenizer-type", type=click.Choice(["auto", "llama", "t5"]), hidden=True, help="tokenizer.json says it."
)
@click.option("--max-input-len", type=AT_LEAST_1, help="Leave out prompts of more token ids.")
@click.option("--protocol", "-i", type=click.Choice(["http", "grpc"]), default="http", help="grpc: Triton's.")
@click.option("--requests", "--num-requests", type=AT_LEAST_1, help="How many.  [default: 100, or all of a file]")
@click.option(
    "--rate",
    "--request-rate",
    type=_Rates(),
    default="inf",
    show_default="all at once",
    help="Requests/s, a run each: 2,4,8.",
)
@click.option("--arrivals", "--time-delay-dist", default="exponential", help="Or constant.")
@click.option("--seed", type=AT_LEAST_0, default=0)
@click.option("--concurrency", "-c", type=AT_LEAST_1, help="Most requests in flight.  [default: no limit]")
@click.option("--cancel", type=float, default=0.0, help="Cancel this share of the requests, such as 0.1.")
@click.option(
    "--cancel-within", type=click.FloatRange(min=0), default=1.0, help="At most so many seconds after they were sent."
)
@click.option(
    "--endpoint", type=click.Choice(["completions", "chat", "triton"]), help="[default: completions; triton over gRPC]"
)
@click.option("--model", help="As the server calls it.  [default: its first; Triton's by the prompt]")
@click.option("--max-tokens", type=AT_LEAST_1, default=64, help="Where the file says none.")
@click.option("--body", metavar="JSON", help='Fields for each request, such as \'{"temperature": 0.8, "seed": 1}\'.')
@click.option(
    "--goodput",
    default="",
    show_default=False,
    metavar="LIMITS",
    help="Count requests within ttft:500,tpot:30,e2el:5000 (ms).",
)
@click.option("--warmup", type=AT_LEAST_0, default=1, help="Requests before each run.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=600.0, help="Seconds for a request.")
@click.option("--api-key-file", type=PATH, help="A file with the API key.")
@click.option("--functional", is_flag=True, help="Check the answers instead: alone, streamed, all at once.")
@click.option("--exact", is_flag=True, help="With --functional: the same texts among the others as alone.")
@click.option("--out", type=FOLDER, help="A folder for load.json, requests.jsonl and plots.")
@click.option("--check", type=PATH, help="Exit code 1 where a figure is worse than in this load.json.")
@click.option("--rtol", type=click.FloatRange(min=0), default=0.1, help="With --check: by more than this share.")
@JSON
def load(url: str, workload: str | None, as_json: bool, **given: Any) -> None:
    """Measure a server that speaks OpenAI's API, or Triton's.

    Times count from when each request was due, not from when it could be sent. WORKLOAD is one of dataset,
    token-norm-dist, token-from-histogram, trace; it may be left out."""
    import asyncio

    from lockstep.load.http import Client
    from lockstep.load.report import LoadReport, table, worse

    options = SimpleNamespace(**given)
    spec = load_spec(workload, options)
    base = LoadReport.load(options.check) if options.check else None
    client = Client(url, _api_key(options.api_key_file))
    _allow_connections(spec.concurrency or len(spec.prompts))
    if options.functional:
        found = asyncio.run(_functional(client, spec, options.model, options.exact))
        if as_json:
            return echo_json({"prompts": found.prompts, "different": found.different})
        different = f"{len(found.different)} of them with another text among the others than alone"
        return click.echo(f"{found.prompts} prompts answered, alone, streamed and all at once; {different}")
    report, records = asyncio.run(_measured(client, spec, options.model))
    if as_json:
        echo_json(report.to_json())
    else:
        click.echo(table(report.runs))
    if options.out:
        _write(options.out, report, records)
    _warn(report)
    if base and (lines := worse(report, base, options.rtol)):
        for line in lines[1:]:
            click.echo(line, err=True)
        raise CheckError(f"{options.check}: {lines[0]}{f'; {len(lines) - 1} more stand above' if lines[1:] else ''}")
    if failed := [each for run in records.values() for each in run if each.status == "failed"]:
        raise CheckError(f"{url}: {len(failed)} requests failed, the first, {failed[0].number}: {failed[0].error}")


def _allow_connections(number: int) -> None:
    """Raise this process's limit of open files to that many connections.

    As far as the hard limit allows: each connection is an open file.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + 64 if hard == resource.RLIM_INFINITY else min(number + 64, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _functional(client: Any, spec: LoadSpec, model: str | None, exact: bool) -> Any:
    from lockstep.load.functional import check
    from lockstep.load.measure import model_of

    async with client:
        return await check(client, spec, await model_of(client, spec, model), exact)


async def _measured(
    client: Any, spec: LoadSpec, model: str | None
) -> tuple[LoadReport, dict[float | None, list[Record]]]:
    from lockstep.load.measure import measure

    async with client:
        return await measure(client, spec, model, lambda line: click.echo(line, err=True))


def _api_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a file with an API key, found none that can be read: {error}") from None


def _write(folder: Path, report: LoadReport, records: dict[float | None, list[Record]]) -> None:
    from lockstep.artifacts.files import write_bytes
    from lockstep.load import plots

    report.save(folder / "load.json")
    lines = [json.dumps({"rate": rate, **record.to_json()}) for rate, run in records.items() for record in run]
    write_bytes(folder / "requests.jsonl", "".join(f"{line}\n" for line in lines).encode())
    drawn = {"timeline": plots.timeline(next(reversed(records.values())))}
    if any(run.rate is not None for run in report.runs):
        drawn |= {"latency": plots.latency(report.runs), "throughput": plots.throughput(report.runs)}
    for name, chart in drawn.items():
        write_bytes(folder / f"{name}.svg", chart.encode())


def _warn(report: LoadReport) -> None:
    """Warn where this program itself was late, since the figures include that."""
    from lockstep.load.report import name

    for run in report.runs:
        if (lag := run.figures["client_lag_p99_s"] or 0.0) > _LATE:
            click.echo(
                f"load: {name(run.rate)}: this program itself was {1000 * lag:.0f} ms late (p99), which the times "
                f"above hold too; give it a core of its own",
                err=True,
            )
