"""Log-probabilities of tokens in the format of OpenAI's completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.sampling import Logprobs


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(-9999.0, logprob)


class LogprobsFormat:
    """The log-probabilities of a text, part by part; a token's offset is the number of characters before it."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] | np.ndarray = (), echo: str | None = None):
        """Begin a text after the tokens `context`; echo: their text, if the answer repeats it."""
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream(context, echo is not None)
        self._offset = len(echo or "")

    def part(
        self, tokens: Sequence[int], logprobs: Sequence[Logprobs | None], finish: str | None = None
    ) -> dict[str, list[Any]]:
        """Return the next part in OpenAI's format; logprobs: of each token, or None. finish: why the text ends."""
        texts = [self._stream.push(token) for token in tokens]
        if finish and texts and finish != "stop_id":
            texts[-1] += self._stream.finish()  # a character that stayed incomplete
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        chosen = [entry and finite(entry.chosen) for entry in logprobs]
        top = [entry and self._likeliest(token, text, entry) for token, text, entry in zip(tokens, texts, logprobs)]
        return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}

    def _likeliest(self, chosen: int, text: str, logprobs: Logprobs) -> dict[str, float]:
        """Return {text: log-probability} of the likeliest tokens and the chosen one, or by name if a text repeats."""
        by_text: dict[str, float] = {}
        # Several tokens may have one text, or none: OpenAI's format is by text, so they get other names.
        for token, value in (*logprobs.top, (chosen, logprobs.chosen)):
            if token == chosen:
                by_text.setdefault(text, finite(value))
                continue
            names = (self._label(token), *self._tokenizer.names([token]), f"token_id:{token}")
            by_text[next(name for name in names if name and name != text and name not in by_text)] = finite(value)
        return by_text

    def _label(self, token: int) -> str:
        """Return the text of a token, or what OpenAI writes for a part of a character."""
        piece = self._tokenizer.token_bytes(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
