"""The device arrays of a pass with chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep_gpu import cuda
from lockstep_gpu.attention.base import PassTokens
from lockstep_gpu.plan import PackedPass, StepLimits
from lockstep_gpu.staging import Staging


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
