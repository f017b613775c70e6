"""The adapters of a running model: which there are, which are resident, and where their numbers go."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.artifacts.adapters import LoraSlots
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.dtypes import named_dtype
from lockstep.errors import InputError
from lockstep.runtime.binding import adapted_modules, lora_arrays
from lockstep.step.network import Network
from lockstep.step.residency import Residency
from lockstep.weights.adapters import LoadedAdapter, LoraArrays, check_adapter, open_adapters, write_adapter


class Adapters:
    """`residency` says which adapter each slot is computed with; `load` brings those that it asks for.

    Loading an adapter writes its numbers into arrays that the blocks read: nothing is built again.
    """

    def __init__(
        self, slots: LoraSlots, known: Mapping[str, LoadedAdapter], arrays: Sequence[LoraArrays], num_slots: int
    ):
        self.known = dict(known)
        self.residency = Residency(num_slots, slots.max_adapters)
        self._slots, self._arrays = slots, arrays

    @classmethod
    def open(
        cls, path: str | os.PathLike | None, assembly: Assembly, network: Network, num_slots: int
    ) -> Adapters | None:
        """The adapters of the manifest `path`, which may be none; None for a model whose graphs take none. Raises
        InputError for an adapter that does not fit the graphs."""
        slots = assembly.adapters
        if slots is None:
            if path is not None:
                raise InputError(
                    f"{path}: expected a model whose graphs take adapters, found one without; give its `adapters` in "
                    "the config and export again"
                )
            return None
        known = open_adapters(path) if path is not None else {}
        modules, dtype = adapted_modules(assembly), named_dtype(assembly.dtype)
        for adapter in known.values():
            check_adapter(adapter, slots, modules, dtype)
        return cls(slots, known, lora_arrays(assembly, network), num_slots)

    def check(self, name: str | None) -> None:
        """Raise InputError for a name that is no adapter's."""
        if name is not None and name not in self.known:
            raise unknown_adapter(name, self.known)

    def digest(self, name: str | None) -> str | None:
        """Hex sha256 of what an adapter computes."""
        return None if name is None else self.known[name].sha256

    def load(self) -> None:
        """Write the adapters that the residency asks for."""
        loading = self.residency.loading
        while loading:
            place = min(loading)
            write_adapter(self.known[loading[place]], place, self._slots.max_lora_rank, self._arrays)
            del loading[place]

    @property
    def nbytes(self) -> int:
        """Memory of what is resident, or has room to be."""
        return sum(array.nbytes for each in self._arrays for array in (each.a, each.b))

    @property
    def places(self) -> np.ndarray:
        return self.residency.places


def unknown_adapter(name: str, known: Mapping[str, object] | Sequence[str]) -> InputError:
    """The error of a request for an adapter that is not there."""
    there = ", ".join(sorted(known)) or "none, for the model has no adapters"
    return InputError(f"adapter: expected one of {there}; found {name!r}")
