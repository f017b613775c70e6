"""A model that runs: an engine set bound to weights, a KV cache, and the one `step` that everything else is made of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.engine import EngineSet
from lockstep.errors import InputError
from lockstep.runtime.kv_cache import KVCache
from lockstep.runtime.network import Network, open_network
from lockstep.runtime.plan import Layout, Plan
from lockstep.runtime.step import Advance, check, lay_out

_KEPT_PLANS = 8


class Model:
    """Requests live in slots 0 to max_batch_size-1. Not for several threads at once: the backend itself uses all that it is given."""

    def __init__(self, network: Network, cache: KVCache, max_num_tokens: int | None, engines: EngineSet, layers: int):
        self.engines = engines
        self.layers = layers
        self.vocab_size = network.vocab_size
        self.max_batch_size = cache.rows
        self.max_seq_len = cache.max_seq_len
        self.max_num_tokens = max_num_tokens
        self.eos_token_ids = tuple(engines.assembly["eos_token_ids"])
        self._network = network
        self._cache = cache
        self._plans: dict[Layout, Plan] = {}

    @classmethod
    def open(
        cls,
        engines_json: str | os.PathLike,
        assembly_json: str | os.PathLike,
        weights_json: str | os.PathLike,
        layers: int | str = "all",
        max_batch_size: int = 4,
        max_seq_len: int = 256,
        max_num_tokens: int | None = None,
        threads: int | None = None,
        low_memory: bool = False,
    ) -> Model:
        """Open engines, weights and cache for the first `layers` layers.

        `low_memory` reads the weights from the mapped files at each step instead of a repacked copy: slower, no copy.
        Raises InputError for limits or a layer count that the model does not allow, CheckError for engines that do not fit here.
        """
        engines = EngineSet.open(engines_json, assembly_json)
        allowed = engines.assembly["max_position_embeddings"]
        if allowed is not None and max_seq_len > allowed:
            raise InputError(f"max_seq_len: expected at most {allowed} (max_position_embeddings of {Path(assembly_json)}), found {max_seq_len}")
        for name, value in (("max_batch_size", max_batch_size), ("max_seq_len", max_seq_len)):
            if value < 1:
                raise InputError(f"{name}: expected at least 1, found {value}")
        network = open_network(engines, weights_json, layers, threads, low_memory)
        cache = KVCache([kind.cache for _, kind in network.layers], max_batch_size, max_seq_len, network.dtype)
        return cls(network, cache, max_num_tokens, engines, len(network.layers))

    def step(self, advances: Sequence[Advance]) -> np.ndarray:
        """Advance any mix of requests by one or several tokens each.

        Gives the logits that follow each request's last token, [len(advances), vocab_size] float32, in the order of the list.
        Raises InputError, and changes nothing, for a slot out of range or named twice, a start other than 0 or the slot's
        length, a token outside the vocabulary, no token, or more than max_seq_len or max_num_tokens.
        """
        cache = self._cache
        check(advances, cache, self.vocab_size, self.max_num_tokens)
        for advance in advances:
            if not advance.start:
                cache.reset(advance.slot)
        if cache.reserve(max(advance.start + len(advance.tokens) for advance in advances)):
            self._plans.clear()
        layout = lay_out(advances)
        plan = self._plan(layout)
        rows = _pack(plan, advances)
        plan.run()
        plan.write_decoded(rows)
        for advance in advances:
            cache.lengths[advance.slot] = advance.start + len(advance.tokens)
        return plan.logits.astype(np.float32)

    def length(self, slot: int) -> int:
        """Tokens that the slot holds."""
        return int(self._cache.lengths[slot])

    def release(self, slot: int) -> None:
        """Forget what the slot holds, so that its memory may shrink. A new request at start 0 does the same."""
        self._cache.reset(slot)

    def _plan(self, layout: Layout) -> Plan:
        """Decode steps come again and again with one layout: their plans are kept. A prompt's is used once."""
        plan = self._plans.get(layout)
        if plan is None:
            plan = Plan(self._network, self._cache, layout)
            if not layout.chunks:
                while len(self._plans) >= _KEPT_PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[layout] = plan
        return plan


def _pack(plan: Plan, advances: Sequence[Advance]) -> np.ndarray:
    """Fill the plan's token ids, positions and logit rows; gives the cache rows that decode, ascending."""
    layout, rows, offset = plan.layout, [], plan.layout.num_decode
    if layout.num_decode > sum(len(advance.tokens) == 1 for advance in advances):
        plan.token_ids[: layout.num_decode] = 0  # rows between that do not decode: token 0 at position 0, past length 0
        plan.position_ids[: layout.num_decode] = 0
    for i, advance in enumerate(advances):
        count = len(advance.tokens)
        if count == 1:
            first = advance.slot - layout.low
            rows.append(advance.slot)
            plan.token_ids[first] = advance.tokens[0]
            plan.position_ids[first] = advance.start
        else:
            first, offset = offset, offset + count
            plan.token_ids[first:offset] = advance.tokens
            plan.position_ids[first:offset] = np.arange(advance.start, advance.start + count)
        plan.logit_rows[i] = first + count - 1
    return np.array(sorted(rows), np.int64)
