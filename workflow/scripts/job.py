"""What every script opens with: this checkout's package, and all that the job says in its rule's log."""

import os
import sys
from pathlib import Path

# The rule's key is of the code in this checkout, and an environment that conda made has no other.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from lockstep.errors import guard  # noqa: E402
from lockstep.lock import stage  # noqa: E402
from lockstep.lock.locked import find_lock, is_locked  # noqa: E402


def job(snakemake):
    """Decorate the script's function: it runs at once, as the job. Stdout and stderr, also those of native libraries, go to the rule's
    log; a user's mistake becomes one line there. What was made is recorded beside it."""

    def run(make):
        with open(snakemake.log[0], "w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        with guard():
            stage.run(_step(snakemake), make, lock_file(snakemake), snakemake.config.get("cache", ""))

    return run


def lock_file(snakemake):
    """The lock that the job is held to: in a run with `--config locked=true`, of a job that is of one model."""
    if not is_locked(snakemake.config) or "model" not in snakemake.wildcards.keys():
        return None
    return find_lock(snakemake.wildcards.model, [Path(), Path(__file__).resolve().parents[2]])


def _step(snakemake):
    inputs = {name: value if isinstance(value, str) else list(value) for name, value in snakemake.input.items()}
    return stage.from_rule(snakemake.rule, dict(snakemake.wildcards.items()), inputs, dict(snakemake.params.items()), list(snakemake.output))
