"""Resident adapters, and the adapter of each slot's request.

Policy only: no tensors. A request holds its adapter from when it gets a slot until it leaves it. An adapter that no
request holds stays resident until another one needs its slot: the one that was left longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class Residency:
    """Assigns the slots of resident adapters, by least recent use.

    `adapter_slots[slot]`: the adapter slot of the request in a request slot, int64; -1 for none. `loading`: {adapter
    slot: adapter} of those that must be written there before the next step.
    """

    def __init__(self, num_slots: int, max_adapters: int):
        self.max_adapters = max_adapters
        self.adapter_slots = np.full(num_slots, -1, np.int64)
        self.loading: dict[int, str] = {}
        self.loads = 0
        self._resident: OrderedDict[str, int] = OrderedDict()  # by adapter; the one used longest ago first

    def claim(self, slot: int, adapter: str | None) -> bool:
        """Have a slot's request computed with an adapter, or with none.

        Returns False, and changes nothing, where all adapter slots are held by others.
        """
        if adapter is None:
            self.adapter_slots[slot] = -1
            return True
        adapter_slot = self._resident.get(adapter)
        if adapter_slot is None:
            adapter_slot = self._free_adapter_slot(slot)
            if adapter_slot is None:
                return False
            self._resident = OrderedDict((name, at) for name, at in self._resident.items() if at != adapter_slot)
            self._resident[adapter], self.loading[adapter_slot] = adapter_slot, adapter
            self.loads += 1
        self._resident.move_to_end(adapter)
        self.adapter_slots[slot] = adapter_slot
        return True

    def move(self, slot: int, other: int) -> None:
        """Have another slot's request computed with the adapter of a slot, which has none then."""
        self.adapter_slots[other] = self.adapter_slots[slot]
        self.adapter_slots[slot] = -1

    def release(self, slot: int) -> None:
        """Release the adapter of a slot whose request has ended."""
        self.adapter_slots[slot] = -1

    def can_claim(self, slot: int, adapter: str | None) -> bool:
        """Return whether `claim` would succeed."""
        return adapter is None or adapter in self._resident or self._free_adapter_slot(slot) is not None

    @property
    def resident(self) -> list[str]:
        """Return the resident adapters, the least recently used one first."""
        return list(self._resident)

    def drop(self, adapter: str) -> None:
        """Free the slot of an adapter that no request holds, if it has one."""
        adapter_slot = self._resident.get(adapter)
        if adapter_slot is not None:
            assert not (self.adapter_slots == adapter_slot).any()
            self.forget(adapter_slot)

    def forget(self, adapter_slot: int) -> None:
        """Forget the adapter of a slot: writing it failed."""
        self._resident = OrderedDict((name, at) for name, at in self._resident.items() if at != adapter_slot)
        self.loading.pop(adapter_slot, None)
        self.adapter_slots[self.adapter_slots == adapter_slot] = -1

    def _free_adapter_slot(self, slot: int) -> int | None:
        """Return an adapter slot that is free, or that of the least recently used adapter.

        That adapter is one that no request but this slot's holds. None where there is no such slot.
        """
        taken = set(self._resident.values())
        for adapter_slot in range(self.max_adapters):
            if adapter_slot not in taken:
                return adapter_slot
        held = {int(adapter_slot) for other, adapter_slot in enumerate(self.adapter_slots) if other != slot}
        return next((adapter_slot for adapter_slot in self._resident.values() if adapter_slot not in held), None)
