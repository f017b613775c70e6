"""A model through the whole workflow, from resolve to served, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import load
from lockstep.errors import CheckError, InputError
from lockstep.stages import STAGES, jobs
from lockstep.stages.files import model_files
from lockstep.targets import Results

MODEL = "tiny"
LIMITS = {"max_batch_size": 4, "max_input_len": 32, "max_seq_len": 64, "max_num_tokens": 64}
GOLDEN = {"max_new_tokens": 8, "prompts": [{"text": "Light"}]}
GROUP = 16
# Sizes of the families whose rows are no whole groups.
_IN_GROUPS = {
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16,
}  # fmt: skip


def in_groups(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the same family whose rows are whole groups of 16."""
    return {**config, **{key: size for key, size in _IN_GROUPS.items() if key in config}}


def failures(
    root: Path,
    source: str,
    targets: Mapping[str, Sequence[str]],
    left_out: str | tuple[str, ...] = (),
    limits: Mapping[str, int] = LIMITS,
    backends: Mapping[str, Any] | None = None,
    **settings: Any,
) -> list[str]:
    """Take a model through all stages of its targets; return a line for each job that failed.

    root: of the results, of which those that are there are not made again. source: `random:<config.json>?seed=0` or a
    checkpoint's folder. targets: precisions by backend. left_out: jobs that are not run, by their names' beginning.
    backends: that section of the config. settings: of the model, in the config. What needs the output of a failed job
    is left out too. Raises InputError where the config is refused.
    """
    model = {
        "source": source, "layers": ["all"], "precisions": list(dict.fromkeys(itertools.chain(*targets.values()))),
        "backends": list(targets),
        "backend_precisions": {backend: list(precisions) for backend, precisions in targets.items()}, "golden": GOLDEN,
        **settings,
    }  # fmt: skip
    config = load.load({"models": {MODEL: model}, "limits": dict(limits), "backends": dict(backends or {})})
    results = Results(root)
    (place,) = config.check_sources(results=results).values()
    files = {MODEL: vars(model_files(config, MODEL, place, results))}
    lines = []
    for job in jobs(config, root, config.targets(), files):
        is_able = all(needed.exists() for needed in job.inputs.values())
        if is_able and not job.output.exists() and not str(job).startswith(left_out):
            try:
                STAGES[job.stage].run(job)
            except (CheckError, InputError) as error:
                lines.append(f"{job}: {error}")
    return lines
