"""The engine: requests of token ids in, tokens out.

It is the one loop over a model's steps, which generation, the golden check, the benchmarks and the server run.
`Scheduler` decides what goes into a step.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.active_choice import ActiveChoice
from lockstep.runtime.bad_words import BadWordFilter
from lockstep.runtime.checks import check_request
from lockstep.runtime.completion import Collector, Completion
from lockstep.runtime.drafts import Speculation
from lockstep.runtime.grammar.matcher import GrammarCompiler
from lockstep.runtime.model import Model, fitting_chunk_size
from lockstep.runtime.prefix import chunk_keys, root_key
from lockstep.runtime.request import Request, Speed, Token
from lockstep.runtime.scheduler import Admission, Scheduled, Scheduler, SchedulerOutput, Status
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.advance import FOUND, Advance
from lockstep.step.pages import PAGE_SIZE
from lockstep.step.sampling import Logprobs, Sampler, Sampling, log_probabilities
from lockstep.targets import Limits

# Of prompts in a step beside requests that decode, on a GPU: about where its products are bound by arithmetic, so that
# more together are hardly sooner done than one after the other: records/cuda.md, "The server".
_MAX_PREFILL_TOKENS = 512
_ROOT_KEYS = 1024  # that are kept: a salt may come once only
_PATIENCE = 0.005  # seconds that a step waits for grammars when there is nothing else


class Engine:
    """Runs requests: `add` at any time, `step` until there are no more.

    Not for several threads at once.

    The model chooses the tokens, greedy or drawn (`Model.step_tokens`): on a GPU no logits come back, and the next step
    is decided and begun before the tokens of this one are known (async scheduling). Not so in steps with a request that
    needs logits (`choose`, penalties, lists, logprobs, a grammar): its own come back, and the host chooses.

    A request with a grammar waits, without a slot, until the grammar is compiled; meanwhile steps go on. `refused`:
    requests whose grammar the last step found not to be one, with one line that says why; they have ended.
    """

    def __init__(
        self,
        model: Model,
        max_input_len: int | None = None,
        max_num_tokens: int | None = None,
        prefix_caching: bool = True,
        admission: Admission = "guaranteed",
        long_prefill_token_threshold: int | None = None,
        grammars: GrammarCompiler | None = None,
        speculation: Speculation | None = None,
        lookahead: int | None = None,
    ):
        """Make an engine that has no requests yet.

        max_num_tokens: of one step, at most the model's. long_prefill_token_threshold: tokens that one prompt brings at
        most to a step beside requests that decode, in whole chunks; by default a chunk on a CPU, else any number.
        grammars: compiles those of requests. speculation: drafts what requests go on with; each answer is the same to
        the bit, in fewer steps where drafts are right. lookahead: of `Scheduler`.

        Raises InputError where a step has no room for a token of each request, and for speculation with a model that
        verifies no drafts.
        """
        if speculation is not None:
            model.check_verifies_drafts()
            speculation.on_host = model.engines.backend.on_host
        self.speed = Speed()
        self.speculation = speculation
        self._model = model
        budget = max_num_tokens or model.max_num_tokens or Limits().max_num_tokens
        chunk_size = fitting_chunk_size(model.chunk_size, model.max_batch_size, budget)
        if admission == "optimistic" and model.tables.shares is None:
            raise InputError(
                f"admission: expected guaranteed, for the attention of {model.engines.path} cannot be swapped out, "
                "found optimistic"
            )
        if long_prefill_token_threshold is None and model.engines.backend.on_host:
            # A CPU's step takes as long as it has tokens: chunk by chunk, the others wait least. On a GPU each step
            # has a price of its own, and few long steps delay fewer tokens of the others than many short ones.
            long_prefill_token_threshold = chunk_size
        max_prefill_tokens = None if model.engines.backend.on_host else _MAX_PREFILL_TOKENS
        self._scheduler = Scheduler(
            model.tables,
            model.max_batch_size,
            budget,
            chunk_size,
            admission,
            long_prefill_token_threshold,
            model.adapters.residency if model.adapters is not None else None,
            max_prefill_tokens,
            compacts=bool(model.tables.shares) and not model.has_state,
            lookahead=lookahead,
        )
        self._longest = model.max_seq_len if max_input_len is None else min(max_input_len, model.max_seq_len)
        # What is reused must have been cut as it would be now, and lie in pages that slots can share or copy.
        self.prefix_caching = (
            prefix_caching
            and model.tables.shares is not None
            and (not model.has_state or model.tables.state_pages > 0)
            and chunk_size == model.chunk_size
            and chunk_size % PAGE_SIZE == 0
        )
        # By salt, which clients name, and digest of an adapter, of whose name another may come.
        self._root_key = functools.lru_cache(_ROOT_KEYS)(functools.partial(root_key, model))
        self._choices: dict[Scheduled, ActiveChoice] = {}
        self._swapped: dict[Scheduled, Any] = {}
        self._grammars = grammars
        self._compiling: dict[int, list[ActiveChoice]] = {}  # choices of requests that wait for their grammar
        self._count = 0
        self.refused: list[tuple[int, str]] = []
        # Of the last step: request, number of a prompt token, what was computed for it and those behind it.
        self.prompt_logprobs: list[tuple[int, int, list[Logprobs]]] = []
        self.admitted: list[
            tuple[int, int]
        ] = []  # requests that the last step took in, and their tokens of found prefixes
        # Tokens of prompts that were looked for in the prefix cache, and of those found there.
        self.prefix_queries = self.prefix_hits = 0
        self._began: float | None = None  # when the step before ended, if the next one was under way then
        self._aborted: set[tuple[int, int | None]] = set()  # since the last step
        # The next step, where it was decided before the tokens of this one were known.
        self._ahead: SchedulerOutput | None = None

    @property
    def has_work(self) -> bool:
        """Return whether there are requests that have not ended."""
        return bool(self._choices)

    @property
    def scheduler(self) -> Scheduler:
        """Return the scheduler, for counters: requests running and waiting, pages."""
        return self._scheduler

    def add(self, request: Request, index: int | None = None) -> int:
        """Queue a request and return its number.

        index: the number, of no request that is there; by default the next one. Raises InputError for a prompt that is
        empty or too long, for values that are out of range, and for a request that could never have the memory that it
        may need.
        """
        index = self._count if index is None else index
        model = self._model
        if not self._choices:
            self._began = None  # what was under way when the last one ended is nobody's
        prompt, again = check_request(request, model, self._longest, self._grammars is not None)
        bad_words = self._bad_words(request, prompt, again)
        # The last new token is given out, and needs no place of its own.
        most = min(len(prompt) + max(1, request.max_new_tokens) - 1, model.max_seq_len)
        choices = [Scheduled(len(prompt), most, request.priority, adapter=request.adapter) for _ in range(request.n)]
        if self.prefix_caching and request.prompt_logprobs is None and len(prompt) > self._scheduler.chunk_size:
            adapter = model.adapters.digest(request.adapter) if model.adapters is not None else None
            root = self._root_key(request.cache_salt, adapter)
            choices[0].prefix = chunk_keys(root, prompt, self._scheduler.chunk_size)
        if model.tables.shares is not None:  # else each choice computes the prompt for itself
            choices[0].siblings = choices[1:]
        for scheduled in choices[:1] if choices[0].siblings else choices:
            self._scheduler.add(scheduled, held=request.grammar is not None)
        self._count = max(self._count, index + 1)
        known = np.concatenate([prompt, np.array(again, np.int64)])
        for number, (scheduled, words) in enumerate(zip(choices, bad_words), request.choice):
            sampler = Sampler(request.sampling, known, request.stop_ids, number, len(prompt))
            self._choices[scheduled] = ActiveChoice(
                index, number, request, prompt, sampler, scheduled, again=deque(again), bad_words=words
            )
        self._choices[choices[0]].prompt_logprobs = request.prompt_logprobs
        if self._grammars is not None and request.grammar is not None:
            self._compiling[index] = [self._choices[scheduled] for scheduled in choices]
            self._grammars.submit(index, request.grammar, again)
        return index

    def _bad_words(self, request: Request, prompt: np.ndarray, again: Sequence[int]) -> list[BadWordFilter | None]:
        """Return the bad words of each choice of a request. Raises InputError where texts of tokens are not known."""
        texts = request.sampling.bad_texts
        if not texts:
            return [None] * request.n
        filters: list[BadWordFilter | None] = []
        for _ in range(request.n):
            found = BadWordFilter(self._model.vocabulary, texts, prompt)
            for token in again:
                found.push(token)
            filters.append(found)
        return filters

    def add_all(self, requests: Iterable[Request]) -> list[int]:
        """Queue requests that come together and return their numbers.

        Raises InputError for one that `add` refuses, and then queues none; the error names the prompt by its place
        among them.
        """
        added: list[int] = []
        try:
            for request in requests:
                added.append(self.add(request))
        except InputError as error:
            for index in added:
                self.abort(index)
            raise InputError(f"prompt {len(added) + 1}: {str(error).removeprefix('prompt_ids: ')}") from None
        return added

    def abort(self, index: int, number: int | None = None) -> bool:
        """End all choices of a request, or choice `number` of it.

        It may be queued, running or swapped out; its slots and pages are free then. Returns False for what has ended.
        """
        found = [
            choice for choice in self._choices.values() if choice.index == index and number in (None, choice.number)
        ]
        self._aborted.add((index, number))
        for choice in found if number is not None else ():
            self._hand_on(choice)
        self._end_all(found)
        compiling = self._compiling.get(index, ())
        if self._grammars is not None and compiling and not any(each.scheduled in self._choices for each in compiling):
            self._grammars.forget(index)
            del self._compiling[index]
        return bool(found)

    def close(self) -> None:
        """Abort all requests."""
        for index in [*self._compiling]:
            self.abort(index)
        self._end_all([*self._choices.values()])

    def run(self, requests: Iterable[Request] = ()) -> Iterator[Token]:
        """Add requests, then step until none is left. Left early, all requests end."""
        self.add_all(requests)
        with contextlib.closing(self.steps()) as steps:
            for made in steps:
                yield from made

    def steps(self, feed: Callable[[], bool] = lambda: False) -> Generator[Iterator[Token]]:
        """Step until no request is left, and yield the tokens of each step. Left early, all requests end.

        Of a choice that is aborted at one of its tokens, no more come.

        feed: called before each step; adds requests, and returns whether it may add more later. Raises InputError for a
        request whose grammar is none.
        """
        try:
            while feed() or self.has_work:
                made = self.step()
                for _, message in self.refused:
                    raise InputError(message)
                yield (token for token in made if not self._was_aborted(token))
        finally:
            self.close()

    def _was_aborted(self, token: Token) -> bool:
        return not self._aborted.isdisjoint({(token.request, None), (token.request, token.choice)})

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | np.ndarray],
        tokenizer: Tokenizer,
        sampling: Sampling | Sequence[Sampling] = Sampling(),
        max_new_tokens: int = 16,
        stop: Sequence[str] = (),
        n: int = 1,
    ) -> list[Completion]:
        """Complete all prompts (text, or token ids); completions in their order.

        sampling: of all, or of each. Raises InputError, before any step, for a prompt that cannot be taken, and beside
        other requests, whose tokens would be lost.
        """
        if isinstance(prompts, str):
            raise InputError(f"prompts: expected a list, found one text; give [{prompts[:20]!r}]")
        if self.has_work:
            raise InputError("generate: expected an engine without requests, found some; step until they have ended")
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(each) != len(prompts):
            raise InputError(f"sampling: expected one, or one for each of {len(prompts)} prompts, found {len(each)}")
        ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        stop_ids = frozenset(self._model.eos_token_ids)
        requests = [Request(prompt, max_new_tokens, stop_ids=stop_ids, sampling=s, n=n) for prompt, s in zip(ids, each)]
        added = self.add_all(requests)
        try:
            collectors = [Collector(tokenizer, prompt, n, stop, s.min_tokens) for prompt, s in zip(ids, each)]
            found = dict(zip(added, collectors))
            for made in self.run():
                collector = found[made.request]
                collector.push(made)
                if collector.stopped(made):
                    self.abort(made.request, made.choice)
        finally:
            self.close()
        return [collector.completion for collector in collectors]

    def step(self) -> list[Token]:
        """Take one step and return the tokens that it made.

        Raises CheckError, and ends all requests, when the device fails; what `Request.choose` raises does the same.
        """
        self._take_compiled()
        self.prompt_logprobs = []
        self.admitted = []
        self._aborted.clear()
        try:
            step = self._next_step()
            if not step.shares:
                if self._grammars is not None and self._compiling:
                    self._grammars.wait(_PATIENCE)
                return []
            return self._choose_all(step, self._take(step))
        except BaseException:
            self.close()
            self._model.tables.pool.forget()  # prefixes that were to be computed in a step that may have failed
            raise

    def _choose_all(self, step: SchedulerOutput, rows: Sequence[np.ndarray | int]) -> list[Token]:
        """Choose the next tokens of each request of a step that was taken.

        rows: as `_take` gives them.
        """
        made = []
        following = iter(rows)
        for scheduled, _ in step.shares:
            row = next(following)
            if not scheduled.in_prompt:
                for each in (scheduled, *self._fork(scheduled)):
                    made.append(self._choose(self._choices[each], row))
            if draft := step.drafts.get(scheduled):
                made += self._verify(scheduled, draft, [next(following) for _ in draft])
        return [token for token in made if token is not None]

    def _verify(
        self, scheduled: Scheduled, draft: Sequence[int], rows: Sequence[np.ndarray | int]
    ) -> Iterator[Token | None]:
        """Choose what follows each token of a draft, as far as the draft is what was chosen.

        rows: what is behind each of its tokens. The cache then holds what plain steps would have put there.
        """
        assert self.speculation is not None
        choice = self._choices.get(scheduled)
        accepted = 0
        if choice is None:  # the token before the draft was its last
            return
        for token, row in zip(draft, rows):
            if scheduled not in self._choices or choice.answer[-1] != token:
                break
            scheduled.num_computed += 1
            accepted += 1
            yield self._choose(choice, row)
        self.speed.decode_tokens += accepted
        self.speculation.verified(choice, len(draft), accepted)
        if scheduled in self._choices:
            self._model.keep(scheduled.slot, scheduled.num_computed)

    def _take_compiled(self) -> None:
        """Let requests go on whose grammars have been compiled; end those whose have not."""
        self.refused = []
        if self._grammars is None or not self._compiling:
            return
        for index, outcome in self._grammars.poll():
            choices = self._compiling.pop(index)
            if isinstance(outcome, str):
                self.refused.append((index, outcome))
                self._end_all(choices)
                continue
            for number, choice in enumerate(choices):
                choice.matcher = outcome.fork() if number else outcome
                if choice.scheduled.status is Status.HELD:
                    self._scheduler.unhold(choice.scheduled)

    def _next_step(self) -> SchedulerOutput:
        """Return the step that was decided ahead, else decide one now.

        Requests that have ended since are left out of it.
        """
        step = self._ahead
        self._ahead = None
        if step is not None:
            step.shares = [(request, count) for request, count in step.shares if request.status is Status.RUNNING]
        return step if step is not None and step.shares else self._schedule()

    def _schedule(self) -> SchedulerOutput:
        model = self._model
        scheduler = self._scheduler
        while (victim := scheduler.victim()) is not None:
            self._swapped[victim] = model.swap_out(victim.slot)
            self._choices[victim].sampling_slot = -1
            self._forget_drafts(self._choices[victim])
            scheduler.swapped_out(victim)
        if scheduler.is_spread:
            for request, slot in scheduler.compact():
                model.move(slot, request.slot)
                self._choices[request].sampling_slot = -1
        step = scheduler.schedule()
        for request in step.swapped_in:
            model.swap_in(request.slot, self._swapped.pop(request))
        self.admitted += [(self._choices[request].index, request.num_computed) for request, _ in step.admitted]
        try:
            for request, pages in step.admitted:
                if self.prefix_caching:
                    self.prefix_queries += request.num_prompt_tokens
                    self.prefix_hits += request.num_computed
                if pages:
                    model.share(request.slot, pages, request.num_computed)
        finally:  # else the tables of the slots hold them
            for _, pages in () if model.tables.shares else step.admitted:
                scheduler.stored(pages)
        self._draft(step)
        return step

    def _draft(self, step: SchedulerOutput) -> None:
        """Add drafts to a step in which requests decode and no prompt waits for them."""
        if self.speculation is None or any(scheduled.in_prompt for scheduled, _ in step.shares):
            return
        choices = {self._choices[scheduled]: scheduled for scheduled, _ in step.shares}
        room = {
            choice: min(scheduled.max_tokens - scheduled.num_computed - 1, self._model.room(scheduled.num_computed + 1))
            for choice, scheduled in choices.items()
            if not choice.again
        }
        if room:
            drafts = self.speculation.propose(room, self._most_verified - len(choices) + len(room))
            step.drafts = {choices[choice]: draft for choice, draft in drafts.items()}

    def _drafts_follow(self, step: SchedulerOutput) -> bool:
        """Return whether the step behind one, which was counted, may have drafts, which need its tokens."""
        if self.speculation is None:
            return False
        choices = [self._choices[scheduled] for scheduled, _ in step.shares if not scheduled.in_prompt]
        return bool(step.drafts) or (
            len(choices) == len(step.shares) and self.speculation.is_due(choices, self._most_verified)
        )

    @property
    def _most_verified(self) -> int:
        return min(self._model.most_verified, self._scheduler.max_num_tokens)

    def _forget_drafts(self, choice: ActiveChoice) -> None:
        if self.speculation is not None:
            self.speculation.forget(choice)

    def _take(self, step: SchedulerOutput) -> Sequence[np.ndarray | int]:
        """Take the step: for each share, and each token of its draft, the logits, or the token that the model chose."""
        model = self._model
        advances = self._advances(step)
        prompt_tokens = sum(count for request, count in step.shares if request.in_prompt)
        wanted = self._wanted(step)
        following: list[Advance] = []
        if model.async_scheduling:
            self._computed(step)
            if not wanted and self._may_decide_ahead(step):
                self._ahead = self._schedule()
                following = self._following(self._ahead, step)
        began = self._began or time.perf_counter()
        rows: list[np.ndarray | int]
        if wanted:
            ends = np.cumsum([advance.num_rows for advance in advances]).tolist()
            numbers = [row for i in wanted for row in range(ends[i] - advances[i].num_rows, ends[i])]
            tokens, logits = model.step_with_logits(advances, numbers)
            rows = tokens.tolist()
            for number, row in zip(numbers, logits):
                rows[number] = row
        else:
            rows = model.step_tokens(advances, following).tolist()
        ended = time.perf_counter()
        if not model.async_scheduling:
            self._take_prompt_logprobs(step)
            self._computed(step)
        seconds = ended - began
        self._began = ended if model.in_flight else None
        if prompt_tokens:
            self.speed.prefill_tokens += prompt_tokens
            self.speed.prefill_seconds += seconds
        else:
            self.speed.decode_tokens += len(advances)
            self.speed.decode_seconds += seconds
        return rows

    def _advances(self, step: SchedulerOutput, before: Container[Scheduled] = ()) -> list[Advance]:
        """Return what the model is to take.

        before: requests of the step before, whose tokens are not known yet. Calls `Model.set_sampling` for choices for
        which that was not done.
        """
        advances = []
        for scheduled, count in step.shares:
            choice = self._choices[scheduled]
            start = scheduled.num_computed
            if scheduled.in_prompt:
                tokens = choice.prompt[start : start + count]
            else:
                draft = step.drafts.get(scheduled, ())
                tokens = FOUND if scheduled in before else np.array([choice.answer[-1], *draft], np.int64)
            keeps_states = scheduled.in_prompt and scheduled.published < len(scheduled.prefix)
            advances.append(Advance(scheduled.slot, tokens, start, scheduled in step.drafts, keeps_states))
            # At the prompt's end is soon enough where no step is begun that this would change.
            if self._model.async_scheduling or start + count >= scheduled.num_prompt_tokens:
                self._set_sampling(choice)
        return advances

    def _set_sampling(self, choice: ActiveChoice) -> None:
        slot = choice.scheduled.slot
        if choice.sampling_slot != slot and choice.request.sampling.temperature and not choice.needs_logits:
            self._model.set_sampling(slot, choice.request.sampling, choice.number)
            choice.sampling_slot = slot

    def _wanted(self, step: SchedulerOutput) -> list[int]:
        """Return the shares whose logits are needed, as the host chooses their tokens."""
        return [
            number
            for number, (scheduled, count) in enumerate(step.shares)
            if scheduled.num_computed + count >= scheduled.num_prompt_tokens and self._choices[scheduled].needs_logits
        ]

    def _computed(self, step: SchedulerOutput) -> None:
        copies = self._scheduler.computed(step)
        try:
            for request, start, pages in copies:
                self._model.store(request.slot, start, pages)
        finally:
            for *_, pages in copies:
                self._scheduler.stored(pages)

    def _may_decide_ahead(self, step: SchedulerOutput) -> bool:
        """Return whether the next step can be decided before this one's tokens.

        So where its tokens decide nothing but which requests end: no choices fork behind the step, none has a next
        token that was given out before, no draft may continue it, and no request is to be swapped out or moved.
        """
        if self._scheduler.is_spread or self._drafts_follow(step):
            return False
        for scheduled, _ in step.shares:
            if not scheduled.in_prompt and (scheduled.siblings or self._choices[scheduled].again):
                return False
        return self._scheduler.victim() is None

    def _following(self, ahead: SchedulerOutput, step: SchedulerOutput) -> list[Advance]:
        """Return the step behind `step`, for the model to begin.

        Nothing where the host is to choose tokens of it.
        """
        if self._wanted(ahead):
            return []
        return self._advances(ahead, {scheduled for scheduled, _ in step.shares})

    def _take_prompt_logprobs(self, step: SchedulerOutput) -> None:
        for number, (scheduled, _) in enumerate(step.shares):
            choice = self._choices[scheduled]
            if choice.prompt_logprobs is None or not scheduled.in_prompt:
                continue
            found = []
            count = choice.prompt_logprobs
            for start, logits in self._model.logits_behind(number):
                follow = choice.prompt[start + 1 : start + 1 + len(logits)]  # nothing behind the prompt's last token
                found += [log_probabilities(row, int(token), count) for row, token in zip(logits, follow)]
            self.prompt_logprobs.append((choice.index, scheduled.num_computed + 1, found))

    def _fork(self, scheduled: Scheduled) -> Sequence[Scheduled]:
        if not scheduled.siblings:
            return ()
        siblings = self._scheduler.forked(scheduled)
        for sibling in siblings:
            self._model.fork(scheduled.slot, sibling.slot)
        return siblings

    def _choose(self, choice: ActiveChoice, row: np.ndarray | int) -> Token | None:
        token = choice.choose(row, self._model.max_seq_len, self._model.eos_token_ids)
        if token is not None and token.finish:
            self._end(choice)
        return token

    def _hand_on(self, choice: ActiveChoice) -> None:
        """Give a prompt that is not computed yet to the next of its choices, which else would end with this one."""
        following = next((each for each in choice.scheduled.siblings if each in self._choices), None)
        if following is None:
            return
        heir = self._choices[following]
        choice.scheduled, heir.scheduled = following, choice.scheduled
        self._choices[choice.scheduled] = choice
        self._choices[heir.scheduled] = heir
        heir.prompt_logprobs = choice.prompt_logprobs
        heir.sampling_slot = -1

    def _end_all(self, choices: Iterable[ActiveChoice]) -> None:
        for choice in choices:
            if choice.scheduled in self._choices:  # else it went along with another
                self._end(choice)

    def _end(self, choice: ActiveChoice) -> None:
        """Free what a choice holds.

        A prompt that is not computed to its end takes its further choices along.
        """
        scheduled = choice.scheduled
        ended = [scheduled, *(each for each in scheduled.siblings if each.status is not Status.RUNNING)]
        for each in ended:
            if each in self._choices:
                self._forget_drafts(self._choices.pop(each))
            self._swapped.pop(each, None)
            if each.slot >= 0:
                self._model.release(each.slot)
        self._scheduler.finish(scheduled)
