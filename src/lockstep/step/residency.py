"""Which of many things that requests name are resident, in a few places: the policy, without tensors.

The things are adapters, or checkpoints. A request holds its own while it has a slot. One that no request holds stays
resident until another one needs its place; the least recently used one is evicted.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class Residency:
    """Assigns places to names, with LRU eviction.

    Attributes:
        places: int64, by request slot: the place of what its request names, or -1.
        loading: {place: name} of names whose contents must be written before the next step.
    """

    def __init__(self, num_slots: int, num_places: int):
        self.num_places = num_places
        self.places = np.full(num_slots, -1, np.int64)
        self.loading: dict[int, str] = {}
        self.loads = 0
        self.place_of: OrderedDict[str, int] = OrderedDict()  # by name, least recently used first

    def claim(self, slot: int, name: str | None) -> bool:
        """Give a slot's request a name, or none. Return False, and change nothing, if no place is free."""
        if name is None:
            self.places[slot] = -1
            return True
        place = self.place_of.get(name)
        if place is None:
            place = self._free_place(slot)
            if place is None:
                return False
            self._evict(place)
            self.place_of[name] = place
            self.loading[place] = name
            self.loads += 1
        self.place_of.move_to_end(name)
        self.places[slot] = place
        return True

    def move(self, slot: int, other: int) -> None:
        self.places[other] = self.places[slot]
        self.places[slot] = -1

    def release(self, slot: int) -> None:
        self.places[slot] = -1

    def can_claim(self, slot: int, name: str | None) -> bool:
        return name is None or name in self.place_of or self._free_place(slot) is not None

    @property
    def resident(self) -> list[str]:
        """Return the resident names, the least recently used one first."""
        return list(self.place_of)

    def drop(self, name: str) -> None:
        """Free the place of a name that no request holds, if it has one."""
        place = self.place_of.get(name)
        if place is not None:
            assert not (self.places == place).any()
            self.forget(place)

    def forget(self, place: int) -> None:
        """Forget the name of a place, because writing its contents failed."""
        self._evict(place)
        self.loading.pop(place, None)
        self.places[self.places == place] = -1

    def _evict(self, place: int) -> None:
        for name, resident_place in self.place_of.items():
            if resident_place == place:
                del self.place_of[name]
                return

    def _free_place(self, slot: int) -> int | None:
        """Return a free place, or that of the least recently used name that no other slot's request holds."""
        used = set(self.place_of.values())
        for place in range(self.num_places):
            if place not in used:
                return place
        in_use = {int(place) for other, place in enumerate(self.places) if other != slot}
        return next((place for place in self.place_of.values() if place not in in_use), None)
