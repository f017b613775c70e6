"""Options of commands, as data.

A command is a module with `OPTIONS` and `main`, whose docstring is its help; `__main__` lists them. Nothing here
imports click, which the Python that TensorRT runs in may lack.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Option:
    """An option of a command, or its arguments where `flag` begins with no dash.

    kind: str, int, float, bool (a switch) or Path, of an existing file where `exists`. name: of the parameter of
    `main`; by default the flag's. many: it may be given several times, and `main` takes a tuple. parse: converts the
    value, or the tuple; raises ValueError for an invalid one.
    """

    flag: str
    help: str = ""
    default: Any = None
    kind: type = str
    name: str = ""
    many: bool = False
    minimum: float | None = None
    maximum: float | None = None
    choices: Sequence[str] = ()
    required: bool = False
    metavar: str | None = None
    exists: bool = False
    parse: Callable[[Any], Any] | None = None


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


def rounds(default: int = 5) -> Option:
    return Option("--rounds", "Rounds that count; medians are taken.", default, int, minimum=1)


def choice(flag: str, default: str, *alternatives: str, help: str = "") -> Option:
    """Return an option of one word of several."""
    return Option(flag, help, default, choices=(default, *alternatives))


def path(flag: str, help: str, **settings: Any) -> Option:
    return Option(flag, help, kind=Path, metavar=settings.pop("metavar", "FOLDER"), **settings)


def number(flag: str, default: Any, help: str = "", minimum: int = 1, **settings: Any) -> Option:
    return Option(flag, help, default, int, minimum=minimum, **settings)


WRITE = path("--write", "Write the record, and its page, into this folder, as `records` has them.")
RESULTS = path("--results", "The results tree.", default=Path("results"))
MODELS = Option(
    "--model", "A checkpoint folder, or a shape that gets random weights; may be given several times.",
    ("llama-1024x8", "resources/demo-llama"), name="models", many=True, metavar="FOLDER|SHAPE",
)  # fmt: skip
SHAPES = Option(
    "--shape", "A shape that comes with the benchmark.", ("llama-2-7b", "llama-3-70b"), name="shapes", many=True
)
SHAPE = Option("--shape", "A Llama shape that comes with the benchmark, or a config.json.", "llama-2-7b")
BATCHES = Option("--batch", "Requests at a time.", (1, 4), int, name="batches", many=True, minimum=1)
PRECISION = choice("--precision", "fp16", "fp32", "bf16")
CONTEXT = number("--context", 64, "Tokens in the cache when decoding begins.")
STEPS = number("--steps", 32, "Decode steps of a round.")
THREADS = number("--threads", None, "CPU threads.  [default: LOCKSTEP_THREADS, else all]")
CPU_TIME = Option("--cpu-time", "CPU seconds of one thread: for a machine that does other work.", False, bool)

# On a GPU.
BACKEND = choice("--backend", "cuda", "tensorrt")
WORK = path("--work", "Scratch folder: random weights and engines (14 GB for 7B).", required=True)
BUILD_OPTIONS = Option(
    "--option", "An option of the build, such as optimization_level=3 of tensorrt; may be given several times.",
    name="build_options", many=True, metavar="NAME=JSON", parse=named_json,
)  # fmt: skip
ON_A_GPU = (BACKEND, WORK, BUILD_OPTIONS, WRITE, rounds(3))
