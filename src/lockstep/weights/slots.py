"""Do the weights fit the graphs? Checks the tensors that an assembly binds to a block's slots, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.checkpoint.dtypes import graph_dtype
from lockstep.errors import InputError
from lockstep.weights.reader import Weights


def check_slots(weights: Weights, slots: Mapping[str, Sequence[str]], specs: Sequence[Mapping[str, Any]], where: str = "") -> None:
    """Check each slot that `specs` declares ({"name", "dtype", "shape"} of the assembly) against its tensors in `slots`.

    A slot of several tensors is their concatenation along axis 0. A size given as a name fits any size. `where` says which
    block this is, for the message. Raises InputError naming tensor, file, expected and found dtype or shape.
    """
    declared = [spec["name"] for spec in specs]
    if sorted(declared) != sorted(slots):
        raise InputError(f"{_at(where)}expected tensors for the slots {sorted(declared)}, found {sorted(slots)}; export the model again")
    for spec in specs:
        _check_slot(weights, spec, slots[spec["name"]], where)


def _check_slot(weights: Weights, spec: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    expected = list(spec["shape"])
    infos = [weights.info(name) for name in names]
    for name, info in zip(names, infos):
        dtype = graph_dtype(info.dtype)
        if dtype != spec["dtype"]:
            _refuse(weights, name, where, spec["dtype"], f"{dtype} {list(info.shape)}", "convert the checkpoint to the precision of the graphs")
        # The parts of a fused slot share all axes but the first.
        part = expected if len(names) == 1 else [info.shape[0] if info.shape else None, *expected[1:]]
        if not _fits(info.shape, part):
            wanted = expected if len(names) == 1 else ["any", *expected[1:]]
            _refuse(weights, name, where, f"shape {wanted}", f"shape {list(info.shape)}", "the tensor does not belong to this config.json")
    if len(names) > 1:
        rows = sum(info.shape[0] for info in infos)
        if not _fits((rows,), expected[:1]):
            _refuse(weights, ", ".join(names), where, f"{expected[0]} rows in all", f"{rows}", "the tensors do not belong to this config.json")
    if not names:
        raise InputError(f"{_at(where)}expected a tensor for slot {spec['name']!r}, found none; export the model again")


def _fits(shape: Sequence[int], expected: Sequence[int | str]) -> bool:
    return len(shape) == len(expected) and all(isinstance(want, str) or want == found for found, want in zip(shape, expected))


def _refuse(weights: Weights, name: str, where: str, expected: str, found: str, remedy: str) -> None:
    path = weights.location(name.split(", ")[0])[0]
    raise InputError(f"{path}: tensor {name!r}{' of ' + where if where else ''}: expected {expected}, found {found}; {remedy}")


def _at(where: str) -> str:
    return f"{where}: " if where else ""
