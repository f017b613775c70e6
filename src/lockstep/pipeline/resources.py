"""Memory and time of cluster jobs, from the bytes of the model's weight files.

The numbers of each stage stand in the table of stages. They were measured on models of 4 MB, 0.5 GB and 1.9 GB
(docs/clusters.md), with a third and more of room above the largest. No build key, record or parameter of a rule has
them: a change makes nothing again.
"""

from __future__ import annotations

from dataclasses import dataclass

# What a model is taken to weigh while no file of it is there: in a dry run, before it was fetched or made.
UNKNOWN_BYTES = 16_000_000_000


@dataclass(frozen=True)
class Resources:
    """Memory and time of a stage's jobs.

    base_mb: memory for any model, in MB of 1,000,000 bytes. memory: bytes more for each byte of weights. minutes: for
    any model. minutes_per_gb: more for each 1,000,000,000 bytes of weights.
    """

    base_mb: int
    memory: float = 0
    minutes: int = 60
    minutes_per_gb: int = 0

    def memory_mb(self, weight_bytes: int, attempt: int = 1) -> int:
        """Return the memory of a job in MB; each attempt asks for as much again.

        weight_bytes: of the checkpoint's weight files.
        """
        return attempt * (self.base_mb + round(self.memory * weight_bytes / 1e6))

    def time_limit(self, weight_bytes: int, attempt: int = 1) -> int:
        """Return the time limit of a job in minutes; arguments as of `memory_mb`."""
        return attempt * (self.minutes + round(self.minutes_per_gb * weight_bytes / 1e9))
