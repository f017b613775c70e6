"""Load adapters at run time, from their manifest into the arrays that blocks read.

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

    modules: of each, a [rank, in_features] and b [out_features, rank] as stored. sha256: of everything that decides
    what the adapter computes. scales: of modules whose scale is not `scale`.
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
    """The arrays from which one linear layer of one block reads adapters.

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
    existing: Collection[str] = (),
) -> dict[str, Any]:
    """Return new arrays, made by `empty`, for the inputs of a block that take adapters and are not in `existing`."""
    if slots is None:
        return {}
    return {name: empty(shape, dtype) for name, shape in slots.shapes(part.graph) if name not in existing}


def arrays_of(
    slots: LoraSlots, part: BoundBlock, inputs: Mapping[str, Any], by_rows: Collection[str] = ()
) -> list[LoraArrays]:
    """Return the arrays of each linear layer of a block.

    inputs: the block's arrays by input name. by_rows: the lora_A inputs that are transposed.
    """
    return [
        LoraArrays(module_of(part.slots[weight][0]), inputs[slot.a], inputs[slot.b], slot.a in by_rows)
        for weight, slot in slots.classes.get(part.graph, {}).items()
    ]


class AdapterWriter(Protocol):
    """Writes adapters into the arrays that blocks read, which are zero at first."""

    def prepare(self, adapter: LoadedAdapter) -> None:
        """Do the work that is needed once for an adapter, not at each `write`."""

    def write(self, adapter: LoadedAdapter, adapter_slot: int) -> None:
        """Write an adapter to its slot in all arrays before the next step, as `write_adapter` does."""

    def forget(self, adapter: LoadedAdapter) -> None:
        """Drop the result of `prepare` for an adapter that is not written any more."""


def open_adapters(path: str | os.PathLike, lost: dict[str, str] | None = None) -> dict[str, LoadedAdapter]:
    """Read the adapters {name: matrices} of a manifest.

    lost: takes the names of those whose files are absent or have changed, and why; None: raise InputError for them.
    """
    path = Path(path)
    manifest = AdaptersManifest.load(path)
    adapters = {}
    for name, adapter in sorted(manifest.adapters.items()):
        folder = manifest.folder_of(path, name)
        try:
            check_stored(adapter.files, folder, "check the adapters again: run `lockstep run`")
            adapters[name] = adapter_of_bytes(name, adapter, np.fromfile(folder / WEIGHTS, np.uint8), folder)
        except InputError as error:
            if lost is None:
                raise
            lost[name] = str(error)
    return adapters


def adapter_of_bytes(name: str, adapter: Adapter, data: np.ndarray, folder: Path) -> LoadedAdapter:
    """Return an adapter whose file of matrices has the bytes `data`, uint8."""

    def array(place: TensorPlace) -> np.ndarray:
        raw = data[place.offset : place.offset + place.length]
        # A copy is aligned to its elements, and does not keep the whole file in memory.
        return raw.copy().view(numpy_dtype(place.dtype)).reshape(place.shape)

    modules = {module: (array(entry.a), array(entry.b)) for module, entry in adapter.modules.items()}
    return LoadedAdapter(name, adapter.rank, adapter.scale, adapter.sha256, modules, str(folder), adapter.scales)


def scaled(b: np.ndarray, scale: float, dtype: np.dtype) -> np.ndarray:
    """Return a matrix B times the adapter's scale, computed in float32 and rounded once to `dtype`."""
    # `check_adapter` reports an overflow with the module's name.
    with np.errstate(over="ignore"):
        return (b.astype(np.float32) * np.float32(scale)).astype(dtype)


def check_adapter(adapter: LoadedAdapter, slots: LoraSlots, modules: Iterable[str], dtype: np.dtype) -> None:
    """Check that the graphs have room for an adapter and its numbers fit their precision.

    modules: those of the whole model that take adapters. dtype: of the graphs. Raises InputError.
    """
    available = set(modules)
    prefix = f"adapter {adapter.name!r} ({adapter.where})"
    if adapter.rank > slots.max_lora_rank:
        raise InputError(
            f"{prefix}: expected a rank of at most {slots.max_lora_rank} (max_lora_rank), found {adapter.rank}; raise "
            "the limit and export again"
        )
    for module, (a, b) in adapter.modules.items():
        if module not in available:
            kinds = sorted({name.rpartition(".")[2] for name in available})
            actual = module
            for nearest in difflib.get_close_matches(module, sorted(available), n=1):
                actual += f"; the nearest is {nearest}"
            raise InputError(
                f"{prefix}: expected modules that take adapters ({', '.join(kinds)}), found {actual}; widen "
                "lora_target_modules and export again, or use an adapter without it"
            )
        matrices = {"lora_A": a.astype(dtype), "lora_B": scaled(b, adapter.scale_of(module), dtype)}
        for label, array in matrices.items():
            if not np.isfinite(array.astype(np.float32)).all():
                raise InputError(
                    f"{prefix}: {module}.{label}: expected numbers that fit {dtype.name}, found one that overflows; "
                    "use another precision"
                )


def write_adapter(
    adapter: LoadedAdapter | None, adapter_slot: int, max_lora_rank: int, arrays: Iterable[LoraArrays]
) -> None:
    """Write an adapter to its slot in all arrays, zeros where it has no module or a smaller rank, and for None."""
    first = adapter_slot * max_lora_rank
    columns = slice(first, first + max_lora_rank)
    for layer in arrays:
        # The slot may hold an earlier adapter, of a larger rank or of more modules.
        layer.a[:, columns] = 0
        layer.b[columns] = 0
        if adapter is not None and layer.module in adapter.modules:
            a, b = adapter.modules[layer.module]
            layer.a[:, first : first + len(a)] = a.T
            layer.b[first : first + len(a)] = scaled(b, adapter.scale_of(layer.module), layer.b.dtype).T
