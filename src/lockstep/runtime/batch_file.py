"""A file of prompts in, a file of completions out.

One record a line, as many at a time as the engine takes.

In (JSON lines, OpenAI's and vLLM's names): `prompt` (text, or token ids); the rest is optional: `id`, `max_tokens`,
`n`, `stop`, `ignore_eos`, `priority`, `bad_words` (texts), `lora` (an adapter's name), and the fields of `Sampling`.
Out: `line` (from 1), `id`, `input` (digest of the line, to recognise it), `choices` and `usage`, or `error`; in the
order in which requests end.

A run that was interrupted can be resumed: lines with a complete record are not computed again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from lockstep.errors import InputError, LockstepError
from lockstep.runtime.checks import CHOICES, expect
from lockstep.runtime.completion import Collector, Completion
from lockstep.runtime.drafts import Speculation
from lockstep.runtime.engine import Engine
from lockstep.runtime.model import Model
from lockstep.runtime.request import NOT_FINITE, Request, Speed
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.sampling import Sampling

_RECORD = b'{"line": '  # how each line of an output begins


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(
        token.isdecimal() and len(token) <= 20 and isinstance(bias, int | float) and not isinstance(bias, bool)
        for token, bias in value.items()
    )


# What the fields of a line must be. `Sampling` checks those that it has itself.
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "prompt": (
        "text or a list of token ids",
        lambda value: isinstance(value, str) or isinstance(value, list) and all(map(_is_whole, value)),
    ),
    "max_tokens": ("a whole number", _is_whole),
    "n": ("a whole number", _is_whole),
    "priority": ("a whole number", _is_whole),
    "stop": ("text or a list of texts", lambda value: isinstance(value, str) or _are_texts(value)),
    "bad_words": ("a list of texts", _are_texts),
    "logit_bias": ("numbers by token id", _is_bias),
    "ignore_eos": ("true or false", lambda value: isinstance(value, bool)),
    "cache_salt": ("text", lambda value: isinstance(value, str)),
    "lora": ("the name of an adapter", lambda value: isinstance(value, str)),
}
_SAMPLING = {field.name for field in dataclasses.fields(Sampling)} - set(_FIELDS)
_KNOWN = {"id", *_FIELDS, *_SAMPLING}


@dataclasses.dataclass(frozen=True)
class Defaults:
    """The settings of a line that names no others."""

    max_tokens: int = 64
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    adapter: str | None = None


@dataclasses.dataclass
class Done:
    """Lines with a record, those of them that failed, and the first failure."""

    lines: int = 0
    failed: int = 0
    first_error: str = ""


def generate_file(
    model: Model,
    tokenizer: Tokenizer,
    source: Path,
    out: Path,
    defaults: Defaults = Defaults(),
    max_input_len: int | None = None,
    progress: Callable[[Done, Speed], None] | None = None,
    speculation: Speculation | None = None,
) -> Done:
    """Complete all lines of `source` into `out`; progress: called after each step. speculation: see `Engine`.

    Raises InputError for a source that cannot be read, and an `out` that cannot be written, is of another source, or is
    the source or another run's; OSError, which names `out`, where it cannot be written any more: a full disk. A line
    that cannot be completed has an `error` in its record.
    """
    lines = _numbered_lines(source)
    # Read the first line before `out` is created: the source may not be readable.
    lines = itertools.chain([next(lines, (0, b""))], lines)
    with _expect_file(out):
        same = out.exists() and out.samefile(source)
    if same:
        raise InputError(f"{out}: expected another file than the input, found the same; give another --output")
    done = Done()
    running = dict[int, tuple[dict[str, Any], Collector]]()
    engine = Engine(model, max_input_len, speculation=speculation)
    with _appended(out) as file, contextlib.closing(engine):
        earlier_records = _records(out)

        def feed() -> bool:
            """Add lines while few requests wait. Return whether more may come."""
            while engine.scheduler.num_waiting < model.max_batch_size:
                number, line = next(lines, (0, b""))
                if not number:
                    return False
                if not line.strip():
                    continue
                record: dict[str, Any] = {"line": number, "input": hashlib.sha256(line.strip()).hexdigest()[:16]}
                if number in earlier_records:
                    _count(done, earlier_records[number], record, out)
                    continue
                try:
                    entry = _entry(line.strip())
                    record["id"] = entry.get("id")
                    request, stop = _request(entry, tokenizer, model, defaults)
                    collector = Collector(tokenizer, request.prompt_ids, request.n, stop, request.sampling.min_tokens)
                    running[engine.add(request)] = record, collector
                except LockstepError as error:
                    _write(file, done, {**record, "error": f"{source}:{number}: {error}"})
            return True

        for tokens in engine.steps(feed):
            for token in tokens:
                record, collector = running[token.request]
                collector.push(token)
                if collector.stopped(token):
                    engine.abort(token.request, token.choice)
                if collector.completion.done:
                    del running[token.request]
                    _write(file, done, {**record, **_answer(collector.completion, f"{source}:{record['line']}")})
            if progress:
                progress(done, engine.speed)
    return done


def _numbered_lines(source: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open(source, "rb") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise InputError(f"{source}: expected a file of prompts, one JSON record a line: {error.strerror}") from None


@contextlib.contextmanager
def _expect_file(out: Path) -> Iterator[None]:
    """Raise InputError where a file of completions is opened and cannot be."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{out}: expected a file that completions can be written to: {error.strerror}; give another --output"
        ) from None


