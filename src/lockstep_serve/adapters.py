"""The adapters that requests may name: the model's, and folders that requests had loaded."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.artifacts.adapters import CONFIG, WEIGHTS
from lockstep.errors import truncate_list
from lockstep.runtime.request import adapter_of
from lockstep_serve.bodies import BadRequest, path_below
from lockstep_serve.frames import Load, Loaded, Ready, Unload
from lockstep_serve.link import EngineLink
from lockstep_serve.stream import StreamError

_MAX_LOADED = 256
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class LoadedFolder:
    """A loaded adapter's folder, the stamp of its files when they were read, and the digest of its tensors."""

    folder: Path
    stamp: Stamp | None
    sha256: str


class Adapters:
    """The names of a model's adapters, and which of them the engine has loaded.

    Attributes:
        lost: By name, why an adapter of the engine before is not in this one.
    """

    _numbers = itertools.count()  # of loads, of all models

    def __init__(self, model: str, checkpoint: str, root: Path | None, is_used: Callable[[str], bool]):
        """Start without an engine.

        checkpoint: the model's name in the engine. root: requests may name folders below it as adapters; None: no
        folders. is_used: whether requests use an adapter, by its name in the engine.
        """
        self._model = model
        self._checkpoint = checkpoint
        self._root = root and root.resolve()
        self._is_used = is_used
        self._loaded: dict[str, LoadedFolder] = {}  # since the server started, the least recently used first
        self._configured: Mapping[str, str] = {}  # {name: sha256} of the config's adapters
        self._at_start: Mapping[str, str] | None = None  # those of the first engine
        self.lost: dict[str, str] = {}
        self._link: EngineLink | None = None
        self._loading: dict[str, tuple[Path, asyncio.Task[None]]] = {}  # by name
        self._reloading: set[str] = set()  # names that the starting engine loads again
        self._answers: dict[int, asyncio.Future[Loaded]] = {}  # of the engine, by request number

    # -- names

    @property
    def names(self) -> list[str]:
        """Return the names of the config's adapters."""
        return sorted(self._configured)

    @property
    def model_names(self) -> list[str]:
        """Return the names that a request may give the model: `name`, `name:adapter`."""
        return [self._model, *(f"{self._model}:{adapter}" for adapter in (*self.names, *sorted(self._loaded)))]

    def digest(self, name: str) -> str:
        """Return the SHA-256, in hex, of what an adapter computes."""
        return self._loaded[name].sha256 if name in self._loaded else self._configured[name]

    def resolve(self, model: str | None, lora: str | None = None) -> str | None:
        """Return the adapter that `model` or `lora` names; None for the model alone. Raises BadRequest."""
        from_model: str | None = None
        if model not in (None, self._model):
            if model not in self.model_names:
                raise BadRequest(f"model: expected {one_of(self.model_names)}, found {model[:80]!r}", "model", 404)
            from_model = model.removeprefix(f"{self._model}:")
        if lora is None or lora == from_model:
            return from_model
        adapter = lora
        if lora not in self._configured and lora not in self._loaded and self._root is not None:
            adapter, _ = self._find(lora)
        if lora not in self._configured and adapter not in self._loaded:
            choices = one_of([*self.names, *self._loaded]) or "none, for the model has no adapters"
            hint = ""
            if "/" in lora and not self._root:
                hint = "; --allow-adapter-loading lets requests name folders"
            raise BadRequest(f"lora: expected {choices}, found {lora[:80]!r}{hint}", "lora", 404)
        if from_model not in (None, adapter):
            raise BadRequest(f"lora: expected {from_model!r} as in model, found {lora[:80]!r}; leave one out", "lora")
        return adapter

    # -- loading

    async def ensure_loaded(self, lora: str | None) -> None:
        """Load the folder that a request names as its adapter, where allowed and needed. Raises BadRequest."""
        if lora is None or self._root is None or lora in self._configured:
            return
        if lora in self._loading:  # under this name, which may differ from that of its folder
            await asyncio.shield(self._loading[lora][1])
        if lora in self._loaded:
            return self._use(lora)
        name, folder = self._find(lora)
        named_folder = folder  # POST /v1/load_lora_adapter may have given the name to another one
        if name in self._loaded:
            named_folder = self._loaded[name].folder
        elif name in self._loading:
            named_folder = self._loading[name][0]
        if named_folder != folder:
            raise BadRequest(
                f"lora: expected a folder whose name is free, found {name!r}, which is that of {named_folder.name!r}",
                "lora",
                409,
            )
        if name not in self._loaded:
            return await self.load(name, folder)
        self._use(name)

    def _find(self, text: str) -> tuple[str, Path]:
        """Return the name and path of a folder below the root, links followed. Raises BadRequest for another."""
        assert self._root is not None
        folder = path_below(self._root, text)
        if folder in (None, self._root):
            expected = "the name of an adapter, or a folder below that of --allow-adapter-loading"
            raise BadRequest(f"lora: expected {expected}, found {text[:80]!r}", "lora", 403)
        name = folder.relative_to(self._root).as_posix()
        _check_name("lora", name)
        return name, folder

    def _use(self, name: str) -> None:
        """Mark a loaded adapter as just used. Raises BadRequest, 409, where its folder has changed."""
        entry = self._loaded[name] = self._loaded.pop(name)
        if _stamp_of(entry.folder) != entry.stamp:
            raise BadRequest(
                f"lora: adapter {name!r}: expected its folder as it was when it was loaded, found it changed or gone; "
                "unload it (POST /v1/unload_lora_adapter), or put it back",
                "lora",
                409,
            )

    async def load(self, name: str, folder: Path | str) -> None:
        """Load a folder under a name; requests for it share one load. Raises BadRequest."""
        if self._root is None:
            raise BadRequest("lora_path: expected a server with --allow-adapter-loading, found one without", None, 403)
        if isinstance(folder, str):
            _check_name("lora_name", name)
            _, folder = self._find(folder)
            if name in self._configured or name in self._loaded:
                raise BadRequest(f"lora_name: expected a new name, found {name!r}, which is loaded", "lora_name", 409)
        if name not in self._loading:
            task = asyncio.create_task(self._load(name, folder))
            self._loading[name] = folder, task
            task.add_done_callback(lambda task: self._has_loaded(name, task))
        loading_folder, task = self._loading[name]
        if loading_folder != folder:
            message = (
                f"lora_name: expected a new name, found {name!r}, as which {loading_folder.name!r} is being loaded"
            )
            raise BadRequest(message, "lora_name", 409)
        # Shielded: another request may wait for the same load when this one's client goes.
        await asyncio.shield(task)

    def _has_loaded(self, name: str, task: asyncio.Task[None]) -> None:
        del self._loading[name]
        if not task.cancelled():
            task.exception()  # read the exception, or asyncio logs it if no request awaits the task

    async def _load(self, name: str, folder: Path) -> None:
        loaded = self._loaded
        if self._link is None:
            raise StreamError("the engine is starting; try again", 503, "engine_starting", retry_after=1)
        if len(loaded) >= _MAX_LOADED:
            unused = next((name for name in loaded if not self._is_used(self.in_engine(name))), None)
            if unused is None:
                raise StreamError(f"{len(loaded)} adapters are loaded and in use; try again", 503, "adapters_in_use", 1)
            self.unload(unused)
        stamp = _stamp_of(folder)  # before the engine reads it: a change meanwhile is seen at the next use
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._link.send(Load(number, name, str(folder), self._checkpoint))
        try:
            frame = await answer
        finally:
            self._answers.pop(number, None)
        if frame.error is not None:
            raise BadRequest(f"lora: {frame.error}", "lora")
        loaded[name] = LoadedFolder(folder, stamp, frame.sha256)
        self.lost.pop(name, None)

    def unload(self, name: str) -> None:
        """Unload an adapter. Raises BadRequest for one that is not loaded, or in use."""
        loaded = self._loaded
        if name not in loaded:
            choices = one_of(sorted(loaded)) or "none, for none was loaded"
            raise BadRequest(f"lora_name: expected {choices}, found {name[:80]!r}", "lora_name", 404)
        if self._is_used(self.in_engine(name)):
            message = f"expected an adapter that no request uses, found {name!r} in use; try again when they have ended"
            raise BadRequest(f"lora_name: {message}", "lora_name", 409)
        del loaded[name]
        if self._link is not None:
            self._link.send(Unload(self.in_engine(name)))

    # -- the engine

    def in_engine(self, name: str) -> str:
        """Return an adapter's name in the engine, which has those of all models."""
        return adapter_of(self._checkpoint, name)

    def to_load(self) -> list[tuple[Load, str]]:
        """Return each adapter that a new engine must load, and its SHA-256."""
        self._reloading = set(self._loaded)
        return [
            (Load(next(self._numbers), name, str(entry.folder), self._checkpoint), entry.sha256)
            for name, entry in self._loaded.items()
        ]

    def engine_started(self, link: EngineLink, ready: Ready) -> list[str]:
        """Use a new engine; return a line for each adapter that it could not load again."""
        lost = {**ready.lost_adapters.get(self._checkpoint, {})}
        unloaded = self._reloading - set(self._loaded) - set(lost)  # while it started
        adapters = ready.adapters.get(self._checkpoint, {})
        if self._at_start is None:
            self._at_start = adapters
        for name in adapters.keys() - self._reloading:
            digest = self._at_start.get(name)
            if digest is None:  # the config has it since then
                unloaded.add(name)
            elif adapters[name] != digest:
                lost[name] = f"adapter {name!r}: expected sha256 {digest}, found {adapters[name]}"
        unloaded |= adapters.keys() & lost.keys()
        left_out = self._reloading | unloaded
        self._configured = {name: digest for name, digest in adapters.items() if name not in left_out}
        for name in unloaded:
            link.send(Unload(self.in_engine(name)))
        for name in lost:
            self._loaded.pop(name, None)
        self.lost = lost
        self._link = link
        return [f"an adapter is not loaded again: {line}" for line in lost.values()]

    def engine_died(self) -> None:
        """Fail the loads that wait for the engine."""
        self._link = None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(StreamError("the engine died while it loaded the adapter; try again", 503))

    def engine_answered(self, frame: Loaded) -> None:
        """Hand the engine's answer to the request that waits for it."""
        answer = self._answers.get(frame.id)
        if answer is not None and not answer.done():
            answer.set_result(frame)


def one_of(names: Sequence[str]) -> str:
    """Return names for an error; the first ones of many."""
    choices = truncate_list(names)
    return f"one of {choices}" if len(names) > 1 else choices


def _check_name(field: str, name: str) -> None:
    """Raise BadRequest for what cannot be part of a model's name."""
    if len(name) > 200 or not _NAME.fullmatch(name):
        raise BadRequest(f"{field}: expected letters, digits, . _ - and /, found {name[:80]!r}", field)


def _stamp_of(folder: Path) -> Stamp | None:
    """Return a value that changes when an adapter's file does; None if one is gone."""
    try:
        files = [os.stat(folder / name) for name in (CONFIG, WEIGHTS)]
    except OSError:
        return None
    return tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in files)
