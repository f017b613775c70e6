"""The adapters of a running model.

Which there are, which are resident, and which arrays their numbers are written to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.artifacts.adapters import LoraSlots
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.dtypes import named_dtype
from lockstep.errors import InputError
from lockstep.runtime.binding import adapted_modules, lora_arrays
from lockstep.step.advance import Executor
from lockstep.step.network import Network
from lockstep.step.residency import Residency
from lockstep.weights.adapters import LoadedAdapter, LoraArrays, check_adapter, open_adapters, write_adapter


class Adapters:
    """The adapters of a model, and those that are resident.

    `residency` says which adapter each slot is computed with; `load` brings those that it asks for. Loading an adapter
    writes its numbers into arrays that the blocks read: nothing is built again.
    """

    def __init__(self, assembly: Assembly, slots: LoraSlots, arrays: Sequence[LoraArrays], executor: Executor):
        self.known: dict[str, LoadedAdapter] = {}
        self.residency = Residency(executor.num_slots, slots.max_adapters)
        self._slots = slots
        self._arrays = arrays
        self._modules = adapted_modules(assembly)
        self._dtype = named_dtype(assembly.dtype)
        rank = slots.max_lora_rank
        adapter_slots = self.residency.adapter_slots
        self._writer = executor.take_adapters(arrays, rank, adapter_slots) or _HostWriter(arrays, rank)

    @classmethod
    def open(
        cls, path: str | os.PathLike | None, assembly: Assembly, network: Network, executor: Executor
    ) -> Adapters | None:
        """Open the adapters of the manifest `path`; None for a model that takes none.

        `path` may be None: then there are none at first. executor: runs `network`. Raises InputError for an adapter
        that does not fit the graphs.
        """
        slots = assembly.adapters
        if slots is None:
            if path is not None:
                raise InputError(
                    f"{path}: expected a model whose graphs take adapters, found one without; give its `adapters` in "
                    "the config and export again"
                )
            return None
        adapters = cls(assembly, slots, lora_arrays(assembly, network), executor)
        for adapter in (open_adapters(path) if path is not None else {}).values():
            adapters.add(adapter)
        return adapters

    def add(self, adapter: LoadedAdapter) -> None:
        """Have requests be computed with one more adapter.

        Raises InputError where it does not fit the graphs, or another has its name.
        """
        if adapter.name in self.known:
            raise InputError(f"adapter {adapter.name!r}: expected one of this name, found another; rename it")
        check_adapter(adapter, self._slots, self._modules, self._dtype)
        self._writer.prepare(adapter)
        self.known[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Forget an adapter, which no request is computed with.

        Raises InputError for a name that is no adapter's.
        """
        self.check(name)
        self.residency.drop(name)
        self._writer.forget(self.known.pop(name))

    @property
    def most_bytes(self) -> int:
        """Return the most bytes of the file of an adapter of the largest rank.

        That is two matrices of numbers of 8 bytes a module, and names.
        """
        sizes = (each.a.shape[each.a_by_rows] + each.b.shape[1] for each in self._arrays)
        numbers = sum(sizes) * self._slots.max_lora_rank
        return 8 * numbers + (1 << 20)

    def check(self, name: str | None) -> None:
        """Check the name of an adapter. Raises InputError for an unknown one."""
        if name is not None and name not in self.known:
            raise unknown_adapter(name, self.known)

    def digest(self, name: str | None) -> str | None:
        """Return the hex sha256 of what an adapter computes."""
        return None if name is None else self.known[name].sha256

    def load(self) -> None:
        """Write the adapters that the residency asks for."""
        loading = self.residency.loading
        while loading:
            adapter_slot = min(loading)
            self._writer.write(self.known[loading[adapter_slot]], adapter_slot)
            del loading[adapter_slot]

    @property
    def nbytes(self) -> int:
        """Return the memory of what is resident, or has room to be, in bytes."""
        return sum(array.nbytes for each in self._arrays for array in (each.a, each.b))

    @property
    def adapter_slots(self) -> np.ndarray:
        return self.residency.adapter_slots


class _HostWriter:
    """Writes adapters into NumPy arrays, which it clears first."""

    def __init__(self, arrays: Sequence[LoraArrays], max_lora_rank: int):
        self._arrays = arrays
        self._rank = max_lora_rank
        for each in arrays:
            each.a[...] = 0
            each.b[...] = 0

    def prepare(self, adapter: LoadedAdapter) -> None:
        """Do nothing: each is written from what was read."""

    def write(self, adapter: LoadedAdapter, adapter_slot: int) -> None:
        write_adapter(adapter, adapter_slot, self._rank, self._arrays)

    def forget(self, adapter: LoadedAdapter) -> None:
        """Do nothing: nothing was kept."""


def unknown_adapter(name: str, known: Mapping[str, object] | Sequence[str]) -> InputError:
    """Return the error of a request for an adapter that is not there."""
    there = ", ".join(sorted(known)) or "none, for the model has no adapters"
    return InputError(f"adapter: expected one of {there}; found {name!r}")
