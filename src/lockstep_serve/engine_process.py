"""The engine process.

`python -m lockstep_serve.engine_process FD BACKEND`: FD is the number of a socket to the API process; BACKEND is loaded
before anything is received, or "" where it is not known. The process opens the engines that its first frame names, and
then steps while there are requests, which a thread receives and prepares.

Nothing is lost if it dies: the API process has the requests and their tokens, and sends them to a new engine. Without
the API process it ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep import processes
from lockstep.artifacts.weights import WeightsManifest
from lockstep.backends.base import get_backend
from lockstep.errors import InputError, LockstepError
from lockstep.manifests.digest_cache import stamp
from lockstep.runtime.active_choice import PreparedRequest
from lockstep.runtime.engine import Engine
from lockstep.runtime.grammar.compiler import Compiler
from lockstep.runtime.model import Model, ModelOptions
from lockstep.runtime.prefix import root_key
from lockstep.runtime.request import Request, split_adapter
from lockstep.runtime.speculative import Speculative, open_speculation
from lockstep.runtime.step_sizes import compare_step_sizes
from lockstep_serve.adapter_loader import AdapterLoader, ReadAdapter
from lockstep_serve.frames import (
    Abort,
    Add,
    Counters,
    Failed,
    Frame,
    Load,
    Loaded,
    Ready,
    Refused,
    Step,
    Unload,
    UpdateWeights,
    WeightsUpdated,
    packed,
    receive,
)
from lockstep_serve.log import log, start_log
from lockstep_serve.settings import EngineOptions

_DONE = object()
_LOAD_POLL_S = 0.002
_SEND_BUFFER = 1 << 22  # bytes of the kernel that a step's frame goes to while the API process is busy
TICK = 1.0  # seconds between the frames of an idle engine


def main() -> None:
    """Serve until the API process has closed its end."""
    # The API process drains first and then ends this one; Ctrl-C at their terminal sends signals to both.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a state to log
    processes.share_interpreter()
    with socket.socket(fileno=int(sys.argv[1])) as end, contextlib.suppress(EOFError):
        connection = Connection(end)
        if backend := sys.argv[2]:
            with contextlib.suppress(LockstepError, ModuleNotFoundError):  # `_serve` raises it
                get_backend(backend)
        try:
            _serve(connection)
        except LockstepError as error:
            _fail(connection, type(error).__name__, " ".join(str(error).split()))
        except ModuleNotFoundError as error:
            _fail(connection, "InputError", f"{sys.executable} has no Python package {error.name!r}; install it there")


def _fail(connection: Connection, error: str, message: str) -> None:
    connection.send(Failed(error, message))
    connection.drain(10)
    raise SystemExit(1)


def _serve(connection: Connection) -> None:
    options = connection.receive().options
    start_log(options.log_level)
    engine, loader, ready, warm_up = _open(options, connection.inbox.put)
    processes.freeze_heap()
    connection.send(ready)
    EngineLoop(connection, engine, loader, warm_up).run()


def _open(
    options: EngineOptions, deliver: Callable[[ReadAdapter], None]
) -> tuple[Engine, AdapterLoader | None, Ready, Iterator[None]]:
    limits = options.limits
    model = Model.open(
        Path(options.engines),
        Path(options.assembly),
        Path(options.weights),
        options.layers,
        ModelOptions(
            max_batch_size=limits["max_batch_size"],
            max_seq_len=limits["max_seq_len"],
            max_num_tokens=limits["max_num_tokens"],
            threads=options.threads,
            kv_bytes=options.kv_bytes,
            chunk_size=options.chunk_size,
            adapters_json=options.adapters,
            others=options.others,
            max_bound=options.max_bound,
            restarted=options.restarted,
        ),
    )
    loader = None
    adapters: dict[str, dict[str, str]] = {}
    lost_adapters: dict[str, dict[str, str]] = {}
    if model.adapters:
        manifests = {"": options.checkpoint, **{files.name: files.checkpoint for files in options.others}}
        loader = AdapterLoader(model.adapters, manifests, deliver)
        lost_adapters = loader.reload(options.loaded)
        for checkpoint_name, lost in model.adapters.lost.items():
            lost_adapters.setdefault(checkpoint_name, {}).update(lost)
        for adapter in model.adapters.loaded.values():
            checkpoint_name, name = split_adapter(adapter.name)
            adapters.setdefault(checkpoint_name, {})[name] = adapter.sha256
    speculation = None
    if options.speculative is not None:
        speculation = open_speculation(model, Speculative(**options.speculative), options.threads)
    warm_up = model.warm_up_parts()
    next(warm_up, None)  # the most useful part; `EngineLoop` runs the others while there are no requests
    compilers = {}
    others = {}
    for name, checkpoint in model.checkpoints.by_name.items():
        end_ids = checkpoint.eos_token_ids
        compilers[name] = Compiler(checkpoint.assembly_json, model.vocab_size, end_ids, options.grammar_seconds)
        if name:
            others[name] = root_key(model, checkpoint=name).hex(), list(end_ids), checkpoint.weights_sha256
    engine = Engine(
        model,
        limits["max_input_len"],
        prefix_caching=options.prefix_caching,
        admission=options.admission,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        grammars=compilers,
        speculation=speculation,
    )
    # With another salt than any request, which must not find this prefix. A KV cache that is too small shows here.
    for _ in engine.run([Request([0, 0], min(2, model.max_seq_len - 1), cache_salt="warm-up")]):
        pass
    step_sizes = compare_step_sizes(model)
    if step_sizes.differing and model.engines.batch_invariant:
        log.error(f"expected the same bits in steps of all sizes, found: {step_sizes}")
    ready = Ready(
        identity=root_key(model).hex(),
        backend=model.engines.manifest.backend,
        batch_invariant=model.engines.batch_invariant,
        engine_digest=model.engines.digest(),
        vocab_size=model.vocab_size,
        eos_token_ids=list(model.eos_token_ids),
        max_batch_size=model.max_batch_size,
        max_seq_len=model.max_seq_len,
        max_input_len=min(limits["max_input_len"] or model.max_seq_len, model.max_seq_len),
        max_num_tokens=engine.scheduler.options.max_num_tokens,
        chunk_size=engine.scheduler.options.chunk_size,
        prefix_caching=engine.prefix_caching,
        num_pages=model.tables.pool.num_pages,
        prompt_logprobs=model.gives_all_logits,
        verifies_drafts=model.verifies_drafts,
        adapters=adapters,
        lost_adapters=lost_adapters,
        kv_cache_dtype=model.engines.assembly.kv_cache_dtype,
        others=others,
        step_sizes=step_sizes.to_json(),
    )
    return engine, loader, ready, warm_up


class Connection:
    """The socket. What cannot be sent at once is sent later: the engine never waits for its reader.

    inbox: what the thread has received, and what other threads have for the engine's.
    """

    def __init__(self, end: socket.socket):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._end = end
        self._file = end.makefile("rb")
        self._out = bytearray()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive(self) -> Any:
        """Return the next frame. Raises EOFError where the other end is closed."""
        return receive(self._file)

    def start(self, prepare: Callable[[Any], Any]) -> None:
        """From now on receive in a thread: `inbox` gets `prepare(frame)` of each frame, and at the end an exception."""
        threading.Thread(target=self._read, args=(prepare,), name="reader", daemon=True).start()

    def _read(self, prepare: Callable[[Any], Any]) -> None:
        try:
            while True:
                self.inbox.put(prepare(self.receive()))
        except OSError:
            self.inbox.put(EOFError())
        except BaseException as error:
            self.inbox.put(error)

    def take(self, seconds: float) -> list[Any]:
        """Return what the inbox has, after up to `seconds` for the first. Raises what the thread raised."""
        if self._out:  # a peer that reads so slowly sends nothing new
            self.drain(seconds)
            seconds = 0
        items: list[Any] = []
        with contextlib.suppress(queue.Empty):
            if seconds:
                items.append(self.inbox.get(timeout=seconds))
            while True:
                items.append(self.inbox.get_nowait())
        for item in items:
            if isinstance(item, BaseException):
                raise item
        return items

    def send(self, frame: Frame) -> None:
        """Send a frame, as far as possible without blocking. Raises EOFError where the other end is closed."""
        self._out += packed(frame)
        self.flush()

    def flush(self) -> None:
        """Send the remaining bytes, as far as possible without blocking."""
        try:
            while self._out:
                del self._out[: self._end.send(self._out, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            raise EOFError from None

    def drain(self, seconds: float) -> None:
        """Send the remaining bytes; give up if the socket takes none for `seconds`."""
        poll = select.poll()  # `select.select` cannot watch descriptors above 1,023
        poll.register(self._end, select.POLLOUT)
        while self._out and poll.poll(seconds * 1000):
            self.flush()


class _Prepared(NamedTuple):
    id: int
    request: PreparedRequest


class _Describe:
    """A request in the inbox to log the engine's state."""


