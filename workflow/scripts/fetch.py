"""A model on the hub -> source.json, and links to its files in the hub's cache."""

import os

from job import job, lock_file

# The progress bar stays on the terminal; all else goes to the log.
terminal = os.fdopen(os.dup(2), "w")


@job(snakemake)
def fetch():
    from pathlib import Path

    from lockstep.artifacts.files import read_json
    from lockstep.checkpoint import hub
    from lockstep.config import load
    from lockstep.provenance.locked import before_weights, locked_commit

    name, source, lock = snakemake.wildcards.model, snakemake.params.source, lock_file(snakemake)
    check = before_weights(load.load(read_json(snakemake.input.config)), name, lock)
    hub.fetch(
        source,
        Path(snakemake.output[0]),
        check,
        terminal=terminal,
        commit=locked_commit(lock, source) if lock else None,
    )
