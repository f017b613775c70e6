"""The device arrays that a pass reads.

Those of rows that decode stay on the device: kernels update them, so that the next step needs nothing of the host
(`DecodeState`). Those of a pass with chunks are sent to it (`PassInputs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep.step.logits_pipeline import Masks, Sampler
from lockstep.step.sampling import Logprobs
from lockstep_gpu import cuda
from lockstep_gpu.attention.base import PassTokens
from lockstep_gpu.logits_tables import MASKED, PARAMETERS, LogitsTables, parameters
from lockstep_gpu.plan import PackedPass, StepLimits
from lockstep_gpu.staging import Staging

_UNKNOWN = -1  # a token that is on the device only


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


class DecodeState:
    """Device arrays with an element per slot, and the host's copy of them.

    The copy is the state after all work on the stream. An upload is skipped if the device has the values already.

    Attributes:
        token_ids, positions: [slots] of dtype `integer`. Any valid values in slots that don't decode.
        rows: [slots] int32: the slot's own number, or -1 if it doesn't decode.
        next_tokens: [slots] int32: the token chosen last; -1 if the logits were NaN or infinite.
        samplings: [slots] logits_tables.PARAMETERS. They change with a slot's request, not each step.
        adapter_ids: [slots] of dtype `integer`: the slot's adapter slot, or -1. They change with a slot's request.
        adapters: The host's adapter_ids, which the caller changes between steps; None if blocks take no adapters.
    """

    def __init__(self, slots: int, max_seq_len: int, integer: np.dtype, logits_tables: LogitsTables):
        """Allocate the arrays. logits_tables: of the same slots, if slots they are."""
        self.logits_tables = logits_tables
        self.token_ids = cuda.zeros((slots,), integer)
        self.positions = cuda.zeros((slots,), integer)
        self.rows = cuda.zeros((slots,), "i4")
        self.next_tokens = cuda.zeros((slots,), "i4")
        self.samplings = cuda.zeros((slots,), PARAMETERS)  # zeros are greedy
        self.adapter_ids = cuda.zeros((slots,), integer)
        self.adapters: np.ndarray | None = None
        self._sent_adapters: np.ndarray | None = None
        self._limit = max_seq_len
        self._staging = Staging(self.rows.nbytes + 2 * self.positions.nbytes, 3)
        self._sampling_staging = Staging(self.samplings.nbytes, 1)
        self._adapter_staging = Staging(self.adapter_ids.nbytes, 1)
        self._samplings = np.zeros(slots, PARAMETERS)
        self._sampling_changed = False
        self._tokens = np.zeros(slots, np.int64)
        self._positions = np.zeros(slots, np.int64)
        self._rows = np.zeros(slots, np.int32)

    def set_sampling(self, slot: int, sampler: Sampler) -> bool:
        """Set a slot's sampling parameters from the next `send_samplings` on; return whether they changed."""
        values = parameters(sampler)
        if values == self._samplings[slot] and not values["changes"]:
            return False
        self._samplings[slot] = values
        self._sampling_changed = True
        if values["changes"]:
            self.logits_tables.set_sampling(slot, sampler)
        return True

    def set_masks(self, slot: int, masks: Masks) -> None:
        """Set which tokens may be chosen for a slot, from the next step on."""
        self.logits_tables.set_masks(slot, masks)
        if not self._samplings["changes"][slot] & MASKED:
            self._samplings["changes"][slot] |= MASKED
            self._sampling_changed = True

    def copy_slots(self, other: DecodeState, slots: Sequence[int]) -> None:
        """Give rows 0, 1, ... what draws need, and the adapters, of these slots of another state."""
        samplings = self._samplings.copy()
        samplings[: len(slots)] = other._samplings[list(slots)]
        samplings["changes"] = samplings["num_logprobs"] = 0  # the host chooses where tables would be needed
        if samplings.tobytes() != self._samplings.tobytes():
            self._samplings = samplings
            self._sampling_changed = True
        if other.adapters is not None:
            self.adapters = np.full(len(self._rows), -1)
            self.adapters[: len(slots)] = other.adapters[list(slots)]

    def draws(self, slots: Iterable[int]) -> bool:
        """Return whether a token of one of these slots is more than the likeliest, so that it needs all logits."""
        samplings = self._samplings[list(slots)]
        return any(samplings[name].any() for name in ("temperature", "changes", "num_logprobs"))

    @property
    def returns_logprobs(self) -> bool:
        """Return whether any slot requests log-probabilities."""
        return bool(self._samplings["num_logprobs"].any())

    def logprobs(self, records: np.ndarray, slots: Sequence[int]) -> dict[int, Logprobs]:
        """Return by slot the requested log-probabilities: see `LogitsTables.read_logprobs`."""
        return self.logits_tables.read_logprobs(records, self._samplings, slots)

    def send_samplings(self, stream: cuda.Stream) -> None:
        """Upload the sampling parameters and tables that changed."""
        self.logits_tables.send(stream)
        if self._sampling_changed:
            self._sampling_staging.send(stream, [(self.samplings, self._samplings)])
            self._sampling_changed = False

    def send_adapters(self, stream: cuda.Stream) -> None:
        """Upload the adapter slot of each request slot if one changed."""
        if self.adapters is None:
            return
        if self._sent_adapters is None or not np.array_equal(self.adapters, self._sent_adapters):
            self._sent_adapters = self.adapters.copy()
            self._adapter_staging.send(stream, [(self.adapter_ids, self._sent_adapters)])

    def decode(
        self, slots: Sequence[int], tokens: Sequence[int] | None, positions: Sequence[int], stream: cuda.Stream
    ) -> None:
        """Prepare the next step of `slots` at `positions`; tokens None: those on the device, of the previous step."""
        self.send_samplings(stream)
        self.send_adapters(stream)
        slot_array = np.array(slots, np.int64)
        uploads: list[tuple[cuda.Array, np.ndarray]] = []
        rows = np.full(len(self._rows), -1, np.int32)
        rows[slot_array] = slot_array
        if not np.array_equal(rows, self._rows):
            self._rows = rows
            uploads.append((self.rows, rows))
        if tokens is not None and not (
            np.array_equal(self._tokens[slot_array], tokens) and np.array_equal(self._positions[slot_array], positions)
        ):
            self._tokens[slot_array] = tokens
            self._positions[slot_array] = positions
            self._tokens = np.maximum(self._tokens, 0)
            uploads += [(self.token_ids, self._tokens), (self.positions, self._positions)]
        if uploads:
            self._staging.send(stream, uploads)
        self.advance(slot_array, np.asarray(positions, np.int64) + 1)

    def inputs(self, count: int, logit_rows: cuda.Array) -> Inputs:
        """Return what a pass of rows 0 to `count`-1 reads; logit_rows: 0, 1, ..."""
        rows = self.rows[:count]
        positions = self.positions[:count]
        return Inputs(
            token_ids=self.token_ids[:count],
            position_ids=positions,
            rows=rows,
            logit_rows=logit_rows[:count],
            slots=rows,
            logit_positions=positions,
            adapter_ids=self.adapter_ids[:count],
        )

    def advance(self, slots: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Record that an enqueued step chooses tokens for `slots`, after which they hold `lengths` tokens."""
        self._tokens[slots] = _UNKNOWN
        self._positions[slots] = np.where(np.asarray(lengths) < self._limit, lengths, 0)  # as the kernel does

    def set_tokens(self, slots: Sequence[int], tokens: np.ndarray) -> None:
        """Record the tokens that the last enqueued step chose; tokens: by slot."""
        self._tokens[slots] = tokens[slots]

    def invalidate_tokens(self) -> None:
        """Record that the device's tokens and positions are unknown."""
        self._tokens[:] = _UNKNOWN


class PassInputs:
    """Device arrays of the largest pass: a pass uses the first elements."""

    def __init__(self, limits: StepLimits, integer: np.dtype, stream: cuda.Stream):
        self._stream = stream
        by_token = (limits.largest_pass,)
        by_request = (limits.num_slots,)
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
        self, packed: PackedPass, previous_tokens: cuda.Array, adapters: np.ndarray | None
    ) -> tuple[Inputs, PassTokens]:
        """Upload a pass; return its inputs, and its tokens as attention needs them.

        Args:
            previous_tokens: By slot, the token that the previous step chooses, which replaces `PREVIOUS_TOKEN`.
            adapters: The adapter slot of each request slot, if blocks take adapters.
        """
        tokens = packed.tokens
        values = {
            "token_ids": tokens.token_ids,
            "position_ids": tokens.position_ids,
            "rows": packed.rows,
            "logit_rows": packed.logit_rows,
            "slots": packed.slots,
            "logit_positions": np.where(packed.slots >= 0, tokens.position_ids[packed.logit_rows], 0),
        }
        if adapters is not None:
            values[IDS] = tokens.adapter_ids(adapters)
        arrays = {name: getattr(self.arrays, name)[: len(array)] for name, array in values.items()}
        decoding = self._decoding[: len(packed.decoding)]
        uploads = [(arrays[name], array) for name, array in values.items()]
        if len(packed.decoding):
            uploads.append((decoding, packed.decoding))
        self._staging.send(self._stream, uploads)
        arrays.setdefault(IDS, self.arrays.adapter_ids[: len(packed.rows)])
        inputs = Inputs(**arrays)
        if packed.has_previous:
            self._stream.copy(inputs.token_ids[: packed.num_decoding], previous_tokens)
        return inputs, PassTokens(inputs.rows, packed.num_decoding, decoding, packed.chunks)
