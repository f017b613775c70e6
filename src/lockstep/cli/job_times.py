"""Estimate the time of a model's jobs: its config and its size in, {stage: seconds} out.

The costs are core-seconds, measured with Llama 0.2 M (the demo, 256 tokens) and SmolLM2-135M (512 tokens) on two EPYC
cores with AVX-512, November 2026. For SmolLM2 up to 2,048 tokens on the same cores the estimate is 33 minutes; it took
29.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.targets import layer_count

if TYPE_CHECKING:
    from lockstep.config.schema import Config


@dataclass(frozen=True)
class _Cost:
    """Core-seconds of a job: of any, for 10^9 parameters, and for 10^9 parameters times tokens."""

    base: float
    parameters: float = 0.0
    tokens: float = 0.0


_COSTS = {
    "make_checkpoint": _Cost(5, 50),
    "architecture": _Cost(2),
    "resolve": _Cost(0.5),
    "convert": _Cost(0.5, 24),
    "export": _Cost(15),
    "validate": _Cost(11, tokens=0.6),
    "build": _Cost(2),
    "reference": _Cost(9, tokens=0.1),
    "quantized_reference": _Cost(9, tokens=0.15),
    "compare": _Cost(15),
    "golden": _Cost(4, tokens=0.55),
    "served": _Cost(9, 590),
}
_COMPARE = 1.6  # of `compare_seconds`, of a model whose sizes are not tried out before


def seconds_by_stage(config: Config, model: str, parameters: int, num_layers: int) -> dict[str, float]:
    """Return seconds on all cores here, the longest first. What runs on a GPU counts as a model of no size."""
    from lockstep.config.backends import backends
    from lockstep.stages import jobs

    targets = [target for target in config.targets() if target.model == model]
    length = config.limits.max_seq_len
    seconds: dict[str, float] = {}
    for job in jobs(config, Path("results"), targets):
        # Other stages start, read small files and end, in seconds for any model.
        cost = _COSTS.get(job.stage, _Cost(5))
        backend = job.names.get("backend")
        on_gpu = backend is not None and backends()[config.backend_of(backend)].gpus > 0
        layers = layer_count(job.names.get("layers", "all"))
        billions = parameters / 1e9
        if layers != "all":
            billions *= min(1.0, int(layers) / num_layers)
        # The costs were measured on a CPU; on a GPU the part that grows with the model is small.
        if on_gpu:
            billions = 0.0
        time = cost.base + billions * (cost.parameters + cost.tokens * length)
        # All sizes of a small model are compared before the time that the config allows is up.
        if job.stage == "compare" and billions > 0.01:
            time += _COMPARE * config.compare_seconds
        seconds[job.stage] = seconds.get(job.stage, 0.0) + time / len(os.sched_getaffinity(0))
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
