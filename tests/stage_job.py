"""One job of a target, without Snakemake: `stage_job.py STAGE TARGET CONFIG RESULTS [LOCK]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.config.load import load
from lockstep.errors import guard
from lockstep.provenance.run import run
from lockstep.stages import jobs
from lockstep.stages.files import model_files
from lockstep.targets import Results


def main(arguments: Sequence[str]) -> None:
    """Run a stage of a target, with a lock if one is named last, and print its output files."""
    stage, name, config_file, root, *locks = arguments
    with guard():
        config = load(config_file)
        results = Results(Path(root))
        target = config.parse_target(name, config_file)
        source = config.check_sources(results=results).get(target.model)
        files = {target.model: vars(model_files(config, target.model, source, results))}
        for job in jobs(config, results.root, [target], files):
            if job.stage == stage:
                print(run(job, lock_file=Path(locks[0]) if locks else None, cache=config.cache))


if __name__ == "__main__":
    main(sys.argv[1:])
