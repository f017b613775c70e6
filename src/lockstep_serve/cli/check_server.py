"""`lockstep serve --check`: the server as its options describe it answers the golden prompts of each of its models."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.opened import used_config
from lockstep.errors import InputError
from lockstep.targets import Results
from lockstep_serve.run import listening
from lockstep_serve.service import Service

if TYPE_CHECKING:
    from lockstep.bundle.opened import Opened


def check_server(service: Service, opened_models: Sequence[Opened], results: Path) -> None:
    """Start the server, compare its answers with golden's, and end it; the models' names are those of the service.

    Raises CheckError for an answer that differs; InputError for bundles, which hold no golden check.
    """
    from lockstep.verify.served.models import GoldenAnswers, check_models  # the server itself needs no checks

    tree = Results(results)
    config = used_config(tree)
    models = []
    for served, opened in zip(service.models.values(), opened_models, strict=True):
        target = opened.target
        if opened.checkpoint is None:
            raise InputError(
                f"--check: expected targets, of whose golden checks the answers are, found a bundle of {target}"
            )
        tolerance = config.tolerance(target.model, target.precision, target.backend)
        models.append(GoldenAnswers.read(served.name, target, tree, tolerance, served.tokenizer.decode))

    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="lockstep-check-") as folder:
            socket = Path(folder, "socket")
            # A socket in a private folder: no client can reach a server that is not checked yet.
            async with listening(service, socket):
                await check_models(socket, models, service.ready.batch_invariant)

    asyncio.run(run())
    for model in models:
        click.echo(f"{model.name}: {len(model.prompts)} prompts, alone and among those of all models: golden's tokens")
