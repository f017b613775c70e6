"""The inputs of a decode step on the device, of which kernels write what the next step goes on with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lockstep.gpu import cuda
from lockstep.gpu.staging import Staging
from lockstep.step.sampling import PARAMETERS, Sampling, parameters

_UNKNOWN = -1  # a token that the host has not seen


class DecodeState:
    """Device arrays by slot, [slots] each, and the host's copy of what they will hold.

    The copy is of the state behind all that was put on the stream. token_ids, positions (of dtype `integer`): of slots
    that do not decode any that are valid. rows (int32): the slot itself, or -1 where it does not decode. found (int32):
    the token that was found last, -1 for one that is none. samplings (sampling.PARAMETERS) and adapter_ids (`integer`:
    the slot's adapter slot, or -1): how tokens are chosen, and computed; they change when a slot's request does, not
    each step. adapters: the host's adapter_ids, which others change between steps; None where blocks take none.
    """

    def __init__(self, slots: int, max_seq_len: int, integer: np.dtype):
        self.token_ids, self.positions = (cuda.zeros((slots,), integer) for _ in range(2))
        self.rows, self.found = (cuda.zeros((slots,), "i4") for _ in range(2))
        self.samplings = cuda.zeros((slots,), PARAMETERS)  # greedy
        self.adapter_ids = cuda.zeros((slots,), integer)
        self.adapters: np.ndarray | None = None
        self._sent_adapters: np.ndarray | None = None
        self._limit = max_seq_len
        self._staging = Staging(self.rows.nbytes + 2 * self.positions.nbytes, 3)
        self._sampling_staging = Staging(self.samplings.nbytes, 1)
        self._adapter_staging = Staging(self.adapter_ids.nbytes, 1)
        self._samplings = np.zeros(slots, PARAMETERS)
        self._sampling_changed = False
        self._tokens, self._positions = (np.zeros(slots, np.int64) for _ in range(2))
        self._rows = np.zeros(slots, np.int32)  # the device's: no step has set it yet

    def set_sampling(self, slot: int, sampling: Sampling, choice: int) -> bool:
        """Choose the slot's tokens so from the next `send_samplings` on; return False if they are already."""
        changed = np.array(parameters(sampling, choice) if sampling.temperature else (0,) * 7, PARAMETERS)
        if changed == self._samplings[slot]:
            return False
        self._samplings[slot] = changed
        self._sampling_changed = True
        return True

    def follow(self, other: DecodeState, slots: Sequence[int]) -> None:
        """Compute rows 0, 1 ..., and choose their tokens, as these slots of another state."""
        samplings = self._samplings.copy()
        samplings[: len(slots)] = other._samplings[list(slots)]
        if samplings.tobytes() != self._samplings.tobytes():
            self._samplings = samplings
            self._sampling_changed = True
        if other.adapters is not None:
            self.adapters = np.full(len(self._rows), -1)
            self.adapters[: len(slots)] = other.adapters[list(slots)]

    def draws(self, slots: Iterable[int]) -> bool:
        """Return whether the token of one of these slots is drawn."""
        return bool(self._samplings["temperature"][list(slots)].any())

    def send_samplings(self, stream: cuda.Stream) -> None:
        """Upload how tokens are chosen, if the device does not hold it."""
        if self._sampling_changed:
            self._sampling_staging.send(stream, [(self.samplings, self._samplings)])
            self._sampling_changed = False

    def send_adapters(self, stream: cuda.Stream) -> None:
        """Upload the adapter slot of each request slot, if the device does not hold it."""
        sent = self._sent_adapters
        if self.adapters is not None and (sent is None or not np.array_equal(self.adapters, sent)):
            self._sent_adapters = self.adapters.copy()
            self._adapter_staging.send(stream, [(self.adapter_ids, self._sent_adapters)])

    def decode(
        self, slots: Sequence[int], tokens: Sequence[int] | None, positions: Sequence[int], stream: cuda.Stream
    ) -> None:
        """Prepare the next step of `slots` at `positions`; tokens: None: what the device found last."""
        self.send_samplings(stream)
        self.send_adapters(stream)
        chosen = np.array(slots, np.int64)
        pairs: list[tuple[cuda.Array, np.ndarray]] = []
        rows = np.full(len(self._rows), -1, np.int32)
        rows[chosen] = chosen
        if not np.array_equal(rows, self._rows):
            self._rows = rows
            pairs.append((self.rows, rows))
        if tokens is not None and not (
            np.array_equal(self._tokens[chosen], tokens) and np.array_equal(self._positions[chosen], positions)
        ):
            self._tokens[chosen] = tokens
            self._positions[chosen] = positions
            self._tokens = np.maximum(self._tokens, 0)
            pairs += [(self.token_ids, self._tokens), (self.positions, self._positions)]
        if pairs:
            self._staging.send(stream, pairs)
        self.advance(chosen, np.asarray(positions, np.int64) + 1)

    def advance(self, slots: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Note that a step on the stream finds tokens for `slots`, which then hold `lengths` tokens."""
        self._tokens[slots] = _UNKNOWN
        self._positions[slots] = np.where(np.asarray(lengths) < self._limit, lengths, 0)  # as the kernel does

    def tell(self, slots: Sequence[int], tokens: np.ndarray) -> None:
        """Note what the step that was put on the stream last found, by slot."""
        self._tokens[slots] = tokens[slots]

    def forget(self) -> None:
        """Note that tokens and positions on the device may be any."""
        self._tokens[:] = _UNKNOWN
