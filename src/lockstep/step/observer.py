"""Who looks on while steps run: the golden check does, at models that choose inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from lockstep.step.advance import PackedTokens


class Observer(Protocol):
    """Sees the values between the blocks of a running step; it must copy arrays that it keeps."""

    def step(self, tokens: PackedTokens) -> None: ...

    def block(self, part: str, layer: int, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """See a block's inputs and outputs.

        part: "block", before the attention of `layer`, or "exit", whose outputs have the rows `logit_rows`.
        """
