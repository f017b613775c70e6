"""The inputs of a prefill pass: packed prompts, after one token of each slot that decodes in the same pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep.step.advance import Advance
from lockstep.step.packing import PackedTokens
from lockstep_gpu import cuda
from lockstep_gpu.attention.base import Chunks, PassTokens
from lockstep_gpu.staging import Staging

# Passes of up to this many tokens run their blocks as CUDA graphs, on one rank and on several, whose calls one host
# thread makes. In longer passes the GEMMs take longer than the host's launches. A frequent pass of up to CAPTURED_WHOLE
# tokens is captured as a single graph, which saves the gaps between graphs: a tenth of the shortest pass.
CAPTURED_TOKENS = 1280
CAPTURED_TOKENS_OF_RANKS = 2560
CAPTURED_WHOLE = 320


@dataclass(frozen=True)
class Inputs:
    """Device arrays that the engines and kernels of a pass read.

    Attributes:
        token_ids, position_ids: [num_tokens].
        rows: [num_tokens] int32: the slot whose cache the token goes into, or -1.
        logit_rows: [num_requests]: the token whose logits are computed.
        slots: [num_requests] int32: the slot whose next token follows from these logits, or -1.
        logit_positions: [num_requests]: the position of the token in `logit_rows`.
        adapter_ids: [num_tokens]: the adapter slot of the token's request, or -1.
    """

    token_ids: cuda.Array
    position_ids: cuda.Array
    rows: cuda.Array
    logit_rows: cuda.Array
    slots: cuda.Array
    logit_positions: cuda.Array
    adapter_ids: cuda.Array

    def values(self) -> dict[str, cuda.Array]:
        """Return {name: array} of the inputs of blocks."""
        names = ("token_ids", "position_ids", "logit_rows", IDS)
        return {name: getattr(self, name) for name in names}


class PromptInputs:
    """Device arrays for up to `num_tokens` tokens of up to `slots` requests.

    captured_tokens: passes of up to this many tokens are padded to a few sizes, to share CUDA graphs. Padding tokens
    go into no cache.
    """

    def __init__(self, num_tokens: int, slots: int, integer: np.dtype, captured_tokens: int, stream: cuda.Stream):
        self._num_tokens = num_tokens
        self._slots = slots
        self._captured_tokens = captured_tokens
        self._stream = stream
        by_token = (num_tokens,)
        by_request = (slots,)
        # Of the largest size: a pass uses the first elements.
        self.arrays = Inputs(
            token_ids=cuda.zeros(by_token, integer),
            position_ids=cuda.zeros(by_token, integer),
            rows=cuda.zeros(by_token, "i4"),
            logit_rows=cuda.zeros(by_request, integer),
            slots=cuda.zeros(by_request, "i4"),
            logit_positions=cuda.zeros(by_request, integer),
            adapter_ids=cuda.zeros(by_token, integer),
        )
        self._decoding = cuda.zeros(by_request, "i4")  # see `PassTokens`
        arrays = [*vars(self.arrays).values(), self._decoding]
        self._staging = Staging(sum(array.nbytes for array in arrays), len(arrays))

    def send(
        self, chunks: Sequence[Advance], write: bool = True, adapters: np.ndarray | None = None
    ) -> tuple[Inputs, PassTokens]:
        """Send a pass of `chunks` to the device; return its inputs, and the tokens as attention needs them.

        Args:
            write: False for a warm-up pass, which changes no cache and no token.
            adapters: The adapter slot of each request slot, if blocks take adapters.
        """
        packed = PackedTokens.empty(self._padded(sum(len(chunk.tokens) for chunk in chunks)))
        ranges = packed.pack([], [], 0, chunks)
        logit_rows = np.array([end - 1 for _, end in ranges])
        if write:
            slots = np.array([chunk.slot for chunk in chunks])
            rows = packed.slots
        else:
            slots = np.full(len(chunks), -1)
            rows = np.full_like(packed.slots, -1)
        inputs, decoding = self._send(packed, rows, logit_rows, slots, adapters, np.empty(0, np.int64))
        return inputs, PassTokens(inputs.rows, 0, decoding, _with_ranges(chunks, ranges))

    def send_mixed(
        self,
        decoding: Sequence[Advance],
        chunks: Sequence[Advance],
        previous_tokens: cuda.Array,
        adapters: np.ndarray | None,
        write: bool = True,
    ) -> tuple[Inputs, PassTokens]:
        """Send a pass whose first tokens are of slots that decode; return as `send` does.

        The packed tokens are one for each slot up to the highest that decodes, whether it decodes or not, then those of
        `chunks`. The requests are all slots up to the highest of the step, rounded up by `bucket`. previous_tokens:
        by slot the token that the previous step chooses, which replaces `PREVIOUS_TOKEN`.
        """
        decode_slots = [advance.slot for advance in decoding]
        step_slots = [*decode_slots, *(chunk.slot for chunk in chunks)]
        chunk_tokens = sum(len(chunk.tokens) for chunk in chunks)
        count = 1 + max(decode_slots)
        requests = bucket(1 + max(step_slots), self._slots)
        packed = PackedTokens.empty(self._padded(count + chunk_tokens))
        ranges = packed.pack(decoding, decode_slots, count, chunks)
        logit_rows = np.zeros(requests, np.int64)
        slots = np.full(requests, -1)
        rows = np.full_like(packed.slots, -1)
        decode_rows = np.full(bucket(count, self._slots), -1)
        logit_rows[step_slots] = [end - 1 for _, end in ranges]
        if write:
            slots[step_slots] = step_slots
            rows = packed.slots
            decode_rows[decode_slots] = decode_slots
        inputs, device_decode_rows = self._send(packed, rows, logit_rows, slots, adapters, decode_rows)
        if decoding[0].tokens[0] < 0:
            self._stream.copy(inputs.token_ids[:count], previous_tokens)
        ranges = [(start - count, end - count) for start, end in ranges[len(decoding) :]]
        return inputs, PassTokens(inputs.rows, count, device_decode_rows, _with_ranges(chunks, ranges))

    def _padded(self, tokens: int) -> int:
        """Return a pass's number of tokens, padded if its blocks are captured."""
        padded = min(padded_size(tokens), self._num_tokens)
        return padded if padded <= self._captured_tokens else tokens

    def _send(
        self,
        packed: PackedTokens,
        rows: np.ndarray,
        logit_rows: np.ndarray,
        slots: np.ndarray,
        adapters: np.ndarray | None,
        decode_rows: np.ndarray,
    ) -> tuple[Inputs, cuda.Array]:
        """Upload a packed pass; return its inputs and the device's `decode_rows` (`PassTokens.decoding`)."""
        values = {
            "token_ids": packed.token_ids,
            "position_ids": packed.position_ids,
            "rows": rows,
            "logit_rows": logit_rows,
            "slots": slots,
            "logit_positions": np.where(slots >= 0, packed.position_ids[logit_rows], 0),
        }
        if adapters is not None:
            values[IDS] = packed.adapter_ids(adapters)
        arrays = {name: getattr(self.arrays, name)[: len(array)] for name, array in values.items()}
        decoding = self._decoding[: len(decode_rows)]
        uploads = [(arrays[name], array) for name, array in values.items()]
        if len(decode_rows):
            uploads.append((decoding, decode_rows))
        self._staging.send(self._stream, uploads)
        arrays.setdefault(IDS, self.arrays.adapter_ids[: len(rows)])
        return Inputs(**arrays), decoding


def bucket(count: int, rows: int) -> int:
    """Return the smallest power of two that is at least `count`, but at most `rows`."""
    return min(1 << (count - 1).bit_length(), rows)


def captured_sizes(max_tokens: int) -> list[int]:
    """Return the sizes to which captured passes of up to `max_tokens` tokens are padded."""
    return sorted({padded_size(count) for count in range(2, max_tokens + 1)})


def padded_size(count: int) -> int:
    """Round up to a power of two, from 32 on to a multiple of 32, and from 512 on to a multiple of 128."""
    if 0 < count < 32:
        return 1 << (count - 1).bit_length()
    step = 32 if count < 512 else 128
    return -(-count // step) * step


def _with_ranges(chunks: Sequence[Advance], ranges: Sequence[tuple[int, int]]) -> Chunks:
    """Return each chunk as (slot, position of its first token, first packed token, end of its packed tokens)."""
    return [(chunk.slot, chunk.start, low, high) for chunk, (low, high) in zip(chunks, ranges)]
