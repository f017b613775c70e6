"""Requests that all come at once, run to their end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep.errors import CheckError
from lockstep.runtime.drafts import Speculation
from lockstep.runtime.engine import Engine
from lockstep.runtime.model import Model
from lockstep.runtime.request import NOT_FINITE, Request, Token


class Decoding:
    """Requests that all come at once; iterate to run them.

    Tokens come in the order in which steps make them. `speed` is filled as it goes.

    Raises InputError, before any step, for a prompt that is empty or longer than `max_input_len` or the slots allow;
    CheckError for a most likely token whose logit is NaN or infinite.
    """

    def __init__(
        self,
        model: Model,
        requests: Sequence[Request],
        max_input_len: int | None = None,
        max_num_tokens: int | None = None,
        prefix_caching: bool = False,
        speculation: Speculation | None = None,
    ):
        self.engine = Engine(model, max_input_len, max_num_tokens, prefix_caching, speculation=speculation)
        self.speed = self.engine.speed
        self.engine.add_all(requests)

    def __iter__(self) -> Iterator[Token]:
        for token in self.engine.run():
            if token.finish == "error":
                raise CheckError(f"prompt {token.request + 1}: {NOT_FINITE}")
            yield token

    def finish(self, index: int) -> None:
        self.engine.abort(index)
