"""The logits after the tokens of a server's answer, from the engines, teacher-forced.

From the engines, not PyTorch: `golden` has compared their logits with the reference, and a server need not have
PyTorch. Where engines are batch invariant the server's logits had the same bits, so one wrong choice shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.runtime.generate import Decoding
from lockstep.runtime.model import Model
from lockstep.runtime.request import Request

History = tuple[Sequence[int], Sequence[int]]  # a prompt, and its answer


def write_logits(model: Model, histories: Sequence[History], out: Path) -> None:
    """Write the logits after each prompt and after all tokens of its answer but the last.

    histories: at least one token each. out: an .npy file, float32 [number of answers' tokens, vocab_size].
    """
    lengths = [len(answer) for _, answer in histories]
    starts = np.cumsum([0, *lengths])
    logits = np.lib.format.open_memmap(out, "w+", np.float32, (int(starts[-1]), model.vocab_size))
    following = [iter(answer) for _, answer in histories]

    def teacher_forced(number: int) -> Request:
        prompt, answer = histories[number]
        return Request(prompt, len(answer), choose=lambda row: next(following[number]))

    counts = [0] * len(histories)
    for token in Decoding(model, list(map(teacher_forced, range(len(histories))))):
        logits[starts[token.request] + counts[token.request]] = token.logits
        counts[token.request] += 1
    logits.flush()


def read_logits(path: Path, histories: Sequence[History]) -> dict[History, np.ndarray]:
    """Return the rows of each history, mapped, of a file that `write_logits` wrote."""
    ends = np.cumsum([len(answer) for _, answer in histories])
    return dict(zip(histories, np.split(np.load(path, mmap_mode="r"), ends[:-1])))
