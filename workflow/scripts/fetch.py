"""A model on the hub -> source.json, and links to its files in the hub's cache."""

import os

from job import job

# The progress bar stays on the terminal; all else goes to the log.
terminal = os.fdopen(os.dup(2), "w")


@job(snakemake)
def fetch():
    from pathlib import Path

    from lockstep import config, hub
    from lockstep.files import read_json

    name = snakemake.wildcards.model
    used = config.load(read_json(snakemake.input.config))
    check = lambda folder: used.check_model(name, folder)
    hub.fetch(snakemake.params.source, Path(snakemake.output[0]), check, terminal=terminal)
