"""The engine in a process of its own: `python -m lockstep.serve.engine_process FD`, FD the number of a socket to the
API process. It opens what its first frame names, and then steps while there are requests.

It keeps nothing that could be lost: the API process knows what was asked for and what was given out, and brings it
again to another engine. Without the API process it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.errors import CheckError, InputError, LockstepError
from lockstep.runtime.engine import Engine
from lockstep.runtime.grammar.compiler import Compiler
from lockstep.runtime.model import Model
from lockstep.runtime.prefix import root_key
from lockstep.runtime.request import Request, Token
from lockstep.serve.frames import Connection, Frame, finite, request_of
from lockstep.step.sampling import Logprobs

TICK = 1.0  # seconds between the signs of life of an idle engine
_ERRORS = {error.__name__: error for error in (InputError, CheckError)}


def main() -> None:
    """Serve until the API process is gone."""
    # The API process ends this one: a Ctrl-C at the terminal that both hang on is its business, and so is SIGTERM.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=int(sys.argv[1])))
    with contextlib.suppress(EOFError):
        try:
            _serve(connection)
        except LockstepError as error:
            _fail(connection, type(error).__name__, " ".join(str(error).split()))
        except ModuleNotFoundError as error:
            _fail(connection, "InputError", f"{sys.executable} has no Python package {error.name!r}; install it there")


def error_of(frame: Frame) -> LockstepError:
    """The error of a frame "failed"."""
    return _ERRORS[frame["error"]](frame["message"])


def _fail(connection: Connection, error: str, message: str) -> None:
    connection.send({"type": "failed", "error": error, "message": message})
    connection.drain(10)
    raise SystemExit(1)


def _serve(connection: Connection) -> None:
    frames: list[Frame] = []
    while not frames:
        frames = connection.receive(60)
    engine, ready = _open(frames.pop(0))
    connection.send(ready)
    _Loop(connection, engine).run(frames)


def _open(asked: Frame) -> tuple[Engine, Frame]:
    limits = asked["limits"]
    began = time.monotonic()
    model = Model.open(
        Path(asked["engines"]),
        Path(asked["assembly"]),
        Path(asked["weights"]),
        asked["layers"],
        **{name: limits[name] for name in ("max_batch_size", "max_seq_len", "max_num_tokens")},
        threads=asked["threads"],
        kv_bytes=asked["kv_bytes"],
        chunk_size=asked["chunk_size"],
        adapters_json=asked.get("adapters"),
    )
    model.warm_up()
    grammars = Compiler(asked["assembly"], model.vocab_size, model.eos_token_ids, asked["grammar_seconds"])
    engine = Engine(
        model,
        limits["max_input_len"],
        prefix_caching=asked["prefix_caching"],
        admission=asked["admission"],
        long_prefill_token_threshold=asked["long_prefill_token_threshold"],
        grammars=grammars,
    )
    for _ in engine.run([Request([0, 0], min(2, model.max_seq_len - 1), cache_salt="warm-up")]):
        pass
    pool, scheduler = model.tables.pool, engine.scheduler
    ready = {
        "type": "ready",
        "pid": os.getpid(),
        "seconds": round(time.monotonic() - began, 3),
        "identity": root_key(model).hex(),
        "backend": model.engines.manifest.backend,
        "batch_invariant": model.engines.backend.batch_invariant,
        "engine_digest": model.engines.digest(),
        "vocab_size": model.vocab_size,
        "eos_token_ids": list(model.eos_token_ids),
        "max_batch_size": model.max_batch_size,
        "max_seq_len": model.max_seq_len,
        "max_input_len": min(limits["max_input_len"] or model.max_seq_len, model.max_seq_len),
        "max_num_tokens": scheduler.max_num_tokens,
        "chunk_size": scheduler.chunk_size,
        "prefix_caching": engine.prefix_caching,
        "num_pages": pool.num_pages,
        "prompt_logprobs": model.gives_all_logits,
        "page_nbytes": pool.page_nbytes,
        "adapters": {name: adapter.sha256 for name, adapter in model.adapters.known.items()} if model.adapters else {},
    }
    return engine, ready


class _Loop:
    """Frames between steps."""

    def __init__(self, connection: Connection, engine: Engine):
        self._connection, self._engine = connection, engine
        self._ids: dict[int, int] = {}  # of a request in the engine -> as the API process calls it
        self._numbers: dict[int, int] = {}  # and back
        self._left: dict[int, int] = {}  # choices that have not ended

    def run(self, frames: list[Frame]) -> None:
        engine, connection, said = self._engine, self._connection, 0.0
        while True:
            for frame in frames:
                self._take(frame)
            if engine.has_work:
                made = engine.step()
                for number, message in engine.refused:
                    self._refuse(self._ids[number], message, message.partition(":")[0])
                    self._end(number, self._left[number])
                admitted = [self._ids[number] for number in engine.admitted if number in self._ids]
                prompts = [
                    [self._ids[number], first, [_packed(each) for each in found]]
                    for number, first, found in engine.prompt_logprobs
                ]
                if made or admitted or prompts or time.monotonic() - said >= TICK:
                    said = time.monotonic()
                    tokens = [self._entry(token) for token in made]
                    more = {"prompts": prompts} if prompts else {}
                    connection.send(
                        {"type": "step", "tokens": tokens, "admitted": admitted, **more, **self._counters()}
                    )
            elif time.monotonic() - said >= TICK:
                said = time.monotonic()
                connection.send({"type": "tick", **self._counters()})
            frames = connection.receive(0.0 if engine.has_work else TICK)

    def _take(self, frame: Frame) -> None:
        id = frame["id"]
        if frame["type"] == "abort":
            if (number := self._numbers.get(id)) is not None:
                choice = frame.get("choice")
                if self._engine.abort(number, choice):
                    self._end(number, 1 if choice is not None else self._left[number])
            return
        try:
            request = request_of(frame)
            number = self._engine.add(request)
        except InputError as error:
            self._refuse(id, str(error))
            return
        self._ids[number], self._numbers[id], self._left[number] = id, number, request.n

    def _refuse(self, id: int, message: str, param: str | None = None) -> None:
        self._connection.send({"type": "refused", "id": id, "message": message, "param": param})

    def _end(self, number: int, choices: int) -> None:
        self._left[number] -= choices
        if not self._left[number]:
            del self._left[number], self._numbers[self._ids.pop(number)]

    def _entry(self, token: Token) -> list[Any]:
        entry: list[Any] = [self._ids[token.request], token.choice, token.token, token.finish]
        if token.logprobs is not None:
            entry += _packed(token.logprobs)
        if token.finish:
            self._end(token.request, 1)
        return entry

    def _counters(self) -> dict[str, Any]:
        engine, scheduler = self._engine, self._engine.scheduler
        pool = scheduler.tables.pool
        return {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "free_pages": pool.num_available,
            "cached_pages": pool.num_cached,
            "swaps": scheduler.num_swaps,
            "prefix_queries": engine.prefix_queries,
            "prefix_hits": engine.prefix_hits,
        }


def _packed(logprobs: Logprobs) -> list[Any]:
    return [finite(logprobs.chosen), [(token, finite(value)) for token, value in logprobs.top]]


if __name__ == "__main__":
    main()
