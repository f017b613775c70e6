"""Requests of token ids in, tokens out: the loop over a model's steps, with prompts in chunks and waiting requests
admitted as slots free up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.errors import CheckError, InputError
from lockstep.runtime.model import Model
from lockstep.runtime.sampling import greedy
from lockstep.step.advance import Advance
from lockstep.targets import Limits


@dataclass(frozen=True)
class Request:
    """A prompt (token ids, at least one) and how to go on: `choose` gives the next token from logits [vocab_size]
    float32; None takes the most likely one.

    Ends after `max_new_tokens`, after a token of `stop_ids` (which is given out), or when the slot is full.
    """

    prompt_ids: Sequence[int] | np.ndarray
    max_new_tokens: int
    choose: Callable[[np.ndarray], int] | None = None
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Token:
    """One new token of request number `request`, chosen from `logits` [vocab_size] float32; None when the model chose:
    see `Decoding`.

    `finish` says why it is the last: "stop_id", "max_new_tokens" or "max_seq_len"; None when more follow.
    """

    request: int
    token: int
    logits: np.ndarray | None
    finish: str | None


@dataclass
class Speed:
    """Tokens and seconds spent in steps. A step that brings any part of a prompt counts as prefill, with its prompt
    tokens only. One that was under way before it was asked for (on a GPU) takes from the end of the one before: what
    the reader of its tokens did meanwhile is in it."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class _Running:
    """A request in a slot: `held` tokens are in the cache, `fed` follows."""

    index: int
    request: Request
    fed: np.ndarray
    held: int = 0
    made: int = 0

    @property
    def prompt_left(self) -> int:
        return 0 if self.made else len(self.fed)


class Decoding:
    """Iterate to run the requests; tokens come in the order in which steps make them. `speed` is filled as it goes.

    Decoding requests go into every step, and what is left of `max_num_tokens` goes to prompts, in order. Where all
    requests of a step take the most likely token, the model chooses (`Model.step_tokens`): on a GPU no logits come
    back, and while no request waits for a slot the next step is under way before it is asked for.
    Raises InputError, before any step, for a prompt that is empty or longer than `max_input_len` or the slots allow;
    CheckError for a most likely token whose logit is NaN or infinite.
    """

    def __init__(
        self,
        model: Model,
        requests: Sequence[Request],
        max_input_len: int | None = None,
        max_num_tokens: int | None = None,
    ):
        self.speed = Speed()
        self._model = model
        self._budget = max_num_tokens or model.max_num_tokens or Limits().max_num_tokens
        if self._budget < model.max_batch_size:
            raise InputError(
                f"max_num_tokens: expected at least max_batch_size ({model.max_batch_size}), found {self._budget}"
            )
        longest = model.max_seq_len if max_input_len is None else min(max_input_len, model.max_seq_len)
        for i, request in enumerate(requests):
            if not 1 <= len(request.prompt_ids) <= longest:
                raise InputError(
                    f"prompt {i + 1}: expected 1 to {longest} tokens (max_input_len, "
                    f"max_seq_len), found {len(request.prompt_ids)}; shorten it or raise the limits"
                )
            if request.max_new_tokens < 1:
                raise InputError(f"prompt {i + 1}: max_new_tokens: expected at least 1, found {request.max_new_tokens}")
        self._waiting = deque(
            _Running(i, request, np.asarray(request.prompt_ids, np.int64)) for i, request in enumerate(requests)
        )
        self._slots: dict[int, _Running] = {}
        self._began: float | None = None  # when the step before ended, if the next one was under way then

    def __iter__(self) -> Iterator[Token]:
        try:
            while self._waiting or self._slots:
                self._admit()
                yield from self._step()
        finally:
            for slot in list(self._slots):
                self._release(slot)

    def finish(self, index: int) -> None:
        """End a request early, for one that has said what it had to."""
        for slot in [slot for slot, running in self._slots.items() if running.index == index]:
            self._release(slot)
        self._waiting = deque(running for running in self._waiting if running.index != index)

    def _admit(self) -> None:
        """Waiting requests take the lowest free slots, so that decoding rows lie together."""
        for slot in range(self._model.max_batch_size):
            if self._waiting and slot not in self._slots:
                self._slots[slot] = self._waiting.popleft()

    def _advances(self) -> list[Advance]:
        left = self._budget - sum(not running.prompt_left for running in self._slots.values())
        advances = []
        for slot, running in sorted(self._slots.items(), key=lambda item: item[1].index):
            tokens = running.fed
            if running.prompt_left:
                tokens = tokens[:left]
                left -= len(tokens)
            if len(tokens):
                advances.append(Advance(slot, tokens, running.held))
        return advances

    def _step(self) -> Iterator[Token]:
        advances = self._advances()
        prompt_tokens = sum(len(a.tokens) for a in advances if self._slots[a.slot].prompt_left)
        start = self._began or time.perf_counter()
        if any(self._slots[advance.slot].request.choose for advance in advances):
            rows: Iterable[np.ndarray | int] = self._model.step(advances)
        else:
            more = not prompt_tokens and not self._waiting and any(map(self._goes_on, self._slots.values()))
            rows = self._model.step_tokens(advances, more).tolist()
        ended = time.perf_counter()
        seconds, self._began = ended - start, ended if self._model.ahead else None
        if prompt_tokens:
            self.speed.prefill_tokens += prompt_tokens
            self.speed.prefill_seconds += seconds
        else:
            self.speed.decode_tokens += len(advances)
            self.speed.decode_seconds += seconds
        made = []
        for advance, row in zip(advances, rows):
            running = self._slots[advance.slot]
            running.held += len(advance.tokens)
            running.fed = running.fed[len(advance.tokens) :]
            if not len(running.fed):
                made.append(self._choose(advance.slot, running, row))
        yield from made

    def _goes_on(self, running: _Running) -> bool:
        """Behind its next token, if that is not one of `stop_ids`."""
        return running.made + 1 < running.request.max_new_tokens and running.held + 1 < self._model.max_seq_len

    def _choose(self, slot: int, running: _Running, row: np.ndarray | int) -> Token:
        """`row`: the request's logits, or the token that the model chose."""
        request = running.request
        logits = row if isinstance(row, np.ndarray) else None
        token = (request.choose or greedy)(row) if isinstance(row, np.ndarray) else row
        if token < 0:
            raise CheckError(
                f"prompt {running.index + 1}: logits: expected finite numbers, found NaN or "
                f"infinity as the largest; the weights or the precision do not fit the model"
            )
        running.fed = np.array([token], np.int64)
        running.made += 1
        finish = None
        if token in request.stop_ids:
            finish = "stop_id"
        elif running.made == request.max_new_tokens:
            finish = "max_new_tokens"
        elif running.held == self._model.max_seq_len:
            finish = "max_seq_len"
        if finish:
            self._release(slot)
        return Token(running.index, token, logits, finish)

    def _release(self, slot: int) -> None:
        del self._slots[slot]
        self._model.release(slot)
