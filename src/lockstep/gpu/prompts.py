"""The inputs of a pass: packed prompts, behind a token of each of some slots that decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep.gpu import cuda
from lockstep.gpu.attention.base import Chunks
from lockstep.gpu.staging import Staging
from lockstep.step.advance import Advance
from lockstep.step.packing import PackedTokens

# Tokens of a pass up to which a 7B shape's products take less than the host's calls of them, which it makes for each
# rank; twice the ranks take half of the time, and twice the calls.
_HOST_BOUND_TOKENS = 320
_CAPTURED_TOKENS = 1280  # of passes that are captured whole: of larger ones, few come twice


@dataclass(frozen=True)
class Inputs:
    """Device arrays that the engines and kernels of a pass read.

    By token: token_ids, position_ids, rows (int32: the slot whose cache the token goes into, or -1) and adapter_ids
    (the slot of its adapter, or -1). By request: logit_rows (the token whose logits are asked for), slots (int32:
    whose next token they are, or -1) and held (that token's position). num_decoding: tokens in front, that of slot `i`
    at i, which decode.
    """

    token_ids: cuda.Array
    position_ids: cuda.Array
    rows: cuda.Array
    logit_rows: cuda.Array
    slots: cuda.Array
    held: cuda.Array
    adapter_ids: cuda.Array
    num_decoding: int = 0

    def values(self) -> dict[str, cuda.Array]:
        """Return what blocks read, by name."""
        names = ("token_ids", "position_ids", "logit_rows", IDS)
        return {name: getattr(self, name) for name in names}


class PromptInputs:
    """Device arrays for `num_tokens` tokens of up to `slots` requests.

    padded_tokens: a pass of up to so many is padded to one of few sizes, so that few captured ones serve all. What is
    added are rows that do not decode, and tokens that go into no cache. captured_tokens: of a pass that may be captured
    whole, with its attention.
    """

    def __init__(self, num_tokens: int, slots: int, integer: np.dtype, padded_tokens: int, stream: cuda.Stream):
        self._num_tokens, self._slots, self._padded_tokens = num_tokens, slots, padded_tokens
        self.captured_tokens = min(padded_tokens, _CAPTURED_TOKENS)
        self._stream = stream
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
        arrays = [array for array in vars(self.arrays).values() if isinstance(array, cuda.Array)]
        self._staging = Staging(sum(array.nbytes for array in arrays), len(arrays))

    def send(
        self, chunks: Sequence[Advance], write: bool = True, adapters: np.ndarray | None = None
    ) -> tuple[Inputs, Chunks]:
        """Put the tokens of `chunks` on the device.

        Returns what the pass reads, and each chunk as (slot, start, first packed token, token behind the last). write:
        False for a pass that leaves caches and tokens as they are. adapters: the adapter slot of each request slot,
        where blocks take them.
        """
        _, tokens, _ = self._sizes(0, sum(len(chunk.tokens) for chunk in chunks), 0)
        packed = PackedTokens.empty(tokens)
        places = packed.pack([], [], 0, chunks)
        last = np.array([high - 1 for _, high in places])
        slots = np.array([chunk.slot if write else -1 for chunk in chunks])
        rows = packed.slots if write else np.full_like(packed.slots, -1)
        return self._send(packed, rows, last, slots, adapters), _places(chunks, places)

    def send_mixed(
        self, decoding: Sequence[Advance], chunks: Sequence[Advance], found: cuda.Array, adapters: np.ndarray | None
    ) -> tuple[Inputs, Chunks]:
        """Put a step on the device whose first tokens are of slots that decode.

        These are the slots up to the highest that decodes, or a few more, of which some may not decode; then come the
        tokens of `chunks`. The requests are all slots up to the highest of the step, or a few more. found: by slot what
        the step before finds, which rows go on with whose token is `FOUND`. adapters, and what is returned: as of
        `send`; the chunks' packed tokens are counted behind those that decode.
        """
        chosen = [advance.slot for advance in decoding]
        in_step = [*chosen, *(chunk.slot for chunk in chunks)]
        brought = sum(len(chunk.tokens) for chunk in chunks)
        count, tokens, requests = self._sizes(1 + max(chosen), brought, 1 + max(in_step))
        packed = PackedTokens.empty(count + tokens)
        places = packed.pack(decoding, chosen, count, chunks)
        last, slots = np.zeros(requests, np.int64), np.full(requests, -1)
        last[in_step], slots[in_step] = [high - 1 for _, high in places], in_step
        inputs = self._send(packed, packed.slots, last, slots, adapters, count)
        if decoding[0].tokens[0] < 0:
            self._stream.copy(inputs.token_ids[:count], found)
        return inputs, _places(chunks, [(low - count, high - count) for low, high in places[len(decoding) :]])

    def _sizes(self, rows: int, tokens: int, requests: int) -> tuple[int, int, int]:
        """Return numbers of decoding rows, prompt tokens and requests, padded for a pass that is captured."""
        most_rows, most_requests = (min(padded_size(count), self._slots) for count in (rows, requests))
        most_tokens = min(padded_size(tokens), self._num_tokens - most_rows)
        if most_rows + most_tokens <= self.captured_tokens:
            return most_rows, most_tokens, most_requests
        total = min(padded_size(rows + tokens), self._num_tokens)
        if total <= self._padded_tokens:  # only blocks are captured, which read all tokens alike
            return rows, total - rows, requests
        return rows, tokens, requests

    def _send(
        self,
        packed: PackedTokens,
        rows: np.ndarray,
        last: np.ndarray,
        slots: np.ndarray,
        adapters: np.ndarray | None,
        num_decoding: int = 0,
    ) -> Inputs:
        """Put a packed step on the device; rows by token, last and slots by request: `Inputs`."""
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
        self._staging.send(self._stream, [(arrays[name], array) for name, array in values.items()])
        unsent = {IDS: self.arrays.adapter_ids[: len(rows)]}
        return Inputs(**unsent | arrays, num_decoding=num_decoding)


def host_bound_tokens(num_ranks: int) -> int:
    """Return the tokens of a pass up to which it is padded, and its blocks are captured."""
    return _HOST_BOUND_TOKENS * num_ranks**2


def captured_sizes(most: int) -> list[int]:
    """Return the sizes to which prompts are padded in captured passes of up to `most` tokens."""
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
