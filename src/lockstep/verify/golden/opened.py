"""The model of a golden check, for a reference of the same layers.

It is opened with the limits of the config.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import InputError
from lockstep.runtime import Model
from lockstep.targets import Limits, Target


def check_layers(reference_json: Path, layers: int | str, target: Target) -> None:
    """Check that a reference of `layers` is that of the target. Raises InputError."""
    if layers != target.layers:
        raise InputError(
            f"{reference_json}: layers: expected {target.layers}, found {layers}; make the reference of this target"
        )


def open_model(
    assembly_json: Path,
    weights_json: Path,
    engines_json: Path,
    target: Target,
    limits: Limits,
    threads: int | None,
    adapters_json: Path | None = None,
) -> Model:
    """Open the model of a target. limits: the config's.

    Raises InputError and CheckError as `Model.open` does.
    """
    return Model.open(
        engines_json,
        assembly_json,
        weights_json,
        target.layers,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        max_num_tokens=limits.max_num_tokens,
        threads=threads,
        adapters_json=adapters_json,
    )
