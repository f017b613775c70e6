"""A family's shape through the whole workflow, from resolve to served, in one process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import load
from lockstep.errors import CheckError, InputError
from lockstep.stages import STAGES, Job, jobs

LIMITS = {"max_batch_size": 4, "max_input_len": 32, "max_seq_len": 64, "max_num_tokens": 64}
GOLDEN = {"max_new_tokens": 8, "prompts": [{"text": "Light"}]}
GROUP = 16
# Sizes of the families whose rows are no whole groups.
_IN_GROUPS = {
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "v_head_dim": 16,
}


def in_groups(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the same family whose rows are whole groups of 16."""
    return {**config, **{key: size for key, size in _IN_GROUPS.items() if key in config}}


def failures(
    root: Path, shape: Mapping[str, Any], targets: Mapping[str, Sequence[str]], left_out: str = "", **settings: Any
) -> list[str]:
    """Take a config.json through all stages of its targets; return a line for each job that failed.

    targets: precisions by backend. left_out: a job that is not run, as it calls itself. settings: of the model, in the
    config. What needs the output of a failed job is left out too. Raises InputError where the config is refused.
    """
    path = root / "shape.json"
    path.write_text(json.dumps(shape))
    model = {
        "source": f"random:{path}?seed=0",
        "layers": ["all"],
        "precisions": list(dict.fromkeys(precision for precisions in targets.values() for precision in precisions)),
        "backends": list(targets),
        "backend_precisions": {backend: list(precisions) for backend, precisions in targets.items()},
        "golden": GOLDEN,
        **settings,
    }
    config = load.load({"models": {"tiny": model}, "limits": LIMITS})
    config.check_model("tiny", path)
    lines = []
    for job in jobs(config, root / "results", config.targets()):
        if job.stage == "make_checkpoint":
            job.given["path"] = path
        is_able = all(needed.exists() for needed in (*job.inputs.values(), *_brought(job)))
        if is_able and str(job) != left_out:
            try:
                STAGES[job.stage].make(job)
            except (CheckError, InputError) as error:
                lines.append(f"{job}: {error}")
    return lines


def _brought(job: Job) -> list[Path]:
    stage = STAGES[job.stage]
    return [stage.path(job, pattern) for pattern in stage.brought.values()]
