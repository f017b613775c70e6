"""The inputs of a pass: packed prompts, behind a token of each of some slots that decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep.gpu import cuda
from lockstep.gpu.attention.base import Chunks, PassTokens
from lockstep.gpu.staging import Staging
from lockstep.step.advance import Advance
from lockstep.step.packing import PackedTokens

# Tokens of a pass up to which its blocks are captured, on one rank and on several: the host makes the calls of all. Of
# larger ones products take longer. Up to the last, a pass that comes often is captured whole, which saves the device a
# wait between graphs: a tenth of the shortest.
CAPTURED_TOKENS = 1280
CAPTURED_TOKENS_OF_RANKS = 2560
CAPTURED_WHOLE = 320


@dataclass(frozen=True)
class Inputs:
    """Device arrays that the engines and kernels of a pass read.

    By token: token_ids, position_ids, rows (int32: the slot whose cache the token goes into, or -1) and adapter_ids
    (the slot of its adapter, or -1). By request: logit_rows (the token whose logits are asked for), slots (int32:
    whose next token they are, or -1) and held (that token's position).
    """

    token_ids: cuda.Array
    position_ids: cuda.Array
    rows: cuda.Array
    logit_rows: cuda.Array
    slots: cuda.Array
    held: cuda.Array
    adapter_ids: cuda.Array

    def values(self) -> dict[str, cuda.Array]:
        """Return what blocks read, by name."""
        names = ("token_ids", "position_ids", "logit_rows", IDS)
        return {name: getattr(self, name) for name in names}


class PromptInputs:
    """Device arrays for `num_tokens` tokens of up to `slots` requests.

    captured_tokens: a pass of up to so many is padded to one of few sizes, so that few graphs serve all. What is added
    are tokens that go into no cache.
    """

    def __init__(self, num_tokens: int, slots: int, integer: np.dtype, captured_tokens: int, stream: cuda.Stream):
        self._num_tokens = num_tokens
        self._slots = slots
        self._captured_tokens = captured_tokens
        self._stream = stream
        by_token = (num_tokens,)
        by_request = (slots,)
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
        self._decoding = cuda.zeros(by_request, "i4")  # see `PassTokens`
        arrays = [*vars(self.arrays).values(), self._decoding]
        self._staging = Staging(sum(array.nbytes for array in arrays), len(arrays))

    def send(
        self, chunks: Sequence[Advance], write: bool = True, adapters: np.ndarray | None = None
    ) -> tuple[Inputs, PassTokens]:
        """Put the tokens of `chunks` on the device.

        Returns what the pass reads, and what attention is told of it. write: False for a pass that leaves caches and
        tokens as they are. adapters: the adapter slot of each request slot, where blocks take them.
        """
        packed = PackedTokens.empty(self._padded(sum(len(chunk.tokens) for chunk in chunks)))
        places = packed.pack([], [], 0, chunks)
        last = np.array([high - 1 for _, high in places])
        slots = np.array([chunk.slot if write else -1 for chunk in chunks])
        rows = packed.slots if write else np.full_like(packed.slots, -1)
        inputs, decoding = self._send(packed, rows, last, slots, adapters, np.empty(0, np.int64))
        return inputs, PassTokens(inputs.rows, 0, decoding, _places(chunks, places))

    def send_mixed(
        self,
        decoding: Sequence[Advance],
        chunks: Sequence[Advance],
        found: cuda.Array,
        adapters: np.ndarray | None,
        write: bool = True,
    ) -> tuple[Inputs, PassTokens]:
        """Put a step on the device whose first tokens are of slots that decode.

        These are the slots up to the highest that decodes, of which some may not decode; then come the tokens of
        `chunks`. The requests are all slots up to the highest of the step, and a few more. found: by slot what the step
        before finds, which rows go on with whose token is `FOUND`. adapters, write, and what is returned: as of `send`.
        """
        chosen = [advance.slot for advance in decoding]
        in_step = [*chosen, *(chunk.slot for chunk in chunks)]
        brought = sum(len(chunk.tokens) for chunk in chunks)
        count = 1 + max(chosen)
        requests = bucket(1 + max(in_step), self._slots)
        packed = PackedTokens.empty(self._padded(count + brought))
        places = packed.pack(decoding, chosen, count, chunks)
        last = np.zeros(requests, np.int64)
        slots = np.full(requests, -1)
        rows = np.full_like(packed.slots, -1)
        decodes = np.full(bucket(count, self._slots), -1)
        last[in_step] = [high - 1 for _, high in places]
        if write:
            slots[in_step] = in_step
            rows = packed.slots
            decodes[chosen] = chosen
        inputs, sent = self._send(packed, rows, last, slots, adapters, decodes)
        if decoding[0].tokens[0] < 0:
            self._stream.copy(inputs.token_ids[:count], found)
        places = [(low - count, high - count) for low, high in places[len(decoding) :]]
        return inputs, PassTokens(inputs.rows, count, sent, _places(chunks, places))

    def _padded(self, tokens: int) -> int:
        """Return the tokens of a pass of so many, padded where its blocks are captured."""
        padded = min(padded_size(tokens), self._num_tokens)
        return padded if padded <= self._captured_tokens else tokens

    def _send(
        self,
        packed: PackedTokens,
        rows: np.ndarray,
        last: np.ndarray,
        slots: np.ndarray,
        adapters: np.ndarray | None,
        decodes: np.ndarray,
    ) -> tuple[Inputs, cuda.Array]:
        """Put a packed step on the device, and decodes; rows by token, last, slots and decodes by request: `Inputs`."""
        values = {
            "token_ids": packed.token_ids,
            "position_ids": packed.position_ids,
            "rows": rows,
            "logit_rows": last,
            "slots": slots,
            "held": np.where(slots >= 0, packed.position_ids[last], 0),
        }
        if adapters is not None:
            values[IDS] = packed.adapter_ids(adapters)
        arrays = {name: getattr(self.arrays, name)[: len(array)] for name, array in values.items()}
        decoding = self._decoding[: len(decodes)]
        sent = [(arrays[name], array) for name, array in values.items()]
        self._staging.send(self._stream, [*sent, (decoding, decodes)] if len(decodes) else sent)
        return Inputs(**{IDS: self.arrays.adapter_ids[: len(rows)]} | arrays), decoding


def bucket(count: int, rows: int) -> int:
    """Return the next power of two, at most `rows`."""
    return min(1 << (count - 1).bit_length(), rows)


def captured_sizes(most: int) -> list[int]:
    """Return the sizes to which captured passes of up to `most` tokens are padded."""
    return sorted({padded_size(count) for count in range(2, most + 1)})


def padded_size(count: int) -> int:
    """Return the next power of two, from 32 on the next multiple of 32, and from 512 on of 128."""
    if 0 < count < 32:
        return 1 << (count - 1).bit_length()
    step = 32 if count < 512 else 128
    return -(-count // step) * step


def _places(chunks: Sequence[Advance], places: Sequence[tuple[int, int]]) -> Chunks:
    """Return each chunk as (slot, start, first packed token, token behind the last)."""
    return [(chunk.slot, chunk.start, low, high) for chunk, (low, high) in zip(chunks, places)]
