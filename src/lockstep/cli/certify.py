"""The command that judges an endpoint: `lockstep certify URL`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from lockstep import processes
from lockstep.cli.options import AT_LEAST_1, FILE, JSON, PATH
from lockstep.cli.terminal import echo_json
from lockstep.errors import InputError


@click.command()
@click.argument("url")
@click.option("--model", required=True, help="The name that the endpoint has for the model.")
@click.option("--golden", type=PATH, help="Golden's reference: results/MODEL/reference.")
@click.option(
    "--checkpoint",
    metavar="FOLDER|hf:ORG/NAME|MODEL.gguf",
    help="Instead of --golden: make the reference of this checkpoint first, by the workflow, in certify-NAME.",
)
@click.option("--requests", type=AT_LEAST_1, default=300, show_default=True, help="Requests to send at most.")
@click.option("--rate", type=click.FloatRange(min=0), default=0.0, help="Requests a second at most.  [default: any]")
@click.option(
    "--timeout", type=click.FloatRange(min=0.1), default=60.0, show_default=True, help="Seconds of a request."
)
@click.option("--key-env", default="OPENAI_API_KEY", show_default=True, help="The variable that holds the key, if set.")
@click.option("--no-company", is_flag=True, help="Send one request at a time.")
@click.option("--out", type=FILE, help="Write the certificate, as JSON.")
@click.option("--page", type=FILE, help="Write its page, with plots.")
@click.option("--sign-key", type=FILE, help="Sign a statement of it with this private key.")
@JSON
def certify(
    url: str,
    model: str,
    golden: Path | None,
    checkpoint: str | None,
    requests: int,
    rate: float,
    timeout: float,
    key_env: str,
    no_company: bool,
    out: Path | None,
    page: Path | None,
    sign_key: Path | None,
    as_json: bool,
) -> None:
    """Tell whether an endpoint serves the model that it says.

    URL ends in /v1. Exit code 0: as published; 1: it differs, or is undecided.
    """
    from lockstep.certify.client import Endpoint
    from lockstep.certify.run import certify as judge

    if sign_key is not None and out is None:
        raise InputError("--sign-key: expected a certificate to sign, found none; name its file by --out")
    endpoint = Endpoint(url, model, os.environ.get(key_env) or None, timeout, rate, requests)
    if golden is not None and checkpoint is None:
        hypotheses = _hypotheses(golden)
    elif checkpoint is not None and golden is None:
        hypotheses = _run_workflow(checkpoint)
    else:
        raise InputError("certify: expected --golden or --checkpoint, found both or none; name one of them")
    certificate = judge(endpoint, hypotheses, not no_company)
    if out is not None:
        certificate.save(out)
        if sign_key is not None:
            from lockstep.publish.certificates import sign

            sign(out, sign_key)
    if page is not None:
        from lockstep.artifacts.files import write_bytes
        from lockstep.report import pages

        write_bytes(page, pages.certificate(page, certificate))
    if as_json:
        echo_json(certificate.to_json())
    else:
        for name, value in sorted(certificate.log_likelihoods.items(), key=lambda item: -item[1]):
            power = certificate.power.get(name)
            words = "" if power is None else f"  power {power:.0%}"
            click.echo(f"{name:<34} log-likelihood {value:10.1f}{words}")
        for note in certificate.skipped:
            click.echo(note, err=True)
    # Last, because it raises unless the verdict is "as published", and the files are written for a bad verdict too.
    certificate.check()
    # With --json, stdout holds one document only.
    click.echo(certificate.line, err=as_json)


def _run_workflow(checkpoint: str) -> Path:
    """Return the path of a checkpoint's hypotheses, which the workflow makes or brings up to date."""
    from lockstep.config.first import name_of
    from lockstep.config.sources import HubSource, parse_source, resolve_here

    try:
        source = parse_source(checkpoint)
        if not isinstance(source, HubSource):
            checkpoint = str(resolve_here(source).absolute())
    except InputError as error:
        raise InputError(f"--checkpoint: {error}") from None
    name = name_of(checkpoint)
    # A folder of its own: results of this one may be of another config.
    folder = Path(f"certify-{name}")
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise InputError(f"{folder}: expected a folder for the reference, found a file; move it away") from None
    config = f"{name}.yaml"
    (folder / config).unlink(missing_ok=True)
    path = Path("results", name, "hypotheses", "all.json")
    for command in (["init", checkpoint, "--out", config], ["run", config, str(path)]):
        process = processes.run(
            [sys.executable, "-P", "-m", "lockstep", *command], cwd=folder, stdout=subprocess.DEVNULL
        )
        if process.returncode:
            raise click.exceptions.Exit(process.returncode)
    return folder / path


def _hypotheses(golden: Path) -> Path:
    """Return the path of a reference's hypotheses; make those that are absent or of another reference."""
    from lockstep.artifacts.certificate import Hypotheses
    from lockstep.artifacts.files import sha256_file

    reference = golden / "all.json" if golden.is_dir() else golden
    if not reference.is_file():
        raise InputError(
            f"{reference}: expected golden's reference, found none; run `lockstep run`, or correct --golden"
        )
    model = reference.parent.parent
    path = model / "hypotheses" / reference.name
    # Reuse those of a run: computing them takes the checkpoint, torch and minutes.
    if path.is_file() and Hypotheses.load(path).reference == sha256_file(reference):
        return path
    checkpoint = model / "checkpoint.json"
    if not checkpoint.is_file():
        raise InputError(
            f"{checkpoint}: expected the checkpoint of {reference}, found none; use --checkpoint instead of --golden"
        )
    from lockstep.certify.tables import make_hypotheses

    path.parent.mkdir(exist_ok=True)
    return make_hypotheses(checkpoint, reference, path)
