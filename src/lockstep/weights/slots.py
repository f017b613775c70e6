"""Check that an assembly's tensors fit the slots of the graphs, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

import numpy as np

from lockstep.artifacts.dtypes import graph_dtype
from lockstep.artifacts.quantized import is_scales
from lockstep.artifacts.signature import IO
from lockstep.errors import CheckError, InputError, truncate_list
from lockstep.weights.reader import Tensors, Weights


def check_slots(weights: Weights, slots: Mapping[str, Sequence[str]], specs: Sequence[IO], where: str = "") -> None:
    """Check each slot that `specs` declares against its tensors in `slots`.

    A slot of several tensors holds their bytes one after another. A named size fits any size. where: the block, for the
    message. Raises InputError naming tensor, file, expected and found dtype or shape.
    """
    declared = [spec.name for spec in specs]
    if sorted(declared) != sorted(slots):
        raise InputError(
            f"{_at(where)}expected tensors for the slots {truncate_list(sorted(declared))}, "
            f"found {truncate_list(sorted(slots))}; export the model again"
        )
    for spec in specs:
        _check_slot(weights, spec, slots[spec.name], where)
        if is_scales(spec.name):
            _check_scales(weights, slots[spec.name], where)


def _check_slot(weights: Weights, spec: IO, names: Sequence[str], where: str) -> None:
    if not names:
        raise InputError(f"{_at(where)}expected a tensor for slot {spec.name!r}, found none; export the model again")
    expected = list(spec.shape)
    infos = [weights.info(name) for name in names]
    for name, info in zip(names, infos):
        dtype = graph_dtype(info.dtype)
        if dtype != spec.dtype:
            remedy = "convert the checkpoint to the precision of the graphs"
            _refuse(weights, [name], where, spec.dtype, f"{dtype} {list(info.shape)}", remedy)
        part = expected
        if len(names) > 1:  # parts have the last axes of the whole: rows of q, k and v, or the matrices of experts
            part = ["any", *expected[len(expected) - len(info.shape) + 1 :]]
        if not _fits(info.shape, part):
            remedy = "the tensor does not belong to this config.json"
            _refuse(weights, [name], where, f"shape {part}", f"shape {list(info.shape)}", remedy)
    sizes = [size for size in expected if isinstance(size, int)]
    if len(names) > 1 and len(sizes) == len(expected):
        count = sum(math.prod(info.shape) for info in infos)
        if count != math.prod(sizes):
            remedy = "the tensors do not belong to this config.json"
            _refuse(weights, names, where, f"{math.prod(sizes)} numbers in all", f"{count}", remedy)


def _check_scales(weights: Weights, names: Sequence[str], where: str) -> None:
    for name in names:
        finite = np.isfinite(weights[name])
        if not finite.all():
            actual = f"{np.count_nonzero(~finite)} NaN or infinite ones"
            _refuse(weights, [name], where, "finite scales", actual, "convert the checkpoint again")


def _fits(shape: Sequence[int], expected: Sequence[int | str]) -> bool:
    if len(shape) != len(expected):
        return False
    return all(isinstance(size, str) or size == actual_size for actual_size, size in zip(shape, expected))


def check_inputs(slots: Collection[str], inputs: Collection[str], where: str) -> None:
    """Check that an engine has an input for each of its slots. where: its file. Raises CheckError."""
    missing = sorted(set(slots) - set(inputs))
    if missing:
        raise CheckError(
            f"{where}: expected weight inputs {truncate_list(sorted(slots))}, found none for {truncate_list(missing)}; "
            "build the engines again"
        )


def check_bound_slots(slots: Collection[str], bound: Collection[str], where: str) -> None:
    """Check that the slots of an engine are those that weights are bound to. where: its file. Raises CheckError."""
    if set(bound) != set(slots):
        raise CheckError(
            f"{where}: expected weights for the slots {truncate_list(sorted(slots))}, "
            f"found {truncate_list(sorted(bound))}; export and build again"
        )


def check_arrays(arrays: Sequence[np.ndarray], shape: Sequence[int], dtype: np.dtype, where: str) -> None:
    """Check that one array of the slot's shape, or several of its size, fit an engine. Raises CheckError."""
    shapes = [list(array.shape) for array in arrays]
    if len(arrays) == 1:
        fits = shapes[0] == list(shape)
    else:
        fits = sum(array.size for array in arrays) == math.prod(shape)
    if not fits or any(array.dtype != dtype for array in arrays):
        raise CheckError(
            f"{where}: expected weights {dtype.name} {list(shape)}, found {arrays[0].dtype.name} "
            f"{truncate_list(list(map(str, shapes)))}; are graphs and weights of one model and precision?"
        )


def slot_array(weights: Tensors | Mapping[str, np.ndarray], names: Sequence[str], shape: Sequence[int]) -> np.ndarray:
    """Return the array of a slot that was checked: the tensor itself, or a copy of several, one after another."""
    # Engines need contiguous arrays, which a rank's shard may not be; others stay views of the file.
    if len(names) == 1:
        return np.asarray(weights[names[0]], order="C")
    return np.concatenate([weights[name].reshape(-1) for name in names]).reshape(shape)


def _refuse(weights: Weights, names: Sequence[str], where: str, expected: str, actual: str, remedy: str) -> NoReturn:
    path = weights.location(names[0])[0]
    tensors = truncate_list(list(map(repr, names)), " + ")
    if where:
        tensors += f" of {where}"
    raise InputError(f"{path}: tensor {tensors}: expected {expected}, found {actual}; {remedy}")


def _at(where: str) -> str:
    return f"{where}: " if where else ""
