"""The step on host arrays: plans over NumPy buffers, for backends without an executor of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from lockstep.artifacts.signature import IO, Signature
from lockstep.step.advance import Advance, lay_out
from lockstep.step.executable import Executable, HostExecutable
from lockstep.step.greedy import most_likely
from lockstep.step.kv_cache import KVCache
from lockstep.step.network import Network
from lockstep.step.plan import Layout, Plan

_KEPT_PLANS = 8


class HostExecutor:
    """Runs steps that are checked already. `lengths[slot]`: tokens that a slot holds."""

    ahead = False

    def __init__(self, network: Network, rows: int, max_seq_len: int):
        _check_declared(network)
        self.rows, self.max_seq_len = rows, max_seq_len
        self._network = network
        self._cache = KVCache([kind.cache for _, kind in network.layers], rows, max_seq_len, network.dtype)
        self._plans: dict[Layout, Plan] = {}

    @property
    def lengths(self) -> np.ndarray:
        return self._cache.lengths

    def reset(self, slot: int) -> None:
        """Forget what the slot holds, so that its memory may shrink."""
        self._cache.reset(slot)

    def logits(self, advances: Sequence[Advance]) -> np.ndarray:
        """Take a step; the logits that follow each request's last token, [len(advances), vocab_size] float32, in the
        order of the list."""
        if self._cache.reserve(max(advance.start + len(advance.tokens) for advance in advances)):
            self._plans.clear()
        plan = self._plan(lay_out(advances))
        rows = _pack(plan, advances)
        plan.run()
        plan.write_decoded(rows)
        return plan.logits.astype(np.float32)

    def tokens(self, advances: Sequence[Advance], more: bool) -> np.ndarray:
        """As `logits`: the most likely tokens, [len(advances)] int64; -1 where its logit is NaN or infinite."""
        return most_likely(self.logits(advances))

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


def _check_declared(network: Network) -> None:
    """Raises CheckError where an engine reads or makes something else than the assembly says: buffers are of the
    assembly's sizes. Dimensions that a step decides may have any name, or none."""
    declared: dict[Executable, Signature] = {block.run: block.signature for block, _ in network.layers}
    declared |= {block.run: block.signature for block in (network.embedding, network.exit)}
    for kind in {id(kind): kind for _, kind in network.layers}.values():
        declared |= {kind.engines[phase]: graph.signature for phase, graph in kind.variant.phases().items()}
    for executable, signature in declared.items():
        engine = cast(HostExecutable, executable)  # what this executor runs is on host arrays
        expected, found = (
            Signature(*(tuple(IO(name, dtype, _any_name(shape)) for name, dtype, shape in ios) for ios in sides))
            for sides in (
                [[(io.name, io.dtype, io.shape) for io in ios] for ios in (signature.inputs, signature.outputs)],
                [
                    [(name, value.dtype.name, value.shape) for name, value in values.items()]
                    for values in (engine.inputs, engine.outputs)
                ],
            )
        )
        expected.check(found, engine.where, "export and build again, or take another bundle")


def _any_name(shape: Sequence[int | str]) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else "any" for size in shape)


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
