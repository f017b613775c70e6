"""A model that runs: an engine set bound to weights, a KV cache, and the one `step` that everything else is made of."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lockstep.engine import EngineSet
from lockstep.errors import InputError
from lockstep.runtime.host import HostExecutor
from lockstep.runtime.network import open_network
from lockstep.runtime.step import Advance, Executor, check


class Model:
    """Requests live in slots 0 to max_batch_size-1. Not for several threads at once: the backend itself uses all that it is given."""

    def __init__(self, executor: Executor, max_num_tokens: int | None, engines: EngineSet, layers: int):
        self.engines = engines
        self.layers = layers
        self.vocab_size = engines.assembly["vocab_size"]
        self.max_batch_size = executor.rows
        self.max_seq_len = executor.max_seq_len
        self.max_num_tokens = max_num_tokens
        self.eos_token_ids = tuple(engines.assembly["eos_token_ids"])
        self._executor = executor

    @classmethod
    def open(
        cls,
        engines_json: str | os.PathLike,
        assembly_json: str | os.PathLike,
        weights_json: str | os.PathLike,
        layers: int | str = "all",
        max_batch_size: int = 4,
        max_seq_len: int = 256,
        max_num_tokens: int | None = None,
        threads: int | None = None,
        low_memory: bool = False,
    ) -> Model:
        """Open engines, weights and cache for the first `layers` layers.

        `low_memory` reads the weights from the mapped files at each step instead of a repacked copy: slower, no copy.
        Raises InputError for limits or a layer count that the model does not allow, CheckError for engines that do not fit here.
        """
        engines = EngineSet.open(engines_json, assembly_json)
        allowed = engines.assembly["max_position_embeddings"]
        if allowed is not None and max_seq_len > allowed:
            raise InputError(f"max_seq_len: expected at most {allowed} (max_position_embeddings of {Path(assembly_json)}), found {max_seq_len}")
        built = engines.manifest["options"].get("max_seq_len")
        if built is not None and max_seq_len > built:
            raise InputError(f"max_seq_len: expected at most {built}, which {engines_json} was built for, found {max_seq_len}; raise limits.max_seq_len and build again")
        for name, value in (("max_batch_size", max_batch_size), ("max_seq_len", max_seq_len)):
            if value < 1:
                raise InputError(f"{name}: expected at least 1, found {value}")
        network = open_network(engines, weights_json, layers, threads, low_memory)
        executor = engines.backend.executor(network, max_batch_size, max_seq_len, max_num_tokens) or HostExecutor(network, max_batch_size, max_seq_len)
        return cls(executor, max_num_tokens, engines, len(network.layers))

    def step(self, advances: Sequence[Advance]) -> np.ndarray:
        """Advance any mix of requests by one or several tokens each.

        Gives the logits that follow each request's last token, [len(advances), vocab_size] float32, in the order of the list.
        Raises InputError, and changes nothing, for a slot out of range or named twice, a start other than 0 or the slot's
        length, a token outside the vocabulary, no token, or more than max_seq_len or max_num_tokens.
        """
        return self._take(advances, self._executor.logits)

    def step_tokens(self, advances: Sequence[Advance]) -> np.ndarray:
        """As `step`, but gives only each request's most likely next token, [len(advances)] int64: on a GPU nothing else comes back. Raises CheckError where that one's
        logit is NaN or infinite."""
        return self._take(advances, self._executor.tokens)

    def _take(self, advances: Sequence[Advance], run: Callable[[Sequence[Advance]], np.ndarray]) -> np.ndarray:
        check(advances, self._executor, self.vocab_size, self.max_num_tokens)
        for advance in advances:
            if not advance.start:
                self._executor.reset(advance.slot)
        taken = run(advances)
        for advance in advances:
            self._executor.lengths[advance.slot] = advance.start + len(advance.tokens)
        return taken

    def length(self, slot: int) -> int:
        """Tokens that the slot holds."""
        return int(self._executor.lengths[slot])

    def release(self, slot: int) -> None:
        """Forget what the slot holds, so that its memory may shrink. A new request at start 0 does the same."""
        self._executor.reset(slot)
