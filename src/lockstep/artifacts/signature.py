"""The signature of a graph: names, dtypes and shapes of its inputs, outputs and weight slots; and their one check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

from lockstep.artifacts.bounds import Name, Size
from lockstep.artifacts.document import JsonObject, ValidationError, length, one_of
from lockstep.artifacts.dtypes import PRECISION_NAMES, named_dtype
from lockstep.errors import CheckError, truncate_list

if TYPE_CHECKING:
    import numpy as np

_DTYPES = (*PRECISION_NAMES.values(), "uint8", "float8_e4m3fn", "int64")


@dataclass(frozen=True)
class IO(JsonObject):
    """An input, output or slot of a graph.

    dtype: as NumPy calls it, such as "float16". shape: dimensions are numbers or names (`num_tokens`, `num_requests`,
    `past_capacity`).
    """

    name: Name
    dtype: Annotated[str, one_of(*_DTYPES)]
    shape: Annotated[
        tuple[Size | Annotated[str, one_of("num_tokens", "num_requests", "past_capacity")], ...], length(8)
    ]

    @property
    def key(self) -> str:
        """Return the name of the value in a step: a graph that reads `hidden` calls its result `hidden_out`."""
        return self.name.removesuffix("_out")

    @property
    def numpy_dtype(self) -> np.dtype:
        return named_dtype(self.dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        return cast("tuple[int, ...]", self.shape)

    @property
    def type(self) -> str:
        """Return dtype and shape in words: `float16 [num_tokens, 144]`."""
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


def concrete_shape(shape: Sequence[int | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple([sizes[dim] if isinstance(dim, str) else dim for dim in shape])


@dataclass(frozen=True)
class Signature(JsonObject):
    """The inputs and outputs of a graph, and its slots: the inputs that take weights."""

    inputs: Annotated[tuple[IO, ...], length(100)]
    outputs: Annotated[tuple[IO, ...], length(100)]
    slots: Annotated[tuple[IO, ...], length(1_000_000)] = ()  # of the whole model, one for each weight

    def validate(self, stored: Mapping[str, Any]) -> None:
        check_slot_shapes(self.slots)

    def check(self, actual: Signature, where: str, remedy: str) -> None:
        """Raise CheckError where the signature of the graph as its library loads it differs.

        A library knows no slots: `actual` may have them among its inputs. where, remedy: start and end of the message.
        """
        _check_types(where, "input", (*self.inputs, *self.slots), (*actual.inputs, *actual.slots), remedy)
        _check_types(where, "output", self.outputs, actual.outputs, remedy)


def _check_types(where: str, role: str, declared: Sequence[IO], actual: Sequence[IO], remedy: str) -> None:
    check_names(where, role, [io.name for io in declared], [io.name for io in actual], remedy)
    types = {io.name: io.type for io in actual}
    for io in declared:
        if types[io.name] != io.type:
            raise CheckError(f"{where}: {role} {io.name!r}: expected {io.type}, found {types[io.name]}; {remedy}")


def check_slot_shapes(slots: Sequence[IO]) -> None:
    """Raise ValidationError for the first slot without a fixed shape, which no weight has."""
    for slot in slots:
        if not all(isinstance(size, int) for size in slot.shape):
            raise ValidationError(f"slots: {slot.name}", "sizes", slot.type)


def check_names(where: str, role: str, declared: Sequence[str], actual: Sequence[str], remedy: str = "") -> None:
    """Raise CheckError where the names of inputs or outputs are not those declared, in any order."""
    missing = sorted(set(declared) - set(actual))
    unexpected = sorted(set(actual) - set(declared))
    differences = []
    if missing:
        differences.append(f"no {truncate_list(missing)}")
    if unexpected:
        differences.append(f"unexpected {truncate_list(unexpected)}")
    if differences:
        message = f"{where}: expected the {role}s {truncate_list(declared)}, found {' and '.join(differences)}"
        raise CheckError("; ".join(filter(None, (message, remedy))))


def check_arrays(
    where: str,
    role: str,
    declared: Sequence[IO],
    arrays: Mapping[str, np.ndarray],
    dims: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Check arrays against declared inputs or outputs; return {named dimension: size}.

    role: "input", "output" or "slot". dims: known sizes of named dimensions. Raises CheckError for other names, and for
    an array of another dtype or shape.
    """
    check_names(where, role, [io.name for io in declared], list(arrays))
    sizes = dict(dims or {})
    for io in declared:
        array = arrays[io.name]
        # The first array with a named dimension decides its size; all later ones must have the same.
        for dim, size in zip(io.shape, array.shape):
            if isinstance(dim, str):
                sizes.setdefault(dim, size)
        has_rank = array.ndim == len(io.shape)
        if not has_rank or array.dtype.name != io.dtype or array.shape != concrete_shape(io.shape, sizes):
            dims_in_words = [f"{dim}={sizes[dim]}" if dim in sizes else dim for dim in io.shape]
            expected = IO(io.name, io.dtype, tuple(dims_in_words))
            actual = IO(io.name, array.dtype.name, array.shape)
            raise CheckError(f"{where}: {role} {io.name!r}: expected {expected.type}, found {actual.type}")
    return sizes
