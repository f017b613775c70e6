"""What a pass of prompts reads: their tokens, packed one prompt after another, and where each begins and goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep.backends.tensorrt import cuda
from lockstep.backends.tensorrt.attention import Chunks
from lockstep.backends.tensorrt.staging import Staging
from lockstep.step.advance import Advance


@dataclass(frozen=True)
class Inputs:
    """Device arrays that the engines and kernels of a pass read: by token token_ids, position_ids, rows (int32: the
    slot whose cache the token goes into, or -1) and adapter_ids (the place of its adapter, or -1), by request
    logit_rows (the token whose logits are asked for), slots (int32: whose next token they are, or -1) and held (that
    token's position)."""

    token_ids: cuda.Array
    position_ids: cuda.Array
    rows: cuda.Array
    logit_rows: cuda.Array
    slots: cuda.Array
    held: cuda.Array
    adapter_ids: cuda.Array

    def values(self) -> dict[str, cuda.Array]:
        """What blocks read, by name."""
        names = ("token_ids", "position_ids", "logit_rows", IDS)
        return {name: getattr(self, name) for name in names}


class PromptInputs:
    """Room for `num_tokens` tokens of up to `slots` prompts."""

    def __init__(self, num_tokens: int, slots: int, integer: np.dtype):
        by_token, by_request = (num_tokens,), (slots,)
        # Of as many tokens and prompts as there may be: those of a pass begin where these begin.
        self.arrays = Inputs(
            token_ids=cuda.zeros(by_token, integer),
            position_ids=cuda.zeros(by_token, integer),
            rows=cuda.zeros(by_token, "i4"),
            logit_rows=cuda.zeros(by_request, integer),
            slots=cuda.zeros(by_request, "i4"),
            held=cuda.zeros(by_request, integer),
            adapter_ids=cuda.zeros(by_token, integer),
        )
        arrays = vars(self.arrays).values()
        self._staging = Staging(sum(array.nbytes for array in arrays), len(arrays))

    def send(
        self, chunks: Sequence[Advance], stream: cuda.Stream, write: bool = True, adapters: np.ndarray | None = None
    ) -> tuple[Inputs, Chunks]:
        """Put the tokens of `chunks` on the device; gives what the pass reads, and each chunk as (slot, start, first
        packed token, token behind the last). write: False for a pass that leaves caches and tokens as they are.
        adapters: the place of each slot's adapter, where blocks take them."""
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks])
        places = [(chunk.slot, chunk.start, int(end) - len(chunk.tokens), int(end)) for chunk, end in zip(chunks, ends)]
        slots = np.array([chunk.slot if write else -1 for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks])
        counts = [len(chunk.tokens) for chunk in chunks]
        values = {
            "token_ids": np.concatenate([chunk.tokens for chunk in chunks]),
            "position_ids": positions,
            "rows": np.repeat(slots, counts),
            "logit_rows": ends - 1,
            "slots": slots,
            "held": positions[ends - 1],
        }
        if adapters is not None:
            values[IDS] = np.repeat(adapters[[chunk.slot for chunk in chunks]], counts)
        unsent = {IDS: self.arrays.adapter_ids[: sum(counts)]}
        used = Inputs(**unsent | {name: getattr(self.arrays, name)[: len(array)] for name, array in values.items()})
        self._staging.send(stream, [(getattr(used, name), array) for name, array in values.items()])
        return used, places
