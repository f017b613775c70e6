"""What a job of each stage asks of a cluster: memory and time, from the bytes of the model's weight files.

Measured on models of 4 MB, 0.5 GB and 1.9 GB (docs/clusters.md), with a third and more of room above the largest. No
build key, record or parameter of a rule has these numbers: a change of them makes nothing again.
"""

from __future__ import annotations

from dataclasses import dataclass

# What a model is taken to weigh while no file of it is there: in a dry run, before it was fetched or made.
UNKNOWN_BYTES = 16_000_000_000


@dataclass(frozen=True)
class Need:
    """memory_mb: of any model, in MB of 1,000,000 bytes. memory: bytes more for each byte of weights. minutes: of any
    model. minutes_per_gb: more for each 1,000,000,000 bytes of weights."""

    memory_mb: int
    memory: float = 0
    minutes: int = 60
    minutes_per_gb: int = 0


NEEDS = {
    "random_weights": Need(1500, minutes_per_gb=5),
    "resolve": Need(1000, minutes_per_gb=2),
    "architecture": Need(1000),
    "convert": Need(1000, minutes_per_gb=5),
    "export": Need(2000, 0.1),
    "validate": Need(2500, 8, minutes_per_gb=20),
    # TensorRT's library and its builder come to the graphs, which hold no weights.
    "build": Need(4000, minutes=180),
    "compare": Need(2500, 4, minutes_per_gb=20),
    "reference": Need(2500, 4, minutes_per_gb=20),
    # Both models, the checkpoint's and the one of dequantised weights, one after the other.
    "quantized_reference": Need(2500, 8, minutes_per_gb=30),
    "golden": Need(2500, 4.5, minutes_per_gb=30),
    "served": Need(2500, 4.5, minutes_per_gb=30),
    "adapters": Need(1000),
    "adapted_reference": Need(2500, 4, minutes_per_gb=20),
    "quantized_adapted_reference": Need(2500, 4, minutes_per_gb=20),
    "adapted": Need(2500, 4.5, minutes_per_gb=30),
}


def memory_mb(stage: str, weight_bytes: int, attempt: int = 1) -> int:
    """Return the memory of a job in MB; each attempt asks for as much again.

    weight_bytes: of the checkpoint's weight files. Raises KeyError for a stage that is not in `NEEDS`.
    """
    need = NEEDS[stage]
    return attempt * (need.memory_mb + round(need.memory * weight_bytes / 1e6))


def minutes(stage: str, weight_bytes: int, attempt: int = 1) -> int:
    """Return the time limit of a job in minutes; arguments and errors as of `memory_mb`."""
    need = NEEDS[stage]
    return attempt * (need.minutes + round(need.minutes_per_gb * weight_bytes / 1e9))
