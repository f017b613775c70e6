"""Check that a tokenizer.json is a tokenizer.

In: the file. Out: nothing, or one line. The library loads it in another process, which can be ended.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from lockstep.checkpoint import probe
from lockstep.checkpoint.source_files import cut, present, read_source_json, shorten
from lockstep.errors import InputError

NAME = "tokenizer.json"
# Seconds. The largest published file (35 MB) takes two here; a busy machine is ten times slower.
TIME_LIMIT = 60


def check_there(folder: Path) -> None:
    """Raise InputError for a folder without a tokenizer.json. Opens no file."""
    if not present(folder / NAME):
        raise InputError(
            f"{folder}: expected tokenizer.json, found none; download it, or make it from the slow tokenizer's files:"
            ' python -c "import sys, transformers; d = sys.argv[1];'
            f' transformers.AutoTokenizer.from_pretrained(d).save_pretrained(d)" {shlex.quote(str(folder))}'
        )


def check_present(folder: Path) -> None:
    """Raise InputError for a folder without a tokenizer.json with a model in it."""
    check_there(folder)
    path = folder / NAME
    model = read_source_json(path).get("model")
    if not isinstance(model, dict):
        raise InputError(f"{path}: expected a tokenizer with a model, found {shorten(model)}; download this file again")


def check_loads(path: Path, time_limit: float = TIME_LIMIT) -> None:
    """Load the tokenizer and let it split texts, for `time_limit` seconds at most.

    Raises InputError for a file that the tokenizers package does not load, whose expressions take too long or make it
    panic, and where that package is missing.
    """
    if find_spec("tokenizers") is None:
        raise InputError(
            "tokenizer.json: needs the Python package 'tokenizers', which is not installed here; install it"
        )
    command = [sys.executable, probe.__file__, str(path)]
    # A panic's own words and its stack are of no use to a user.
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONUTF8": "1"},
            timeout=time_limit,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{path}: expected a tokenizer that splits {probe.LENGTH} characters at once, found it still at work after"
            f" {time_limit:g} s; its expressions explode: use the tokenizer.json that came with the model"
        ) from None
    if ended.returncode < 0:
        found = (
            f"its process ended by {signal.Signals(-ended.returncode).name} (more than {probe.MEMORY_BYTES >> 30} GB of"
            " memory?)"
        )
    elif ended.returncode:
        lines = ended.stdout.split("\n")
        found = next((line for line in reversed(lines) if line), "") or cut(ended.stderr.strip().rpartition("\n")[2])
    else:
        return
    raise InputError(
        f"{path}: expected a tokenizer, found {cut(found)}; use the tokenizer.json that came with the model"
    )
