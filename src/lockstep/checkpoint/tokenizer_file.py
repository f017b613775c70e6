"""Check that a tokenizer.json is a tokenizer, in another process, which can be killed."""

from __future__ import annotations

import json
import resource
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lockstep import processes
from lockstep.checkpoint import probe
from lockstep.checkpoint.source_files import present, read_source_json, shorten
from lockstep.errors import InputError, truncate

NAME = "tokenizer.json"
# Seconds of CPU time, which a busy machine does not change. The largest published file (35 MB) takes two.
TIME_LIMIT = 60
_HANGS_S = 1200  # for a process that waits and computes nothing


def check_there(folder: Path) -> None:
    """Raise InputError for a folder without a tokenizer.json. Opens no file."""
    if not present(folder / NAME):
        raise InputError(
            f"{folder}: expected tokenizer.json, found none; download it, or make it from the tokenizer's other files: "
            f"python -m lockstep.export.slow_tokenizer {shlex.quote(str(folder))}"
        )


def check_present(folder: Path) -> None:
    """Raise InputError for a folder without a tokenizer.json with a model in it."""
    check_there(folder)
    path = folder / NAME
    model = read_source_json(path).get("model")
    if not isinstance(model, dict):
        raise InputError(f"{path}: expected a tokenizer with a model, found {shorten(model)}; download this file again")


def check_loads(path: Path) -> None:
    """Load the tokenizer and let it split texts, for at most `TIME_LIMIT` seconds of CPU time.

    Raises InputError for a file that the tokenizers package does not load, whose expressions take too long or make it
    panic, and where that package is missing.
    """
    try:
        run_script(probe.__file__, path, path)
    except _ScriptError as error:
        raise InputError(
            f"{path}: expected a tokenizer, found {truncate(str(error))}; "
            "use the tokenizer.json that came with the model"
        ) from None


@dataclass(frozen=True)
class TokenizerOfTransformers:
    """A checkpoint's tokenizer in transformers.

    eos_token_id: of its end token. note: one line of differences from tokenizer.json, or "".
    """

    eos_token_id: int | None
    note: str


def load_as_transformers(folder: Path) -> TokenizerOfTransformers:
    """Load the tokenizer of a checkpoint in transformers, and compare its tokenizer.json with it.

    Raises InputError for one that transformers cannot load, or that no tokenizer.json can represent, and where
    transformers is missing.
    """
    if find_spec("transformers") is None:
        raise InputError(
            f"{folder}: the tokenizer needs the Python package 'transformers', which is not installed here; install it"
        )
    # By its path, so that importing this module needs no transformers.
    script = Path(__file__).with_name("auto_tokenizer.py")
    try:
        return TokenizerOfTransformers(**json.loads(run_script(str(script), folder, folder / NAME)))
    except _ScriptError as error:
        raise InputError(f"{folder}: expected a tokenizer that transformers splits texts with, {error}") from None


def ties_head(folder: Path) -> bool:
    """Return whether transformers ties the head of the checkpoint's model to its embedding, if the config does not say.

    Raises InputError for a config that transformers does not load.
    """
    script = Path(__file__).with_name("auto_config.py")
    try:
        return bool(json.loads(run_script(str(script), folder, folder / "config.json")))
    except _ScriptError as error:
        raise InputError(
            f"{folder / 'config.json'}: expected a config that transformers loads, found one that it refuses: {error}; "
            "correct it"
        ) from None


class _ScriptError(Exception):
    """Raised when a script fails, with its one-line reason."""


def run_script(script: str, argument: Path, path: Path) -> str:
    """Run a script on `argument` in another process; return the last line of its stdout.

    Libraries may print earlier lines. path: of the tokenizer, for the InputError where the script takes longer than
    `TIME_LIMIT`. Raises _ScriptError where the script fails.
    """
    if find_spec("tokenizers") is None:
        raise InputError(
            "tokenizer.json: needs the Python package 'tokenizers', which is not installed here; install it"
        )
    explodes = InputError(
        f"{path}: expected a tokenizer that splits {probe.LENGTH} characters at once, found it still at work after "
        f"{TIME_LIMIT} s; its expressions explode: use the tokenizer.json that came with the model"
    )
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        process = subprocess.run(
            [sys.executable, script, str(argument)],
            stdin=subprocess.DEVNULL,
            capture_output=True,  # a panic's stack trace is of no use to a user
            encoding="utf-8",
            errors="replace",
            env={**processes.environment(), **offline},
            timeout=_HANGS_S,
            preexec_fn=_limit_cpu_time,
        )
    except subprocess.TimeoutExpired:
        raise explodes from None
    if process.returncode == -signal.SIGXCPU:
        raise explodes
    last_line = process.stdout.strip("\n").rpartition("\n")[2]
    if not process.returncode:
        return last_line
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise _ScriptError(f"its process ended by {name} (more than {probe.MEMORY_BYTES >> 30} GB of memory?)")
    raise _ScriptError(last_line or truncate(process.stderr.strip().rpartition("\n")[2]))


def _limit_cpu_time() -> None:
    """Let the kernel end this process, a child before it runs the script, after `TIME_LIMIT`."""
    _, allowed = resource.getrlimit(resource.RLIMIT_CPU)
    limit = TIME_LIMIT
    if allowed != resource.RLIM_INFINITY:
        limit = min(limit, allowed)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, allowed))
