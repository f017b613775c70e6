"""Compile a grammar on trial, in a child process.

The process may hang, need all memory or crash: the engine lives on.

llguidance takes minutes for some grammars of a few hundred characters, and overflows the stack for long chains of
rules. A thread that does so cannot be ended; a process can. The process runs this file, with the standard library and
llguidance alone: lines of JSON in (the tokenizer, then grammars), for each one line out, `{"error": message or ""}`.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import pip_install
from lockstep.processes import environment

_STACK = 4 << 20  # bytes, of the thread that compiles here: the engine's threads have more
_MEMORY = 1 << 30  # bytes that a grammar may take
_START = 60.0  # seconds
_HANG = 60.0  # seconds by the clock, beyond a grammar's own: the machine may be busy with other work
_OPTIONS = "x-guidance"  # of a schema, for llguidance
_WHITE_SPACE = r"[ \n\r\t]{1,64}"  # between two parts of JSON: a new line, and fifteen levels of four spaces


class Refusal(Exception):
    """Why a grammar was rejected: one line that continues "expected ..."."""


class TrialProcess:
    """A child process that compiles grammars, and its limits. Not thread-safe."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer_request = {
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "eos_token_ids": list(eos_token_ids),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def check(self, kind: str, text: str, seconds: float, around: str = "") -> None:
        """Check that a grammar compiles within `seconds` of CPU time. Raises Refusal."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment(),
            )
            try:
                self._ask(self._tokenizer_request, _START)
            except Refusal:
                self.close()
                raise
        self._ask({"kind": kind, "text": text, "around": around, "seconds": seconds}, _HANG + seconds)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _ask(self, request: Mapping[str, Any], seconds: float) -> None:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        end = time.monotonic() + seconds
        answer = b""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            poll = select.poll()  # `select.select` is not for descriptors from 1,024 on
            poll.register(self.process.stdout, select.POLLIN)
            while not answer.endswith(b"\n"):
                if not poll.poll(math.ceil(max(0.0, end - time.monotonic()) * 1000)):
                    self.close()
                    raise Refusal(f"an answer of its trial within {seconds:g} s, found none; send it again")
                part = os.read(self.process.stdout.fileno(), 1 << 16)
                if not part:
                    raise BrokenPipeError
                answer += part
        except BrokenPipeError:
            ended_by = -self.process.wait()
            self.close()
            if ended_by == signal.SIGPROF:
                raise Refusal(
                    f"a grammar that compiles within {request['seconds']:g} s of CPU time, found one that did not; "
                    "simplify it"
                ) from None
            raise Refusal(
                "a grammar that compiles, found one that nests too deep, or needs more memory than it may; simplify it"
            ) from None
        reply = json.loads(answer)
        if reply["error"]:
            raise Refusal(reply["error"])


def open_tokenizer(text: str, vocab_size: int, eos_token_ids: Sequence[int]) -> Any:
    """Return llguidance's tokenizer of a tokenizer.json.

    Raises Refusal, also where llguidance is not installed.
    """
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise Refusal(
            f"the Python package {error.name!r}, found that {sys.executable} has none; there, {pip_install('grammar')}"
        ) from None
    eos = list(eos_token_ids) or None
    try:
        tokenizer = llguidance.LLTokenizer(text, eos_token=eos)
        if tokenizer.vocab_size >= vocab_size:
            return tokenizer
        return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
    except ValueError as error:
        raise Refusal(f"a tokenizer.json that llguidance can read, found {_line(error)}") from None


def compiled(tokenizer: Any, kind: str, text: str, around: str = "") -> Any:
    """Return the matcher of a grammar; around: as of `Grammar`. Raises Refusal."""
    import llguidance

    try:
        if kind == "regex":
            from_regex = json.loads(llguidance.LLMatcher.grammar_from_regex(text))
            program = json.dumps({"grammars": [{"lark_grammar": from_regex["grammars"][0]["lark_grammar"]}]})
        elif kind == "lark":
            program = json.dumps({"grammars": [{"lark_grammar": text}]})
        else:  # concatenated as text: llguidance's own function parses a schema with the GIL held
            schema = bounded(text if kind == "json_schema" else '{"type": "object"}')
            program = f'{{"grammars": [{{"json_schema": {schema}}}]}}'
        if around:
            program = _inside(around, program)
        matcher = llguidance.LLMatcher(tokenizer, program, log_level=0)
    except (ValueError, TypeError, RecursionError) as error:
        raise Refusal(f"a grammar that llguidance takes, found {_line(error)}") from None
    if matcher.is_error():
        raise Refusal(f"a grammar that llguidance takes, found: {_line(matcher.get_error())}")
    return matcher


def _inside(around: str, program: str) -> str:
    """Return a program whose grammar is `@answer` in another one."""
    opening = '{"grammars": [{'
    assert program.startswith(opening), "a program is a list of grammars"
    return f'{{"grammars": [{{"lark_grammar": {json.dumps(around)}}}, {{"name": "answer", {program[len(opening) :]}'


def bounded(text: str, white_space: str = _WHITE_SPACE) -> str:
    """Return a schema that allows white space of a bounded length, unless it sets white space itself.

    Without a bound, a model may fill its answer with white space.
    """
    schema = json.loads(text)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options = schema.get(_OPTIONS, {}) if isinstance(schema, dict) else None
    if not isinstance(options, dict) or options.keys() & {"whitespace_flexible", "whitespace_pattern"}:
        return text
    return json.dumps({**schema, _OPTIONS: {**options, "whitespace_pattern": white_space}})


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300]


def _main() -> None:
    tokenizer: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"error": ""}
        try:
            if tokenizer is None:
                tokenizer = open_tokenizer(request["tokenizer"], request["vocab_size"], request["eos_token_ids"])
                _limit_memory(_address_space() + _MEMORY)
            else:
                # CPU time, not the clock's: whether a grammar is taken must not depend on what else the machine does.
                signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # SIGPROF ends this process
                _compile(tokenizer, request, answer)
                signal.setitimer(signal.ITIMER_PROF, 0)
        except Refusal as refusal:
            answer["error"] = str(refusal)
        print(json.dumps(answer), flush=True)


def _compile(tokenizer: Any, request: Mapping[str, Any], answer: dict[str, str]) -> None:
    """Compile a grammar in a thread, whose stack is smaller than those of the engine's threads; sets the error."""

    def work() -> None:
        try:
            matcher = compiled(tokenizer, request["kind"], request["text"], request["around"])
            matcher.deep_copy().compute_bitmask()
        except Refusal as refusal:
            answer["error"] = str(refusal)
        except BaseException as error:  # a panic of its Rust code is no Exception; a thread would drop it
            answer["error"] = f"a grammar that compiles, found {type(error).__name__}"

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _limit_memory(limit: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this folder: its modules are of a package
    threading.stack_size(_STACK)
    _main()
