"""`python -m benchmarks`: the commands, each a module with its options and `main`."""

from __future__ import annotations

import importlib
from typing import Any

import click

from lockstep.cli.guarded import SETTINGS, GuardedGroup

COMMANDS = (
    *("models", "cpu-peers", "throughput", "many-models", "serving", "soak", "certify"),
    *("gpu", "batches", "invariance", "serving-gpu", "families-gpu"),  # on GPUs
)


@click.group(cls=GuardedGroup, context_settings=SETTINGS)
def bench() -> None:
    """Speed, memory and coverage, measured here."""


def command(name: str, module: Any) -> click.Command:
    """Return the command of a module with `OPTIONS` and `main`."""
    return click.Command(name, params=list(module.OPTIONS), callback=module.main, help=module.main.__doc__)


for _name in COMMANDS:
    bench.add_command(command(_name, importlib.import_module(f"benchmarks.{_name.replace('-', '_')}")))

if __name__ == "__main__":
    bench(prog_name="python -m benchmarks")
