"""The `lockstep` command. Its subcommands import inside, so that `--help` does not load all their libraries."""

from __future__ import annotations

import click

from lockstep import __version__
from lockstep.cli.bisect import bisect
from lockstep.cli.bundle import bundle
from lockstep.cli.certify import certify
from lockstep.cli.doctor import doctor
from lockstep.cli.generate import generate
from lockstep.cli.guarded import SETTINGS, GuardedGroup
from lockstep.cli.init import init
from lockstep.cli.locks import lock, verify
from lockstep.cli.publish import pull, push, sbom
from lockstep.cli.report import report, summary
from lockstep.cli.reproduce import explain, reproduce
from lockstep.cli.run import run
from lockstep.cli.targets import targets
from lockstep.plugins import entry_points


@click.group(cls=GuardedGroup, context_settings=SETTINGS)
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Build, check and serve inference engines of Hugging Face checkpoints.

    The engines can be built again, and compared down to the bytes.
    """


# Of other packages: serve and triton.
_REGISTERED = [entry.load() for entry in entry_points("commands").values()]

for _title, _commands in {
    "From a checkpoint to engines": (doctor, init, run),
    "Run engines": (generate, bundle, *_REGISTERED),
    "Look at results": (summary, report, targets, explain, bisect, certify),
    "Publish": (push, pull, sbom),
    "Lock, compare, build again": (lock, verify, reproduce),
}.items():
    main.add_section(_title, _commands)
