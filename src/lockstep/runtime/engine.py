"""Requests of token ids in, tokens out: the one loop over a model's steps, which generation, the golden check, the
benchmarks and the server run. What goes into a step, `Scheduler` decides."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.errors import CheckError, InputError
from lockstep.runtime.completion import Collector, Completion
from lockstep.runtime.model import Model, fitting_chunk_size
from lockstep.runtime.prefix import chunk_keys, root_key
from lockstep.runtime.request import Request, Speed, Token
from lockstep.runtime.scheduler import Admission, Scheduled, Scheduler, Status, Step
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.advance import Advance
from lockstep.step.pages import PAGE_SIZE
from lockstep.step.sampling import Sampled, Sampler, Sampling
from lockstep.targets import Limits


@dataclass(eq=False, slots=True)
class _Choice:
    """One choice of a request: the token that its next step brings, and what was given out before an interruption and
    is still to be computed again."""

    index: int
    number: int
    request: Request
    prompt: np.ndarray
    sampler: Sampler
    scheduled: Scheduled
    made: int = 0
    next_token: int = -1
    sampling_slot: int = -1  # the slot that the model was told of
    again: deque[int] = field(default_factory=deque)

    @property
    def needs_logits(self) -> bool:
        """The host chooses the next token: also where choices that are still to fork draw from the same logits."""
        request = self.request
        forks = bool(self.scheduled.siblings and request.sampling.temperature)
        return request.choose is not None or request.sampling.needs_logits or forks


class Engine:
    """`add` requests at any time, `step` until there are no more; not for several threads at once.

    The model chooses the tokens, greedy or drawn (`Model.step_tokens`): on a GPU no logits come back, and the next step
    is under way before it is asked for. Not so in steps with a request that needs logits (`choose`, penalties, lists,
    logprobs): its own come back, and the host chooses.
    """

    def __init__(
        self,
        model: Model,
        max_input_len: int | None = None,
        max_num_tokens: int | None = None,
        prefix_caching: bool = True,
        admission: Admission = "guaranteed",
    ):
        """max_num_tokens: of one step, at most the model's. Raises InputError where a step has no room for a token of
        each request."""
        self.speed = Speed()
        self._model = model
        budget = max_num_tokens or model.max_num_tokens or Limits().max_num_tokens
        chunk_size = fitting_chunk_size(model.chunk_size, model.max_batch_size, budget)
        if admission == "optimistic" and model.tables.shares is None:
            raise InputError(
                f"admission: expected guaranteed, for the attention of {model.engines.path} cannot be swapped out, "
                "found optimistic"
            )
        self._scheduler = Scheduler(model.tables, model.max_batch_size, budget, chunk_size, admission)
        self._longest = model.max_seq_len if max_input_len is None else min(max_input_len, model.max_seq_len)
        # What is reused must have been cut as it would be now.
        self._prefixes = prefix_caching and chunk_size == model.chunk_size and chunk_size % PAGE_SIZE == 0
        self._root_keys: dict[str, bytes] = {}
        self._choices: dict[Scheduled, _Choice] = {}
        self._swapped: dict[Scheduled, Any] = {}
        self._count = 0
        self.admitted: list[int] = []  # requests that the last step took in
        # Tokens of prompts that were looked for in the prefix cache, and of those found there.
        self.prefix_queries = self.prefix_hits = 0
        self._began: float | None = None  # when the step before ended, if the next one was under way then

    @property
    def has_work(self) -> bool:
        """There are requests that have not ended."""
        return bool(self._choices)

    @property
    def scheduler(self) -> Scheduler:
        """For counters: requests running and waiting, pages."""
        return self._scheduler

    def add(self, request: Request) -> int:
        """Queue a request; gives its number. Raises InputError for a prompt that is empty or too long, values that
        cannot be, and a request that could never have the memory that it may need."""
        index, model = self._count, self._model
        prompt = _token_ids("prompt_ids", request.prompt_ids, model.vocab_size)
        again = _token_ids("answer_ids", request.answer_ids, model.vocab_size).tolist()
        _token_ids("logit_bias", request.sampling.logit_bias, model.vocab_size)
        if not 1 <= len(prompt) <= self._longest:
            raise InputError(
                f"expected 1 to {self._longest} tokens (max_input_len, max_seq_len), found {len(prompt)}; "
                "shorten it or raise the limits"
            )
        if request.max_new_tokens < 1:
            raise InputError(f"max_new_tokens: expected at least 1, found {request.max_new_tokens}")
        if request.n < 1:
            raise InputError(f"n: expected at least 1, found {request.n}")
        if request.choice < 0:
            raise InputError(f"choice: expected at least 0, found {request.choice}")
        if again and (request.n > 1 or len(again) >= request.max_new_tokens):
            raise InputError(
                f"answer_ids: expected fewer than max_new_tokens ({request.max_new_tokens}), of a request of "
                f"one choice, found {len(again)} and n {request.n}"
            )
        # The last new token is given out, and needs no place of its own.
        most = min(len(prompt) + request.max_new_tokens - 1, model.max_seq_len)
        make = lambda: Scheduled(len(prompt), most, request.priority)
        choices = [make() for _ in range(request.n)]
        if self._prefixes and len(prompt) > self._scheduler.chunk_size:
            choices[0].prefix = chunk_keys(self._root_key(request.cache_salt), prompt, self._scheduler.chunk_size)
        if model.tables.shares is not None:  # else each choice computes the prompt for itself
            choices[0].siblings = choices[1:]
        for scheduled in choices[:1] if choices[0].siblings else choices:
            self._scheduler.add(scheduled)
        self._count += 1
        known = np.concatenate([prompt, np.array(again, np.int64)])
        for number, scheduled in enumerate(choices, request.choice):
            sampler = Sampler(request.sampling, known, request.stop_ids, number, len(prompt))
            self._choices[scheduled] = _Choice(index, number, request, prompt, sampler, scheduled, again=deque(again))
        return index

    def add_all(self, requests: Iterable[Request]) -> list[int]:
        """Queue requests that come together; gives their numbers. Raises InputError, which names the prompt by its
        place among them, and queues none, for one that `add` refuses."""
        added: list[int] = []
        try:
            for request in requests:
                added.append(self.add(request))
        except InputError as error:
            for index in added:
                self.abort(index)
            raise InputError(f"prompt {len(added) + 1}: {error}") from None
        return added

    def abort(self, index: int, number: int | None = None) -> bool:
        """End all choices of a request, or choice `number` of it, wherever it stands; its slots and pages are free.
        False for what has ended."""
        found = [
            choice for choice in self._choices.values() if choice.index == index and number in (None, choice.number)
        ]
        self._end_all(found)
        return bool(found)

    def close(self) -> None:
        """Abort all requests."""
        self._end_all([*self._choices.values()])

    def run(self, requests: Iterable[Request] = ()) -> Iterator[Token]:
        """Add requests, then step until none is left. Left early, all requests end."""
        self.add_all(requests)
        try:
            while self.has_work:
                yield from self.step()
        finally:
            self.close()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | np.ndarray],
        tokenizer: Tokenizer,
        sampling: Sampling | Sequence[Sampling] = Sampling(),
        max_new_tokens: int = 16,
        stop: Sequence[str] = (),
        n: int = 1,
    ) -> list[Completion]:
        """Complete all prompts (text, or token ids); gives a completion for each, in their order. sampling: of all, or
        of each. Raises InputError, before any step, for a prompt that cannot be taken."""
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(each) != len(prompts):
            raise InputError(f"sampling: expected one, or one for each of {len(prompts)} prompts, found {len(each)}")
        ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        stop_ids = frozenset(self._model.eos_token_ids)
        collectors = [Collector(tokenizer, len(prompt), n, stop) for prompt in ids]
        requests = [Request(prompt, max_new_tokens, stop_ids=stop_ids, sampling=s, n=n) for prompt, s in zip(ids, each)]
        found = dict(zip(self.add_all(requests), collectors, strict=True))
        try:
            while self.has_work:
                for made in self.step():
                    if (collector := found.get(made.request)) is not None:
                        collector.push(made)
                        if collector.stopped(made):
                            self.abort(made.request, made.choice)
        except BaseException:
            for index in found:
                self.abort(index)
            raise
        return [collector.completion for collector in found.values()]

    def step(self) -> list[Token]:
        """Take one step; gives the tokens that it made. Raises CheckError, and ends all requests, when the device
        fails."""
        try:
            step = self._schedule()
            if not step.shares:
                return []
            rows = self._take(step)
            for request, start, pages in self._scheduler.computed(step):
                self._model.store(request.slot, start, pages)
                self._scheduler.stored(pages)
        except BaseException:
            self.close()
            raise
        made = []
        for (scheduled, _), row in zip(step.shares, rows):
            if scheduled.decodes:
                for each in (scheduled, *self._fork(scheduled)):
                    token = self._choose(self._choices[each], row)
                    if token is not None:
                        made.append(token)
        return made

    def _schedule(self) -> Step:
        model, scheduler = self._model, self._scheduler
        while (victim := scheduler.victim()) is not None:
            self._swapped[victim] = model.swap_out(victim.slot)
            self._choices[victim].sampling_slot = -1
            scheduler.swapped_out(victim)
        step = scheduler.schedule()
        for request in step.swapped_in:
            model.swap_in(request.slot, self._swapped.pop(request))
        self.admitted = [self._choices[request].index for request, _ in step.admitted]
        for request, pages in step.admitted:
            if self._prefixes:
                self.prefix_queries += request.num_prompt_tokens
                self.prefix_hits += len(pages) * PAGE_SIZE
            if pages:
                model.share(request.slot, pages)
                if not model.tables.shares:
                    scheduler.stored(pages)
        return step

    def _take(self, step: Step) -> Sequence[np.ndarray | int]:
        """Take the step: for each share its logits, or the token that the model chose."""
        model, advances, prompt_tokens, goes_on = self._model, [], 0, False
        wanted = []  # of which logits are
        for scheduled, count in step.shares:
            choice, start = self._choices[scheduled], scheduled.num_computed
            if scheduled.decodes:
                tokens = np.array([choice.next_token], np.int64)
            else:
                tokens = choice.prompt[start : start + count]
                prompt_tokens += count
            advances.append(Advance(scheduled.slot, tokens, start))
            if start + count >= scheduled.num_prompt_tokens:
                if choice.needs_logits:
                    wanted.append(len(advances) - 1)
                elif choice.request.sampling.temperature and choice.sampling_slot != scheduled.slot:
                    model.set_sampling(scheduled.slot, choice.request.sampling, choice.number)
                    choice.sampling_slot = scheduled.slot
            goes_on |= choice.made + 1 < choice.request.max_new_tokens and start + 1 < model.max_seq_len
        began = self._began or time.perf_counter()
        rows: list[np.ndarray | int]
        if wanted:
            tokens, logits = model.step_with_logits(advances, wanted)
            rows = tokens.tolist()
            for number, row in zip(wanted, logits):
                rows[number] = row
        else:
            rows = model.step_tokens(advances, more=goes_on).tolist()
        ended = time.perf_counter()
        seconds, self._began = ended - began, ended if model.in_flight else None
        if prompt_tokens:
            self.speed.prefill_tokens += prompt_tokens
            self.speed.prefill_seconds += seconds
        else:
            self.speed.decode_tokens += len(advances)
            self.speed.decode_seconds += seconds
        return rows

    def _fork(self, scheduled: Scheduled) -> Sequence[Scheduled]:
        if not scheduled.siblings:
            return ()
        siblings = self._scheduler.forked(scheduled)
        for sibling in siblings:
            self._model.fork(scheduled.slot, sibling.slot)
        return siblings

    def _choose(self, choice: _Choice, row: np.ndarray | int) -> Token | None:
        """`row`: the choice's logits, or the token that the model chose. None for a token that was given out before."""
        request, scheduled = choice.request, choice.scheduled
        choice.made += 1
        if choice.again:
            choice.next_token = choice.again.popleft()
            return None
        logits = row if isinstance(row, np.ndarray) else None
        if logits is None:
            sampled = Sampled(int(row))
        elif request.choose is not None:
            sampled = Sampled(int(request.choose(logits)))
        else:
            sampled = choice.sampler(logits, scheduled.num_computed)
        token = choice.next_token = sampled.token
        finish = None
        if token < 0:
            finish = "error"
        elif token in request.stop_ids:
            finish = "stop_id"
        elif choice.made == request.max_new_tokens:
            finish = "max_new_tokens"
        elif scheduled.num_computed == self._model.max_seq_len:
            finish = "max_seq_len"
        if finish:
            self._end(choice)
        return Token(choice.index, token, logits, finish, choice.number, sampled.logprobs)

    def _end_all(self, choices: Iterable[_Choice]) -> None:
        for choice in choices:
            if choice.scheduled in self._choices:  # else it went along with another
                self._end(choice)

    def _end(self, choice: _Choice) -> None:
        """Free what a choice holds; a prompt that is not through takes its further choices along."""
        scheduled = choice.scheduled
        ended = [scheduled, *(each for each in scheduled.siblings if each.status is not Status.RUNNING)]
        for each in ended:
            self._choices.pop(each, None)
            self._swapped.pop(each, None)
            if each.slot >= 0:
                self._model.release(each.slot)
        self._scheduler.finish(scheduled)

    def _root_key(self, salt: str) -> bytes:
        if salt not in self._root_keys:
            self._root_keys[salt] = root_key(self._model, salt)
        return self._root_keys[salt]


def _token_ids(name: str, tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """Token ids as an array int64 [num_tokens]. Raises InputError for one that is outside the vocabulary."""
    try:
        array = np.fromiter(tokens, np.int64)
    except OverflowError:
        raise InputError(f"{name}: expected tokens 0 to {vocab_size - 1}, found one of more than 64 bits") from None
    bad = array[(array < 0) | (array >= vocab_size)]
    if len(bad):
        raise InputError(f"{name}: expected tokens 0 to {vocab_size - 1}, found {bad[0]}")
    return array


class Decoding:
    """Requests that all come at once. Iterate to run them; tokens come in the order in which steps make them. `speed`
    is filled as it goes.

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
    ):
        self._engine = Engine(model, max_input_len, max_num_tokens, prefix_caching)
        self.speed = self._engine.speed
        self._engine.add_all(requests)

    def __iter__(self) -> Iterator[Token]:
        for made in self._engine.run():
            if made.finish == "error":
                raise CheckError(
                    f"prompt {made.request + 1}: logits: expected finite numbers, found NaN or "
                    f"infinity as the largest; the weights or the precision do not fit the model"
                )
            yield made

    def finish(self, index: int) -> None:
        """End a request early, for one that has said what it had to."""
        self._engine.abort(index)
