"""Resident adapters, and the adapter of each slot's request: the policy, without tensors.

A request holds its adapter while it has a slot. An adapter that no request holds stays resident until another one needs
its adapter slot; the least recently used one is evicted.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class Residency:
    """Assigns adapter slots, with LRU eviction.

    Attributes:
        adapter_slots: int64, by request slot: the adapter slot of its request, or -1.
        loading: {adapter slot: adapter} of adapters that must be written before the next step.
    """

    def __init__(self, num_slots: int, max_adapters: int):
        self.max_adapters = max_adapters
        self.adapter_slots = np.full(num_slots, -1, np.int64)
        self.loading: dict[int, str] = {}
        self.loads = 0
        self.slot_of: OrderedDict[str, int] = OrderedDict()  # by adapter, least recently used first

    def claim(self, slot: int, adapter: str | None) -> bool:
        """Give a slot's request an adapter, or none. Return False, and change nothing, if no adapter slot is free."""
        if adapter is None:
            self.adapter_slots[slot] = -1
            return True
        adapter_slot = self.slot_of.get(adapter)
        if adapter_slot is None:
            adapter_slot = self._free_adapter_slot(slot)
            if adapter_slot is None:
                return False
            self._evict(adapter_slot)
            self.slot_of[adapter] = adapter_slot
            self.loading[adapter_slot] = adapter
            self.loads += 1
        self.slot_of.move_to_end(adapter)
        self.adapter_slots[slot] = adapter_slot
        return True

    def move(self, slot: int, other: int) -> None:
        self.adapter_slots[other] = self.adapter_slots[slot]
        self.adapter_slots[slot] = -1

    def release(self, slot: int) -> None:
        self.adapter_slots[slot] = -1

    def can_claim(self, slot: int, adapter: str | None) -> bool:
        return adapter is None or adapter in self.slot_of or self._free_adapter_slot(slot) is not None

    @property
    def resident(self) -> list[str]:
        """Return the resident adapters, the least recently used one first."""
        return list(self.slot_of)

    def drop(self, adapter: str) -> None:
        """Free the slot of an adapter that no request holds, if it has one."""
        adapter_slot = self.slot_of.get(adapter)
        if adapter_slot is not None:
            assert not (self.adapter_slots == adapter_slot).any()
            self.forget(adapter_slot)

    def forget(self, adapter_slot: int) -> None:
        """Forget the adapter of an adapter slot, because writing it failed."""
        self._evict(adapter_slot)
        self.loading.pop(adapter_slot, None)
        self.adapter_slots[self.adapter_slots == adapter_slot] = -1

    def _evict(self, adapter_slot: int) -> None:
        for adapter, resident_slot in self.slot_of.items():
            if resident_slot == adapter_slot:
                del self.slot_of[adapter]
                return

    def _free_adapter_slot(self, slot: int) -> int | None:
        """Return a free adapter slot, or that of the least recently used adapter that no other slot's request holds."""
        used = set(self.slot_of.values())
        for adapter_slot in range(self.max_adapters):
            if adapter_slot not in used:
                return adapter_slot
        in_use = {int(adapter_slot) for other, adapter_slot in enumerate(self.adapter_slots) if other != slot}
        return next((adapter_slot for adapter_slot in self.slot_of.values() if adapter_slot not in in_use), None)
