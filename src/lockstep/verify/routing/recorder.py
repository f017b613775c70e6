"""Record inputs and outputs of an engine set's blocks while the runtime runs them.

Steps in; for each token of a request the rows of each block, out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.step.advance import PackedTokens
from lockstep.verify.arrays import concatenate_rows, take_rows

Arrays = dict[str, np.ndarray]
BlockKey = tuple[str, int]  # part ("block" or "exit") and token mixer


@dataclass
class BlockRows:
    """Rows of a block. positions [rows] int64: of their tokens."""

    positions: np.ndarray
    inputs: Arrays
    outputs: Arrays

    @classmethod
    def joined(cls, pieces: Sequence[BlockRows]) -> BlockRows:
        positions = np.concatenate([piece.positions for piece in pieces])
        inputs = concatenate_rows([piece.inputs for piece in pieces])
        outputs = concatenate_rows([piece.outputs for piece in pieces])
        return cls(positions, inputs, outputs)

    def before(self, position: int) -> BlockRows:
        rows = self.positions < position
        inputs = take_rows(self.inputs, rows)
        outputs = take_rows(self.outputs, rows)
        return BlockRows(self.positions[rows], inputs, outputs)


@dataclass
class Recorded:
    """A request: its tokens from position `start` on, and the rows of its blocks."""

    start: int
    ids: list[int] = field(default_factory=list)
    pieces: dict[BlockKey, list[BlockRows]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def blocks(self) -> dict[BlockKey, BlockRows]:
        return {key: BlockRows.joined(pieces) for key, pieces in self.pieces.items()}


class Recorder:
    """An observer of steps. names_by_block: the blocks to record, with their inputs that have a row for each token."""

    def __init__(self, names_by_block: Mapping[BlockKey, Sequence[str]]):
        self._names_by_block = names_by_block
        self._current: dict[int, Recorded] = {}  # {slot: request}
        self._requests: list[Recorded] = []
        self._whole: Recorded | None = None  # the last request without a reused prefix
        self._tokens: PackedTokens | None = None

    def step(self, tokens: PackedTokens) -> None:
        self._tokens = tokens
        for slot, position, token in zip(
            tokens.slots.tolist(), tokens.position_ids.tolist(), tokens.token_ids.tolist()
        ):
            if slot < 0:
                continue
            # A new request in this slot begins at 0, or after a reused prefix of another length.
            if position == 0 or slot not in self._current or self._current[slot].end != position:
                self._current[slot] = Recorded(position)
                self._requests.append(self._current[slot])
            self._current[slot].ids.append(token)

    def block(self, part: str, layer: int, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        names = self._names_by_block.get((part, layer))
        if names is None:
            return
        assert self._tokens is not None  # a step begins with its tokens
        row_numbers = np.arange(len(self._tokens.slots))
        if part == "exit":
            row_numbers = inputs["logit_rows"]
        slots = self._tokens.slots[row_numbers]
        for slot in sorted(set(slots.tolist()) - {-1}):
            slot_rows = np.flatnonzero(slots == slot)
            rows = row_numbers[slot_rows]
            piece = BlockRows(
                self._tokens.position_ids[rows],
                {name: _in_float32(inputs[name][rows]) for name in names},
                {name: _in_float32(array[slot_rows]) for name, array in outputs.items()},
            )
            self._current[slot].pieces.setdefault((part, layer), []).append(piece)

    def take(self, ids: Sequence[int]) -> dict[BlockKey, BlockRows]:
        """Return the blocks of a request with these tokens, and forget it. Empty without one.

        The rows of a reused prefix are those of the last whole request, where that has the same prefix.
        """
        request_ids = list(ids)
        for number, request in enumerate(self._requests):
            if request.ids == request_ids[request.start :]:
                del self._requests[number]
                break
        else:
            return {}
        blocks = request.blocks()
        previous = self._whole
        if not request.start:
            self._whole = request
        elif previous is not None and previous.ids[: request.start] == request_ids[: request.start]:
            earlier = {key: rows.before(request.start) for key, rows in previous.blocks().items()}
            return {key: BlockRows.joined([rows, blocks[key]]) for key, rows in earlier.items() if key in blocks}
        return blocks

    def clear(self) -> None:
        """Forget requests that were not taken."""
        self._requests.clear()


def _in_float32(array: np.ndarray) -> np.ndarray:
    """Return floating-point numbers, bfloat16 among them, as float32."""
    if array.dtype.kind in "biu":
        return array
    return array.astype(np.float32)
