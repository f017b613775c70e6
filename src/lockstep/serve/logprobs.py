"""Log-probabilities of tokens in the format of OpenAI's completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.runtime.tokenizer import Tokenizer
from lockstep.serve.frames import finite
from lockstep.step.sampling import Logprobs


class LogprobsFormat:
    """The log-probabilities of one text, in as many parts as it comes in.

    A token's offset is the number of characters before it; of tokens that make up one character it is that of the
    character.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0):
        """Begin a text.

        offset: of its first character.
        """
        self._tokenizer, self._stream, self._offset = tokenizer, tokenizer.stream(), offset
        self._texts: dict[int, str] = {}

    def part(self, tokens: Sequence[int], logprobs: Sequence[Logprobs | None]) -> dict[str, list[Any]]:
        """Return the next part, in OpenAI's format.

        tokens: those that follow. logprobs: one for each, None where there is nothing before a token.
        """
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._stream.push(token))
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [each and finite(each.chosen) for each in logprobs],
            "top_logprobs": [each and self._likeliest(token, each) for token, each in zip(tokens, logprobs)],
            "text_offset": offsets,
        }

    def _likeliest(self, chosen: int, logprobs: Logprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, value in logprobs.top:  # of several tokens of one text, such as parts of characters, the likeliest
            found.setdefault(self._text(token), finite(value))
        found.setdefault(self._text(chosen), finite(logprobs.chosen))  # whether it is one of those or not, as OpenAI
        return found

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]
