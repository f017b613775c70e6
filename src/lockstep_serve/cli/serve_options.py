"""Start the server that the options of `lockstep serve` describe.

options: those of the command line. Times are seconds; max_body and kv_bytes are bytes, kv_bytes below 1 a fraction of
the free memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from lockstep.errors import InputError
from lockstep.targets import Limits
from lockstep_serve.protocols import ProtocolPlugin, protocol_plugins
from lockstep_serve.settings import EngineOptions, ServedModelOptions, ServiceLimits, ServiceOptions
from lockstep_serve.spawn import EngineProcess

if TYPE_CHECKING:
    from lockstep.bundle.opened import Opened
    from lockstep_serve.bodies import Keys
    from lockstep_serve.request_log import RequestLog
    from lockstep_serve.traces import Traces


def _check_ranks(opened: Opened, num_ranks: int | None) -> None:
    """Raise InputError unless the graphs are split over as many ranks as requested."""
    from lockstep.artifacts.assembly import Assembly

    # Graphs are split over ranks when they are exported, so a server cannot choose the number.
    degree = getattr(Assembly.load(opened.assembly).tensor_parallel, "degree", 1)
    if num_ranks not in (None, degree):
        raise InputError(
            f"--tensor-parallel: expected {degree}, for {opened.target} was exported for that many, found {num_ranks}; "
            f"set tensor_parallel: {num_ranks} for {opened.target.model} in the config and run `lockstep run`"
        )


def _limits(checked: Limits, options: SimpleNamespace) -> Limits:
    """Return the sizes that are served. Raises InputError for larger ones than the target is checked to."""
    requested = {
        "max_seq_len": ("--max-model-len", options.max_model_len),
        "max_batch_size": ("--max-num-seqs", options.max_num_seqs),
    }
    limits = checked
    for key, (option, value) in requested.items():
        if value is None:
            continue
        if value > getattr(checked, key):
            raise InputError(
                f"{option}: expected at most {getattr(checked, key)}, to which the target is checked, found {value}; "
                f"raise limits.{key} in the config and run it again"
            )
        limits = replace(limits, **{key: value})
    return replace(limits, max_input_len=min(limits.max_input_len, limits.max_seq_len))


def _names(opened_models: Sequence[Opened], served_names: Sequence[str]) -> list[str]:
    """Return the models' names in requests. Raises InputError for too few, or for one twice."""
    if served_names and len(served_names) != len(opened_models):
        raise InputError(
            f"--served-model-name: expected {len(opened_models)}, one for each model, found {len(served_names)}"
        )
    names = list(served_names) or [opened.target.model for opened in opened_models]
    for name in names:
        if not name.strip():
            raise InputError("--served-model-name: expected a name, found an empty one")
        if names.count(name) > 1:
            raise InputError(f"models: expected a name for each, found {name} twice; give --served-model-name for each")
        if any(name.startswith(f"{other}:") for other in names):
            raise InputError(
                f"models: expected a name that is not of another one's adapter, found {name}; "
                "give --served-model-name for each"
            )
    return names


def _check_engines(first: Opened, other: Opened) -> None:
    """Raise InputError, with what differs, unless two engine sets compute the same."""
    from lockstep.artifacts.engines import EngineSetManifest

    def parts(opened: Opened) -> dict[str, Any]:
        manifest = EngineSetManifest.load(opened.engines)
        engines = {f"engine {name}": entry.sha256 for name, entry in manifest.engines.items()}
        names = ("backend", "backend_version", "precision", "options")
        return {**{name: getattr(manifest, name) for name in names}, **engines, "layers": opened.target.layers}

    expected = parts(first)
    actual = parts(other)
    for name in dict.fromkeys((*expected, *actual)):
        if expected.get(name) != actual.get(name):
            raise InputError(
                f"{other.target}: expected the engines of {first.target}, found another {name}: "
                f"{str(actual.get(name))[:80]}, not {str(expected.get(name))[:80]}; serve it by another server"
            )


def run_server(opened_models: Sequence[Opened], options: SimpleNamespace) -> None:
    """Serve opened targets or bundles until SIGTERM or Ctrl-C. Raises InputError for options that do not fit them."""
    from lockstep_serve.log import start_log

    plugins = protocol_plugins()
    for plugin in plugins:
        plugin.prepare(options)
    start_log(options.log_level)
    first = opened_models[0]
    names = _names(opened_models, options.served_model_names)
    _check_ranks(first, options.tensor_parallel)
    for other in opened_models[1:]:
        _check_engines(first, other)
    keys = read_api_keys(options.api_key_file, names)
    prefix = options.metrics_prefix
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix):
        raise InputError(f"--metrics-prefix: expected letters, digits and _, found {prefix!r}")
    # Started before the imports below, so that both processes load their libraries at the same time.
    with EngineProcess(first.target.backend) as engine:
        _serve(opened_models, names, keys, options, plugins, engine)


