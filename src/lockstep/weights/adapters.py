"""Adapters at run time: read from their manifest, written into arrays.

In: the manifest. Out: matrices in memory, written into the arrays that blocks read.

All adapters are read and checked once, when a model is opened: a folder that changes later changes no answer.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lockstep.artifacts.adapters import WEIGHTS, Adapter, AdaptersManifest, LoraSlots
from lockstep.artifacts.assembly import BoundBlock
from lockstep.artifacts.dtypes import numpy_dtype
from lockstep.artifacts.places import TensorPlace
from lockstep.artifacts.quantized import module_of
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import check_stored


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter's matrices in memory, by module.

    modules: of each, a [rank, in_features] and b [out_features, rank] as they are stored. sha256: of what decides what
    the adapter computes. scales: of modules that have another than `scale`.
    """

    name: str
    rank: int
    scale: float
    sha256: str
    modules: Mapping[str, tuple[np.ndarray, np.ndarray]]
    where: str
    scales: Mapping[str, float] = field(default_factory=dict)

    def scale_of(self, module: str) -> float:
        return self.scales.get(module, self.scale)


@dataclass(frozen=True)
class LoraArrays:
    """The arrays that one linear layer of one block reads adapters from.

    Arrays of its backend: a [in_features, max_adapters * max_lora_rank], transposed if `a_by_rows`, and b [max_adapters
    * max_lora_rank, out_features].
    """

    module: str
    a: Any
    b: Any
    a_by_rows: bool = False


def empty_arrays(
    slots: LoraSlots | None,
    part: BoundBlock,
    dtype: np.dtype,
    empty: Callable[[Sequence[int], np.dtype], Any] = np.zeros,
    but: Collection[str] = (),
) -> dict[str, Any]:
    """Make arrays for the inputs of a block that adapters are written to.

    empty: makes an array of a shape and a dtype. but: inputs that have an array already. Returns arrays by input name.
    """
    shapes = slots.shapes(part.graph) if slots else ()
    return {name: empty(shape, dtype) for name, shape in shapes if name not in but}


def arrays_of(
    slots: LoraSlots, part: BoundBlock, inputs: Mapping[str, Any], by_rows: Collection[str] = ()
) -> list[LoraArrays]:
    """Return where the adapters of each linear layer of a block go.

    inputs: the block's arrays by input name. by_rows: those lora_A that are transposed.
    """
    return [
        LoraArrays(module_of(part.slots[weight][0]), inputs[slot.a], inputs[slot.b], slot.a in by_rows)
        for weight, slot in slots.classes.get(part.graph, {}).items()
    ]


class AdapterWriter(Protocol):
    """Brings adapters into the arrays that blocks read.

    The arrays are zero at first.
    """

    def prepare(self, adapter: LoadedAdapter) -> None:
        """Do once for an adapter what need not be done at each `write`."""
        ...

    def write(self, adapter: LoadedAdapter, adapter_slot: int) -> None:
        """Write an adapter to its slot in all arrays, before the next step.

        As `write_adapter` does.
        """
        ...

    def forget(self, adapter: LoadedAdapter) -> None:
        """Drop what is kept of an adapter, which is not written any more."""
        ...


def open_adapters(path: str | os.PathLike) -> dict[str, LoadedAdapter]:
    """Read the adapters of a manifest into memory, by name.

    Raises InputError where a file is absent or has changed.
    """
    path = Path(path)
    manifest = AdaptersManifest.load(path)
    found = {}
    for name, adapter in sorted(manifest.adapters.items()):
        folder = manifest.folder_of(path, name)
        check_stored(adapter.files, folder, "check the adapters again: run `lockstep run`")
        found[name] = _read(name, adapter, folder)
    return found


def _read(name: str, adapter: Adapter, folder: Path) -> LoadedAdapter:
    return adapter_of_bytes(name, adapter, np.fromfile(folder / WEIGHTS, np.uint8), folder)


def adapter_of_bytes(name: str, adapter: Adapter, data: np.ndarray, folder: Path) -> LoadedAdapter:
    """Return an adapter whose file of matrices holds `data`, uint8."""

    def array(place: TensorPlace) -> np.ndarray:
        raw = data[place.offset : place.offset + place.length]
        return raw.copy().view(numpy_dtype(place.dtype)).reshape(place.shape)

    modules = {module: (array(entry.a), array(entry.b)) for module, entry in adapter.modules.items()}
    return LoadedAdapter(name, adapter.rank, adapter.scale, adapter.sha256, modules, str(folder), adapter.scales)


def scaled(b: np.ndarray, scale: float, dtype: np.dtype) -> np.ndarray:
    """Return a matrix B times the adapter's scale.

    Computed in float32 and rounded once, to `dtype`.
    """
    with np.errstate(over="ignore"):
        return (b.astype(np.float32) * np.float32(scale)).astype(dtype)


def check_adapter(adapter: LoadedAdapter, slots: LoraSlots, modules: Iterable[str], dtype: np.dtype) -> None:
    """Check that the graphs have room for an adapter and its numbers fit.

    modules: those of the whole model that take adapters. dtype: of the graphs. Raises InputError, one line, for an
    adapter that the graphs have no room for, or whose numbers do not fit their precision.
    """
    known = set(modules)
    opening = f"adapter {adapter.name!r} ({adapter.where})"
    if adapter.rank > slots.max_lora_rank:
        raise InputError(
            f"{opening}: expected a rank of at most {slots.max_lora_rank} (max_lora_rank), found {adapter.rank}; raise "
            "the limit and export again"
        )
    for module, (a, b) in adapter.modules.items():
        if module not in known:
            near = difflib.get_close_matches(module, sorted(known), n=1)
            kinds = sorted({name.rpartition(".")[2] for name in known})
            raise InputError(
                f"{opening}: expected modules that take adapters ({', '.join(kinds)}), found {module}"
                f"{'; the nearest is ' + near[0] if near else ''}; widen lora_target_modules and export again, or use "
                "an adapter without it"
            )
        for label, array in (
            (f"{module}.lora_A", a.astype(dtype)),
            (f"{module}.lora_B", scaled(b, adapter.scale_of(module), dtype)),
        ):
            if not np.isfinite(array.astype(np.float32)).all():
                raise InputError(
                    f"{opening}: {label}: expected numbers that fit {dtype.name}, found one that overflows; use "
                    "another precision"
                )


def write_adapter(
    adapter: LoadedAdapter | None, adapter_slot: int, max_lora_rank: int, arrays: Iterable[LoraArrays]
) -> None:
    """Write an adapter to its slot in all arrays, zeros for None.

    Modules that it does not have become zero, and so does what lies between its rank and `max_lora_rank`.
    """
    first = adapter_slot * max_lora_rank
    own = slice(first, first + max_lora_rank)
    for each in arrays:
        found = adapter.modules.get(each.module) if adapter is not None else None
        each.a[:, own] = 0
        each.b[own] = 0
        if found is not None:
            assert adapter is not None
            a, b = found
            each.a[:, first : first + len(a)] = a.T
            each.b[first : first + len(a)] = scaled(b, adapter.scale_of(each.module), each.b.dtype).T
