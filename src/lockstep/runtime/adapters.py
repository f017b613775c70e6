"""The LoRA adapters of a running model: which are loaded, which are resident, and the arrays they are written to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lockstep.artifacts.adapters import LoraSlots
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.dtypes import named_dtype
from lockstep.errors import InputError
from lockstep.runtime.binding import adapted_modules, lora_arrays
from lockstep.runtime.request import adapter_of
from lockstep.step.advance import Executor
from lockstep.step.network import Network
from lockstep.step.residency import Residency
from lockstep.weights.adapters import LoadedAdapter, LoraArrays, check_adapter, open_adapters, write_adapter


class Adapters:
    """The adapters of a model, of all its checkpoints.

    `residency` assigns an adapter to each request slot; `load` makes those resident. That writes their weights into
    arrays which the blocks of all networks read, so nothing is rebuilt.

    Attributes:
        lost: By checkpoint and name, why an adapter of an earlier process is not loaded.
    """

    def __init__(
        self, assembly: Assembly, slots: LoraSlots, networks: Sequence[Sequence[LoraArrays]], executor: Executor
    ):
        self.loaded: dict[str, LoadedAdapter] = {}
        self.lost: dict[str, dict[str, str]] = {}
        self.residency = Residency(executor.num_slots, slots.max_adapters)
        self._slots = slots
        self.arrays = networks[0]
        self._modules = adapted_modules(assembly)
        self._dtype = named_dtype(assembly.dtype)
        rank = slots.max_lora_rank
        adapter_slots = self.residency.places  # the array itself: `Residency` writes to it between steps
        # An executor on a device writes them there; arrays on the host are written here.
        self._writer = executor.take_adapters(networks, rank, adapter_slots) or _HostWriter(self.arrays, rank)

    @classmethod
    def open(
        cls,
        manifests: Mapping[str, str | os.PathLike | None],
        assembly: Assembly,
        networks: Sequence[Network],
        executor: Executor,
        restarted: bool = False,
    ) -> Adapters | None:
        """Open the adapters of manifests, by checkpoint (None: start without adapters); None for a model without slots.

        restarted: leave out those whose files are gone. Raises InputError for an adapter that does not fit the graphs.
        """
        slots = assembly.adapters
        paths = {checkpoint: path for checkpoint, path in manifests.items() if path is not None}
        if slots is None:
            for path in paths.values():
                raise InputError(
                    f"{path}: expected a model whose graphs take adapters, found one without; give its `adapters` in "
                    "the config and export again"
                )
            return None
        adapters = cls(assembly, slots, [lora_arrays(assembly, network) for network in networks], executor)
        for checkpoint, path in paths.items():
            lost = adapters.lost.setdefault(checkpoint, {}) if restarted else None
            for name, adapter in open_adapters(path, lost).items():
                adapters.add(replace(adapter, name=adapter_of(checkpoint, name)))
        return adapters

    def add(self, adapter: LoadedAdapter) -> None:
        """Add an adapter. Raises InputError if it does not fit the graphs, or its name is taken."""
        if adapter.name in self.loaded:
            raise InputError(f"adapter {adapter.name!r}: expected one of this name, found another; rename it")
        check_adapter(adapter, self._slots, self._modules, self._dtype)
        self._writer.prepare(adapter)
        self.loaded[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Remove an adapter, which no request uses. Raises InputError for an unknown name."""
        self.check(name)
        self.residency.drop(name)
        self._writer.forget(self.loaded.pop(name))

    @property
    def most_bytes(self) -> int:
        """Return an upper bound of the file size of an adapter: 8-byte numbers of the largest rank, and a header."""
        sizes = (arrays.a.shape[arrays.a_by_rows] + arrays.b.shape[1] for arrays in self.arrays)
        numbers = sum(sizes) * self._slots.max_lora_rank
        return 8 * numbers + (1 << 20)

    def check(self, name: str | None) -> None:
        if name is not None and name not in self.loaded:
            raise unknown_adapter(name, self.loaded)

    def digest(self, name: str | None) -> str | None:
        """Return the hex sha256 of an adapter's weights and parameters."""
        return None if name is None else self.loaded[name].sha256

    def load(self) -> None:
        """Write the adapters that `residency` has given a place since the last step."""
        loading = self.residency.loading
        while loading:
            adapter_slot = min(loading)
            self._writer.write(self.loaded[loading[adapter_slot]], adapter_slot)
            del loading[adapter_slot]  # after the write: one that fails is tried again at the next step

    @property
    def nbytes(self) -> int:
        return sum(arrays.a.nbytes + arrays.b.nbytes for arrays in self.arrays)


class _HostWriter:
    """Writes adapters into NumPy arrays, which it clears first."""

    def __init__(self, arrays: Sequence[LoraArrays], max_lora_rank: int):
        self.arrays = arrays
        self._rank = max_lora_rank
        for block_arrays in arrays:
            block_arrays.a[...] = 0
            block_arrays.b[...] = 0

    def prepare(self, adapter: LoadedAdapter) -> None:
        """Do nothing: adapters are written from the arrays that were read."""

    def write(self, adapter: LoadedAdapter, adapter_slot: int) -> None:
        write_adapter(adapter, adapter_slot, self._rank, self.arrays)

    def forget(self, adapter: LoadedAdapter) -> None:
        """Do nothing: there is no copy."""


def unknown_adapter(name: str, available: Mapping[str, object] | Sequence[str]) -> InputError:
    names = ", ".join(sorted(available)) or "none, for the model has no adapters"
    return InputError(f"adapter: expected one of {names}; found {name!r}")
