"""Resident adapters, and the adapter of each slot's request.

Policy only: no tensors. A request holds its adapter from when it gets a slot until it leaves it. An adapter that no
request holds stays resident until another one needs its place: the one that was left longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class Residency:
    """The place of each resident adapter, and the adapter of each slot.

    `places[slot]`: the place of the slot's adapter, int64; -1 for none. `loading`: {place: adapter} of those that must
    be written there before the next step.
    """

    def __init__(self, num_slots: int, max_adapters: int):
        self.max_adapters = max_adapters
        self.places = np.full(num_slots, -1, np.int64)
        self.loading: dict[int, str] = {}
        self.loads = 0
        self._resident: OrderedDict[str, int] = OrderedDict()  # by adapter; the one used longest ago first

    def claim(self, slot: int, adapter: str | None) -> bool:
        """Have a slot's request computed with an adapter, or with none.

        Returns False, and changes nothing, where all places are held by others.
        """
        if adapter is None:
            self.places[slot] = -1
            return True
        place = self._resident.get(adapter)
        if place is None:
            place = self._free_place(slot)
            if place is None:
                return False
            self._resident = OrderedDict((name, at) for name, at in self._resident.items() if at != place)
            self._resident[adapter], self.loading[place] = place, adapter
            self.loads += 1
        self._resident.move_to_end(adapter)
        self.places[slot] = place
        return True

    def release(self, slot: int) -> None:
        """Release the adapter of a slot whose request has ended."""
        self.places[slot] = -1

    def can_claim(self, slot: int, adapter: str | None) -> bool:
        """Return whether `claim` would succeed."""
        return adapter is None or adapter in self._resident or self._free_place(slot) is not None

    @property
    def resident(self) -> list[str]:
        """Return the adapters that have a place, least recently used first."""
        return list(self._resident)

    def drop(self, adapter: str) -> None:
        """Free the place of an adapter, if it has one; no slot holds it."""
        place = self._resident.get(adapter)
        if place is not None:
            assert not (self.places == place).any()
            self.forget(place)

    def forget(self, place: int) -> None:
        """Free a place: writing its adapter failed."""
        self._resident = OrderedDict((name, at) for name, at in self._resident.items() if at != place)
        self.loading.pop(place, None)
        self.places[self.places == place] = -1

    def _free_place(self, slot: int) -> int | None:
        """Return a place for another adapter; None where all are held.

        A place without an adapter, or that of the least recently used adapter which no other slot holds.
        """
        taken = set(self._resident.values())
        for place in range(self.max_adapters):
            if place not in taken:
                return place
        held = {int(place) for other, place in enumerate(self.places) if other != slot}
        return next((place for place in self._resident.values() if place not in held), None)
