"""Compile grammars in threads, while the engine steps.

Grammars in; matchers out. Each grammar is first compiled on trial in a child process.
"""

from __future__ import annotations

import collections
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lockstep.errors import LockstepError
from lockstep.runtime.grammar import Grammar
from lockstep.runtime.grammar.matcher import Matcher
from lockstep.runtime.grammar.trial import Refusal, TrialProcess, compiled, open_tokenizer
from lockstep.runtime.tokenizer import tokenizer_path

SECONDS = 5.0
_WORKERS = 2  # grammars at a time
_STACK = 16 << 20  # bytes, more than a trial's: a grammar that compiled there compiles here
_NICE = 10  # of those threads: a step that runs meanwhile goes first
_MAX_CACHED = 2 << 20  # characters of compiled grammars in the cache, 40 bytes of memory for each


@dataclass(frozen=True)
class _Job:
    key: int
    grammar: Grammar
    answer_ids: Sequence[int]


class Compiler:
    """Compiles grammars for one tokenizer.

    Threads and processes begin with the first; several grammars that are slow on purpose hold other grammars up, at
    most until they have used their CPU time, and no other request.

    The first grammar also loads the tokenizer, in which llguidance lets no other thread run: 0.15 s for 32,000 tokens,
    0.6 s for 128,000.
    """

    def __init__(
        self, assembly_json: str | os.PathLike, vocab_size: int, eos_token_ids: Sequence[int], seconds: float = SECONDS
    ):
        """Make a compiler; no thread runs yet.

        assembly_json: names the tokenizer. seconds: of CPU time that a grammar may take to compile.
        """
        self._assembly = assembly_json
        self._seconds = seconds
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._outcomes: collections.deque[tuple[int, Matcher | str]] = collections.deque()
        self._awaited: set[int] = set()  # keys
        self._has_outcome = threading.Event()
        self._lock = threading.Lock()
        self._text: str | None = None
        self._tokenizer: Any = None
        self._compiled: dict[Grammar, Any] = {}  # llguidance's matchers, at the start; the last used last
        self._mask_threads: ThreadPoolExecutor | None = None
        self._num_workers = 0

    def submit(self, key: int, grammar: Grammar, answer_ids: Sequence[int] = ()) -> None:
        """Compile a grammar; `poll` gives its outcome.

        answer_ids: tokens that the answer has already.
        """
        self._awaited.add(key)
        self._jobs.put(_Job(key, grammar, answer_ids))
        if self._num_workers < min(_WORKERS, len(self._awaited)):
            self._num_workers += 1
            before = threading.stack_size(_STACK)  # for threads that start from here on
            # A daemon: nobody waits for it when the process ends.
            threading.Thread(target=self._work, name="grammars", daemon=True).start()
            threading.stack_size(before)

    def forget(self, key: int) -> None:
        self._awaited.discard(key)

    def poll(self) -> list[tuple[int, Matcher | str]]:
        """Return the outcomes that have come, by key.

        Each is the matcher after its answer_ids, or one line that says why the grammar was rejected.
        """
        self._has_outcome.clear()
        outcomes = []
        while self._outcomes:
            key, outcome = self._outcomes.popleft()
            if key in self._awaited:
                self._awaited.discard(key)
                outcomes.append((key, outcome))
        return outcomes

    def wait(self, seconds: float) -> None:
        self._has_outcome.wait(seconds)

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
        trial: TrialProcess | None = None
        while True:
            job = self._jobs.get()
            if job.key not in self._awaited:
                continue
            try:
                tokenizer = self._load()
                assert self._text is not None
                trial = trial or TrialProcess(self._text, self._vocab_size, self._eos_token_ids)
                outcome: Matcher | str = self._matcher(tokenizer, trial, job)
            except Refusal as refusal:
                outcome = f"{job.grammar.name}: expected {refusal}"
            except LockstepError as error:
                outcome = f"{job.grammar.name}: {error}"
            except BaseException as error:  # a panic of its Rust code is no Exception; the worker goes on
                outcome = f"{job.grammar.name}: expected a grammar that compiles, found {type(error).__name__}"
            self._outcomes.append((job.key, outcome))
            self._has_outcome.set()

    def _load(self) -> Any:
        with self._lock:
            if self._tokenizer is None:
                path = tokenizer_path(self._assembly)
                try:
                    self._text = path.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError) as error:
                    raise Refusal(f"a tokenizer at {path}, found none that can be read: {error}") from None
                self._tokenizer = open_tokenizer(self._text, self._vocab_size, self._eos_token_ids)
                self._mask_threads = ThreadPoolExecutor(2, "masks")
            return self._tokenizer

    def _matcher(self, tokenizer: Any, trial: TrialProcess, job: _Job) -> Matcher:
        assert self._mask_threads is not None
        start = self._compile_cached(tokenizer, trial, job.grammar)
        with self._lock:  # two threads must not copy one matcher at once
            matcher = start.deep_copy()
        if job.answer_ids and not matcher.consume_tokens(list(job.answer_ids)):
            raise Refusal("answer_ids that the grammar allows, found others")
        return Matcher(matcher, self._vocab_size, self._mask_threads)

    def _compile_cached(self, tokenizer: Any, trial: TrialProcess, grammar: Grammar) -> Any:
        """Return the matcher of a grammar at its start, which is copied and does not change."""
        start = self._compiled.get(grammar)
        if start is None:
            trial.check(grammar.kind, grammar.text, self._seconds, grammar.around)
            start = compiled(tokenizer, grammar.kind, grammar.text, grammar.around)
        with self._lock:
            self._compiled.pop(grammar, None)  # to the end: the least recently used one comes first
            self._compiled[grammar] = start
            num_characters = sum(len(cached.text) for cached in self._compiled)
            while num_characters > _MAX_CACHED and len(self._compiled) > 1:
                oldest = next(iter(self._compiled))
                num_characters -= len(oldest.text)
                del self._compiled[oldest]
        return start
