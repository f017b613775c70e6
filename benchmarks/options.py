"""Options of commands: a command is a module with `OPTIONS` and `main`, whose docstring is its help."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click


def option(
    flag: str,
    help: str = "",
    default: Any = None,
    kind: type = str,
    name: str = "",
    many: bool = False,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    metavar: str | None = None,
    exists: bool = False,
    parse: Callable[[Any], Any] | None = None,
    required: bool = False,
) -> click.Parameter:
    """Return an option of a command, or its arguments where `flag` begins with no dash.

    kind: str, int, float, bool (a switch) or Path, of an existing file where `exists`. name: of the parameter of
    `main`; by default the flag's. many: it may be given several times, and `main` takes a tuple. parse: converts the
    value, or the tuple; raises ValueError for an invalid one.
    """
    value_type: Any = kind
    if choices:
        value_type = click.Choice(choices)
    elif kind is int:
        value_type = click.IntRange(minimum, maximum)
    elif kind is float:
        value_type = click.FloatRange(minimum, maximum)
    elif kind is Path:
        value_type = click.Path(exists=exists, path_type=Path)
    if not flag.startswith("-"):
        return click.Argument([flag], nargs=-1, metavar=metavar, type=value_type)
    settings: dict[str, Any] = {}
    if kind is bool:
        settings["is_flag"] = True
    if parse is not None:
        settings["callback"] = _callback(parse)
    return click.Option(
        [flag, *([name] if name else [])],
        type=value_type,
        default=default,
        help=help,
        multiple=many,
        required=required,
        metavar=metavar,
        show_default=default not in (None, (), False),
        **settings,
    )


def _callback(parse: Callable[[Any], Any]) -> Callable[..., Any]:
    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def named_json(texts: Sequence[str]) -> dict[str, Any]:
    """{name: value} of NAME=JSON."""
    values = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(
                f"expected NAME=JSON, such as optimization_level=3 or tactics='\"record\"', found {text!r}"
            ) from None
    return values


def rounds(default: int = 5) -> click.Parameter:
    return option("--rounds", "Rounds that count; medians are taken.", default, int, minimum=1)


def choice(flag: str, default: str, *alternatives: str, help: str = "") -> click.Parameter:
    """Return an option of one word of several."""
    return option(flag, help, default, choices=(default, *alternatives))


def path(flag: str, help: str, **settings: Any) -> click.Parameter:
    return option(flag, help, kind=Path, metavar=settings.pop("metavar", "FOLDER"), **settings)


def number(flag: str, default: Any, help: str = "", minimum: int = 1, **settings: Any) -> click.Parameter:
    return option(flag, help, default, int, minimum=minimum, **settings)


WRITE = path("--write", "Write the record, and its page, into this folder, as `records` has them.")
RESULTS = path("--results", "The results tree.", default=Path("results"))
DEFAULT_MODELS = ("llama-1024x8", "resources/demo-llama")
MODEL_HELP = "A checkpoint folder, or a shape that gets random weights; may be given several times."
MODELS = option("--model", MODEL_HELP, DEFAULT_MODELS, name="models", many=True, metavar="FOLDER|SHAPE")
SHAPE = option("--shape", "A Llama shape that comes with the benchmark, or a config.json.", "llama-2-7b")
CONTEXT = number("--context", 64, "Tokens in the cache when decoding begins.")
STEPS = number("--steps", 32, "Decode steps of a round.")
THREADS = number("--threads", None, "CPU threads.  [default: LOCKSTEP_THREADS, else all]")

# On a GPU.
BACKEND = choice("--backend", "cuda", "tensorrt")
WORK = path("--work", "Scratch folder: random weights and engines (14 GB for 7B).", required=True)
BUILD_OPTIONS = option(
    "--option", "An option of the build, such as optimization_level=3 of tensorrt; may be given several times.",
    name="build_options", many=True, metavar="NAME=JSON", parse=named_json,
)  # fmt: skip
ON_A_GPU = (BACKEND, WORK, BUILD_OPTIONS, WRITE, rounds(3))
