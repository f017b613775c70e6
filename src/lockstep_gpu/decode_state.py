"""The inputs of a decode step on the device. Kernels update them, so that the next step needs nothing of the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lockstep.step.logits_pipeline import Masks, Sampler
from lockstep.step.sampling import Logprobs
from lockstep_gpu import cuda
from lockstep_gpu.logits_tables import MASKED, PARAMETERS, LogitsTables, parameters
from lockstep_gpu.staging import Staging

_UNKNOWN = -1  # a token that is on the device only


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