class EngineLoop:
    """The main loop: handle the inbox, and step; while there are no requests, prepare for more kinds of steps."""

    def __init__(
        self, connection: Connection, engine: Engine, loader: AdapterLoader | None, warm_up: Iterator[None] = iter(())
    ):
        self._connection = connection
        self._warm_up = warm_up
        self._is_warm = False
        self._engine = engine
        self._loader = loader
        self._has_warned = False
        self._last_sent = 0.0
        self._handlers: dict[type, Callable[[Any], Any]] = {
            _Prepared: self._add,
            Refused: connection.send,
            Abort: lambda frame: engine.abort(frame.id, frame.choice),
            Load: lambda frame: self._adapters.start(frame),
            Unload: lambda frame: self._adapters.adapters.remove(frame.name),
            ReadAdapter: self._add_adapter,
            UpdateWeights: self._update_weights,
            _Describe: self._describe,
        }

    @property
    def _adapters(self) -> AdapterLoader:
        assert self._loader is not None  # the API process refuses adapters where the graphs take none
        return self._loader

    def run(self) -> None:
        self._connection.start(self._prepare)
        # Logged between steps; faulthandler prints the stack even if a step hangs.
        signal.signal(signal.SIGUSR1, lambda *_: self._connection.inbox.put(_Describe()))
        if sys.stderr is not None:
            faulthandler.register(signal.SIGUSR1, chain=True)
        while True:
            self.turn()

    def turn(self) -> None:
        """Handle the inbox, then step if there are requests; without requests, wait for the inbox once all is warm."""
        is_waiting = self._is_warm and not self._engine.has_work
        for item in self._connection.take(TICK if is_waiting else 0.0):
            self._handlers[type(item)](item)
        if self._engine.has_work:
            self._step()
            return
        if not self._is_warm:
            self._is_warm = self._has_warmed_up()
        if time.monotonic() - self._last_sent >= TICK:
            self._send_step(Step(self._counters()))

    def _has_warmed_up(self) -> bool:
        """Prepare for some more kinds of steps; return whether none are left."""
        try:
            return next(self._warm_up, _DONE) is _DONE
        except LockstepError as error:
            log.warning(f"warm-up: {error}; some steps are slow, or fail")
            return True

    def _step(self) -> None:
        engine = self._engine
        tokens = engine.step()
        self._warn_of_speculation()
        for number, message in engine.refused:
            self._connection.send(Refused(number, message, message.partition(":")[0]))
        for number, message in engine.failed:
            log.error(message)
            self._connection.send(Refused(number, message, is_fault=True))
        if log.isEnabledFor(logging.DEBUG):
            for number, num_cached in engine.admitted:
                log.debug("request %d: admitted, %d tokens cached", number, num_cached)
            for token in tokens:
                if token.finish:
                    log.debug("request %d: choice %d ended by %s", token.request, token.choice, token.finish)
        # A step in the middle of a prompt tells nothing; its frame would only wake the API process.
        is_news = tokens or engine.admitted or engine.prompt_logprobs
        if is_news or time.monotonic() - self._last_sent >= TICK:
            entries = [(token.request, token.choice, token.token, token.finish, token.logprobs) for token in tokens]
            self._send_step(Step(self._counters(), entries, engine.admitted, engine.prompt_logprobs))

    def _send_step(self, frame: Step) -> None:
        self._last_sent = time.monotonic()
        self._connection.send(frame)

    def _prepare(self, frame: Any) -> Any:
        """Return the inbox item of a frame. Runs in the reader's thread, so that steps do not wait for it."""
        if not isinstance(frame, Add):
            return frame
        try:
            return _Prepared(frame.id, self._engine.prepare(frame.request, is_checked=True))
        except InputError as error:
            return Refused(frame.id, str(error))

    def _describe(self, _: _Describe) -> None:
        for line in self._engine.describe():
            log.info(line)

    def _add(self, prepared: _Prepared) -> None:
        request = prepared.request.request
        log.debug("request %d (%s): %d tokens", prepared.id, request.id, len(request.prompt_ids))
        try:
            self._engine.add(prepared.request, prepared.id)
        except InputError as error:
            self._connection.send(Refused(prepared.id, str(error)))

    def _add_adapter(self, read: ReadAdapter) -> None:
        """Add an adapter that has been read, and answer its frame."""
        try:
            if isinstance(read.adapter, str):
                raise InputError(read.adapter)
            self._adapters.adapters.add(read.adapter)
            self._connection.send(Loaded(read.id, read.adapter.sha256))
        except InputError as error:
            self._connection.send(Loaded(read.id, error=str(error)))

    def _update_weights(self, frame: UpdateWeights) -> None:
        """Replace the weights, and answer the frame; the API process sees meanwhile that this one lives."""

        def wait() -> None:
            time.sleep(_LOAD_POLL_S)
            if time.monotonic() - self._last_sent >= TICK:
                self._send_step(Step(self._counters()))

        try:
            path = Path(frame.weights)
            for file in WeightsManifest.load(path).files:
                if stamp(file.path) != file.sha256:
                    raise InputError(f"{file.path}: expected it as it was, found it changed; ask again")
            identity = self._engine.update_weights(path, wait)
            self._connection.send(WeightsUpdated(identity))
        except (LockstepError, OSError) as error:
            self._connection.send(WeightsUpdated(error=str(error)))

    def _warn_of_speculation(self) -> None:
        """Log once that speculation is disabled."""
        speculation = self._engine.speculation
        if speculation is not None and speculation.failure and not self._has_warned:
            self._has_warned = True
            log.warning(speculation.failure)

    def _counters(self) -> Counters:
        engine = self._engine
        scheduler = engine.scheduler
        pool = scheduler.tables.pool
        drafts: Sequence[int] = ()
        if engine.speculation is not None:
            drafts = engine.speculation.counts()
        return Counters(
            is_warm=self._is_warm,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            used_pages=pool.num_pages - pool.num_available,
            cached_pages=pool.num_cached,
            swaps=scheduler.num_swaps,
            prefix_queries=engine.prefix_queries,
            prefix_hits=engine.prefix_hits,
            drafts=drafts,
        )


if __name__ == "__main__":
    main()
