"""The engine process.

`python -m lockstep_serve.engine_process FD`: FD is the number of a socket to the API process. It opens the engines that
its first frame names, and then steps while there are requests.

Nothing is lost if it dies: the API process has the requests and their tokens, and sends them to a new engine. Without
the API process it ends.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep import processes
from lockstep.errors import CheckError, InputError, LockstepError
from lockstep.runtime.adapters import Adapters
from lockstep.runtime.engine import Engine
from lockstep.runtime.grammar.compiler import Compiler
from lockstep.runtime.model import Model
from lockstep.runtime.prefix import root_key
from lockstep.runtime.request import Request, Token
from lockstep.runtime.speculative import Speculative, open_speculation
from lockstep.step.sampling import Logprobs
from lockstep_serve.adapter_loader import AdapterLoader
from lockstep_serve.frames import Connection, Frame, Ready, finite, request_of
from lockstep_serve.say import say
from lockstep_serve.settings import EngineOptions

TICK = 1.0  # seconds between the signs of life of an idle engine
_POLL_S = 0.005  # while an adapter is being read
_ERRORS = {error.__name__: error for error in (InputError, CheckError)}


def main() -> None:
    """Serve until the API process has closed its end."""
    # The API process drains first and then ends this one; Ctrl-C at their terminal sends signals to both.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as end, contextlib.suppress(EOFError):
        connection = Connection(end)
        try:
            _serve(connection)
        except LockstepError as error:
            _fail(connection, type(error).__name__, " ".join(str(error).split()))
        except ModuleNotFoundError as error:
            _fail(connection, "InputError", f"{sys.executable} has no Python package {error.name!r}; install it there")


def error_of(frame: Frame) -> LockstepError:
    """Return the error of a frame "failed"."""
    return _ERRORS[frame["error"]](frame["message"])


def _fail(connection: Connection, error: str, message: str) -> None:
    connection.send({"type": "failed", "error": error, "message": message})
    connection.drain(10)
    raise SystemExit(1)


def _serve(connection: Connection) -> None:
    frames: list[Frame] = []
    while not frames:
        frames = connection.receive(60)
    options = EngineOptions(**frames.pop(0)["options"])
    engine, adapters, ready = _open(options)
    processes.freeze_heap()
    connection.send({"type": "ready", "ready": asdict(ready)})
    loader = AdapterLoader(adapters, options.checkpoint) if adapters else None
    _Loop(connection, engine, loader).run(frames)


def _open(options: EngineOptions) -> tuple[Engine, Adapters | None, Ready]:
    limits = options.limits
    model = Model.open(
        Path(options.engines),
        Path(options.assembly),
        Path(options.weights),
        options.layers,
        max_batch_size=limits["max_batch_size"],
        max_seq_len=limits["max_seq_len"],
        max_num_tokens=limits["max_num_tokens"],
        threads=options.threads,
        kv_bytes=options.kv_bytes,
        chunk_size=options.chunk_size,
        adapters_json=options.adapters,
    )
    lost = _reload_adapters(model, options)
    speculation = None
    if options.speculative is not None:
        speculation = open_speculation(model, Speculative(**options.speculative), options.threads)
    model.warm_up()
    grammars = Compiler(options.assembly, model.vocab_size, model.eos_token_ids, options.grammar_seconds)
    engine = Engine(
        model,
        limits["max_input_len"],
        prefix_caching=options.prefix_caching,
        admission=options.admission,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        grammars=grammars,
        speculation=speculation,
    )
    for _ in engine.run([Request([0, 0], min(2, model.max_seq_len - 1), cache_salt="warm-up")]):
        pass
    pool = model.tables.pool
    scheduler = engine.scheduler
    adapters = {}
    if model.adapters:
        adapters = {name: adapter.sha256 for name, adapter in model.adapters.known.items()}
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
        max_num_tokens=scheduler.max_num_tokens,
        chunk_size=scheduler.chunk_size,
        prefix_caching=engine.prefix_caching,
        num_pages=pool.num_pages,
        prompt_logprobs=model.gives_all_logits,
        verifies_drafts=model.verifies_drafts,
        adapters=adapters,
        lost_adapters=lost,
        kv_cache_dtype=model.engines.assembly.kv_cache_dtype,
    )
    return engine, model.adapters, ready


def _reload_adapters(model: Model, options: EngineOptions) -> dict[str, str]:
    """Load the adapters that the previous engine had loaded; return errors, by name."""
    lost = {}
    for name, folder, digest in options.loaded:
        try:
            assert model.adapters is not None  # the same model loaded them before
            adapter = AdapterLoader(model.adapters, options.checkpoint).read(name, folder)
            if adapter.sha256 != digest:
                raise InputError(f"adapter {name!r}: {folder}: expected sha256 {digest}, found {adapter.sha256}")
            model.adapters.add(adapter)
        except (LockstepError, OSError) as error:
            lost[name] = str(error)
    return lost


class _Loop:
    """The loop of the process: handle frames, and step."""

    def __init__(self, connection: Connection, engine: Engine, loader: AdapterLoader | None):
        self._connection = connection
        self._engine = engine
        self._loader = loader
        self._has_warned = False

    def run(self, frames: list[Frame]) -> None:
        engine = self._engine
        connection = self._connection
        last_sent = 0.0
        while True:
            for frame in frames:
                self._handle(frame)
            if engine.has_work:
                tokens = engine.step()
                self._warn_of_speculation()
                for number, message in engine.refused:
                    self._refuse(number, message, message.partition(":")[0])
                prompts = [[number, first, list(map(_pack, row))] for number, first, row in engine.prompt_logprobs]
                if tokens or engine.admitted or prompts or time.monotonic() - last_sent >= TICK:
                    last_sent = time.monotonic()
                    step = {"type": "step", "tokens": list(map(_entry, tokens)), "admitted": engine.admitted}
                    if prompts:
                        step["prompts"] = prompts
                    connection.send(step | self._counters())
            elif time.monotonic() - last_sent >= TICK:
                last_sent = time.monotonic()
                connection.send({"type": "tick", **self._counters()})
            is_loading = self._loader is not None and self._loader.under_way
            wait = TICK
            if engine.has_work:
                wait = 0.0
            elif is_loading:
                wait = _POLL_S
            frames = connection.receive(wait)
            if is_loading:
                self._add_loaded()

    def _handle(self, frame: Frame) -> None:
        id = frame["id"]
        if frame["type"] in ("load", "unload"):
            assert self._loader is not None  # the API process refuses adapters where the graphs take none
            if frame["type"] == "load":
                self._loader.start(id, frame["name"], frame["folder"])
            else:
                self._loader.adapters.remove(frame["name"])
            return
        if frame["type"] == "abort":
            self._engine.abort(id, frame.get("choice"))
            return
        try:
            self._engine.add(request_of(frame), id)
        except InputError as error:
            self._refuse(id, str(error))

    def _add_loaded(self) -> None:
        """Add the adapters that have been read, and answer their frames."""
        assert self._loader is not None
        for id, adapter in self._loader.poll():
            try:
                if isinstance(adapter, str):
                    raise InputError(adapter)
                self._loader.adapters.add(adapter)
                reply = {"type": "loaded", "id": id, "sha256": adapter.sha256}
            except InputError as error:
                reply = {"type": "not_loaded", "id": id, "message": str(error)}
            self._connection.send(reply)

    def _warn_of_speculation(self) -> None:
        """Log once that speculation is disabled."""
        speculation = self._engine.speculation
        if speculation is not None and speculation.failure and not self._has_warned:
            self._has_warned = True
            say(speculation.failure)

    def _refuse(self, id: int, message: str, param: str | None = None) -> None:
        self._connection.send({"type": "refused", "id": id, "message": message, "param": param})

    def _counters(self) -> dict[str, Any]:
        engine = self._engine
        scheduler = self._engine.scheduler
        pool = scheduler.tables.pool
        counters: dict[str, Any] = {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "free_pages": pool.num_available,
            "cached_pages": pool.num_cached,
            "swaps": scheduler.num_swaps,
            "prefix_queries": engine.prefix_queries,
            "prefix_hits": engine.prefix_hits,
        }
        if engine.speculation:
            counters["speculative"] = engine.speculation.counts()
        return counters


def _entry(token: Token) -> list[Any]:
    entry = [token.request, token.choice, token.token, token.finish]
    if token.logprobs is not None:
        entry += _pack(token.logprobs)
    return entry


def _pack(logprobs: Logprobs) -> list[Any]:
    return [finite(logprobs.chosen), [(token, finite(value)) for token, value in logprobs.top]]


if __name__ == "__main__":
    main()
