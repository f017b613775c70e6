"""`python -m benchmarks`: the commands, each a module with its options and `main`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.options import Option
from lockstep.cli.guarded import SETTINGS, GuardedGroup

COMMANDS = (
    *("export", "models", "decode", "cpu-peers", "adapters", "throughput", "many-models"),
    *("speculation", "serving", "grammars", "soak", "certify"),
    *("gpu", "batches", "invariance", "speculation-gpu", "ranks", "serving-gpu", "families-gpu"),  # on GPUs
)


@click.group(cls=GuardedGroup, context_settings=SETTINGS)
def bench() -> None:
    """Speed, memory and coverage, measured here."""


def command(name: str, module: Any) -> click.Command:
    """Return the command of a module with `OPTIONS` and `main`."""
    parameters = [parameter(option) for option in module.OPTIONS]
    return click.Command(name, params=parameters, callback=module.main, help=module.main.__doc__)


def parameter(option: Option) -> click.Parameter:
    """Return an option in click's own terms."""
    settings: dict[str, Any] = {"type": _type(option), "default": option.default, "callback": _parsed(option.parse)}
    if not option.flag.startswith("-"):
        return click.Argument([option.flag], nargs=-1, required=False, metavar=option.metavar, type=settings["type"])
    if option.kind is bool:
        settings["is_flag"] = True
    return click.Option(
        [option.flag, *([option.name] if option.name else [])], help=option.help, multiple=option.many,
        required=option.required, metavar=option.metavar,
        show_default=option.default not in (None, (), False), **settings,
    )  # fmt: skip


def _type(option: Option) -> Any:
    if option.choices:
        return click.Choice(option.choices)
    if option.kind in (int, float):
        return {int: click.IntRange, float: click.FloatRange}[option.kind](option.minimum, option.maximum)
    if option.kind is Path:
        return click.Path(exists=option.exists, path_type=Path)
    return option.kind


def _parsed(parse: Callable[[Any], Any] | None) -> Callable[..., Any] | None:
    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        assert parse is not None
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback if parse else None


for _name in COMMANDS:
    bench.add_command(command(_name, importlib.import_module(f"benchmarks.{_name.replace('-', '_')}")))

if __name__ == "__main__":
    bench(prog_name="python -m benchmarks")