def _serve(
    opened_models: Sequence[Opened],
    names: Sequence[str],
    keys: Keys,
    options: SimpleNamespace,
    plugins: Sequence[ProtocolPlugin],
    engine: EngineProcess,
) -> None:
    # While the engine process starts.
    from lockstep.artifacts.chat_template import ChatTemplate
    from lockstep.runtime.request import CheckpointFiles
    from lockstep.runtime.tokenizer import Tokenizer
    from lockstep_serve.bodies import Access
    from lockstep_serve.cli.check_server import check_server
    from lockstep_serve.run import Address, serve
    from lockstep_serve.service import Service

    first = opened_models[0]
    # A step holds no more tokens or requests of a model than it was checked with.
    step_limits = {
        name: min(getattr(opened.limits, name) for opened in opened_models)
        for name in ("max_batch_size", "max_num_tokens")
    }
    engine_options = EngineOptions(
        engines=str(first.engines),
        assembly=str(first.assembly),
        weights=str(first.weights),
        layers=first.target.layers,
        limits=asdict(_limits(replace(first.limits, **step_limits), options)),
        threads=options.threads or _threads(),
        kv_bytes=options.kv_bytes,
        chunk_size=options.chunk_size,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        prefix_caching=not options.no_prefix_caching,
        admission=options.admission,
        grammar_seconds=options.grammar_timeout,
        speculative=options.speculative,
        log_level=options.log_level,
        adapters=_path_text(first.adapters),
        checkpoint=_path_text(first.checkpoint),
        others=[
            CheckpointFiles(
                name, str(other.assembly), str(other.weights), _path_text(other.adapters), _path_text(other.checkpoint)
            )
            for name, other in zip(names[1:], opened_models[1:])
        ],
        max_bound=options.max_loaded_models,
    )
    if (root := options.allow_adapter_loading) is not None:
        for opened in opened_models:
            _check_adapter_loading(opened)
    if options.allow_weight_updates is not None and first.adapters is not None:
        raise InputError(f"--allow-weight-updates: expected a model without adapters, found {first.target} with some")
    fields = ("max_queue", "max_queue_tokens", "queue_timeout", "stall", "slow_reader")
    limits = ServiceLimits(**{field: getattr(options, field) for field in fields})
    models = [
        ServedModelOptions(
            name,
            Tokenizer.open(opened.assembly),
            ChatTemplate.open(opened.assembly),
            options.tool_call_parser,
            options.reasoning_parser,
            opened.limits,
        )
        for name, opened in zip(names, opened_models)
    ]
    observers = _observers(options, names[0])
    weights_root = options.allow_weight_updates
    service_options = ServiceOptions(models, engine_options, limits, options.metrics_prefix, root, weights_root)
    service = Service(service_options, [observer.add for observer in observers], engine)
    if options.until_stdin_ends:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    port = options.port
    if port is None and options.unix is None:
        port = 8000
    address = Address(options.host, port, options.unix)
    access = Access(keys, options.max_body, options.body_timeout)
    openers = [functools.partial(plugin.open, options) for plugin in plugins]
    with contextlib.ExitStack() as stack, _named_options():
        for observer in observers:
            stack.callback(observer.close)
        if options.check:
            check_server(service, opened_models, options.results)
            return
        serve(service, address, access, options.drain, click.echo, openers)


def _observers(options: SimpleNamespace, name: str) -> list[RequestLog | Traces]:
    observers: list[RequestLog | Traces] = []
    if options.otlp_traces_endpoint is not None:
        from lockstep_serve.traces import Traces  # needs optional packages

        observers.append(Traces(options.otlp_traces_endpoint, name))
    if options.request_log is not None:
        from lockstep_serve.request_log import RequestLog

        observers.append(RequestLog(options.request_log, name))
    return observers


@contextlib.contextmanager
def _named_options() -> Iterator[None]:
    """Rename the engine's error of a KV cache that is too small after the option."""
    try:
        yield
    except InputError as error:
        if "kv_bytes" not in str(error):
            raise
        message = re.sub(r"^(kv_bytes|prompt \d+: request): ", "", str(error))  # the latter is of the warm-up
        raise InputError(f"--kv-bytes: {message.replace('kv_bytes', '--kv-bytes')}") from None


def _check_adapter_loading(opened: Opened) -> None:
    """Raise InputError for a model that cannot take adapters, and for a bundle."""
    from lockstep.artifacts.assembly import Assembly

    if Assembly.load(opened.assembly).adapters is None:
        raise InputError(
            "--allow-adapter-loading: expected a model whose graphs take adapters, found one without; give "
            f"{opened.target.model} `adapters` in the config and run `lockstep run`"
        )
    if opened.checkpoint is None:
        raise InputError(
            "--allow-adapter-loading: expected a target, whose checkpoint adapters are checked against, found a bundle"
        )


def _end_with_stdin() -> None:
    # OSError: stdin was closed before the server began.
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 12):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def _path_text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _threads() -> int | None:
    """Return the engine's number of CPU threads, which leaves a CPU to the API process; None with LOCKSTEP_THREADS.

    With a thread on each CPU, an engine's spinning threads starve the API process.
    """
    if os.environ.get("LOCKSTEP_THREADS"):
        return None
    from lockstep.backends.cpu import core_count, cpu_count

    return max(1, min(core_count(), cpu_count() - 1))


def read_api_keys(path: Path | None, models: Sequence[str]) -> Keys:
    """Return the keys of a file, one a line, each with the names of `models` after it that it opens; none: all.

    Empty lines and comments (#) are skipped. Raises InputError.
    """
    if path is None:
        return {}
    keys: dict[bytes, Sequence[str]] = {}
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{path}: expected a file of API keys, found none: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected API keys, of visible ASCII, found bytes that are no UTF-8") from None
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line and not line.startswith("#"):
            key, *names = line.split()
            where = f"{path}: line {number}"
            # Messages quote no key, nor what may be the rest of one: they are secrets.
            if not re.fullmatch("[!-~]+", key):
                raise InputError(f"{where}: expected an API key, of visible ASCII, found another character")
            if not set(names) <= set(models):
                raise InputError(f"{where}: expected names of {', '.join(models)} after the key, found another one")
            if key.encode() in keys:
                raise InputError(f"{where}: expected each API key once, found one of a line before")
            keys[key.encode()] = names
    if not keys:
        raise InputError(f"{path}: expected API keys, one a line, found none")
    if mode & stat.S_IROTH:
        click.echo(
            f"lockstep: warning: {path}: expected API keys that other users cannot read, found mode {mode:04o}; "
            f"chmod o= {path}",
            err=True,
        )
    return keys
