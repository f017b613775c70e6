"""The logits behind tokens that a server gave out: the engines, along these tokens.

The engines, not PyTorch: `golden` has held their logits to the reference, and what serves need not have PyTorch. So
where bits do not depend on company the server's were these to the bit, and one wrong choice shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.runtime.decoding import Decoding
from lockstep.runtime.model import Model
from lockstep.runtime.request import Request

History = tuple[Sequence[int], Sequence[int]]  # a prompt, and what follows it


def write_logits(model: Model, histories: Sequence[History], out: Path) -> None:
    """Write the logits behind each prompt and behind all tokens of its answer but the last.

    histories: (prompt, answer) of each, at least one token each. out: gets an array float32 [number of answers' tokens,
    vocab_size], .npy.
    """
    lengths = [len(answer) for _, answer in histories]
    starts = np.cumsum([0, *lengths])
    logits = np.lib.format.open_memmap(out, "w+", np.float32, (int(starts[-1]), model.vocab_size))
    following = [iter(answer) for _, answer in histories]

    def along(number: int) -> Request:
        prompt, answer = histories[number]
        return Request(prompt, len(answer), choose=lambda row: next(following[number]))

    counts = [0] * len(histories)
    for token in Decoding(model, list(map(along, range(len(histories))))):
        logits[starts[token.request] + counts[token.request]] = token.logits
        counts[token.request] += 1
    logits.flush()