def _appended(out: Path) -> FileIO:
    """Open an output at its end, without a buffer, for this run alone.

    A run before may still write to it, even if its parent process was killed.
    """
    with _expect_file(out):
        file = open(out, "ab", buffering=0)
    if not out.is_file():
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InputError(
            f"{out}: expected a file that no other run writes to, found one that does; wait for it, or end it"
        ) from None
    except OSError:
        pass  # a file system without locks
    return file


def _records(out: Path) -> dict[int, dict[str, Any]]:
    """Return the records of an earlier run, by line.

    Truncates a partial last line. A pipe or a device has no records.
    """
    if not out.is_file():
        return {}
    with _expect_file(out):
        data = out.read_bytes()
    *complete_lines, partial_line = data.split(b"\n")
    records = {}
    for number, line in enumerate([*complete_lines, partial_line], 1):
        try:
            if number > len(complete_lines):
                if not _RECORD.startswith(partial_line[: len(_RECORD)]):
                    raise ValueError
                break
            record = json.loads(line)
            records[int(record["line"])] = {"input": record["input"], "error": record.get("error")}
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{out}:{number}: expected a record of an earlier run, found {_start(line)}; give another --output"
            ) from None
    if partial_line:
        os.truncate(out, len(data) - len(partial_line))
    return records


def _count(done: Done, earlier: Mapping[str, Any], record: Mapping[str, Any], out: Path) -> None:
    """Count a line that an earlier run completed. Raises InputError if that run read another line there."""
    if earlier["input"] != record["input"]:
        raise InputError(
            f"{out}: expected records of this input, found one of another for line {record['line']}; "
            "give another --output, or remove it"
        )
    done.lines += 1
    if earlier["error"]:
        done.failed += 1
        done.first_error = done.first_error or earlier["error"]


def _write(file: FileIO, done: Done, record: Mapping[str, Any]) -> None:
    # An `id` may have half of a surrogate pair, which UTF-8 cannot encode: write its JSON escape.
    data = (json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
    try:
        while data:  # a write may be partial
            data = data[file.write(data) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file.name)) from None
    done.lines += 1
    if "error" in record:
        done.failed += 1
        done.first_error = done.first_error or record["error"]


def _entry(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"expected a JSON record, found {_start(line)}") from None
    if not isinstance(entry, dict) or "prompt" not in entry:
        raise InputError(f"expected a record with a prompt, found {_start(line)}")
    return entry


def _start(line: bytes) -> str:
    return repr(line.decode(errors="replace")[:60])


def _request(
    entry: Mapping[str, Any], tokenizer: Tokenizer, model: Model, defaults: Defaults
) -> tuple[Request, tuple[str, ...]]:
    unknown = sorted(set(entry) - _KNOWN)
    if unknown:
        raise InputError(f"expected only {', '.join(sorted(_KNOWN))}, found {', '.join(unknown)}")
    for name, (expected, holds) in _FIELDS.items():
        if name in entry and not holds(entry[name]):
            raise InputError(f"{name}: expected {expected}, found {repr(entry[name])[:60]}")
    prompt = entry["prompt"]
    if isinstance(prompt, str):
        prompt = tokenizer.encode(prompt)
    n = entry.get("n", 1)
    stop = entry.get("stop", defaults.stop)
    if isinstance(stop, str):
        stop = (stop,)
    stop_ids = frozenset[int]()
    if not entry.get("ignore_eos"):
        stop_ids = frozenset(model.eos_token_ids)
    expect("n", n, 1, model.max_batch_size, CHOICES)  # before n answers are allocated
    sampling: dict[str, Any] = {name: entry[name] for name in _SAMPLING if name in entry}
    sampling["logit_bias"] = {int(token): bias for token, bias in entry.get("logit_bias", {}).items()}
    sampling["bad_words"] = tuple(entry.get("bad_words", ()))
    request = Request(
        prompt,
        entry.get("max_tokens", defaults.max_tokens),
        stop_ids=stop_ids,
        sampling=dataclasses.replace(defaults.sampling, **sampling),
        n=n,
        priority=entry.get("priority", 0),
        adapter=entry.get("lora", defaults.adapter),
        cache_salt=entry.get("cache_salt", ""),
    )
    return request, tuple(stop)


def _answer(completion: Completion, where: str) -> dict[str, Any]:
    if any(choice.finish == "error" for choice in completion.choices):
        return {"error": f"{where}: {NOT_FINITE}"}
    return completion.record()
