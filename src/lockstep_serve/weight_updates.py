"""Weights that a running server is given: `POST /update_weights`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import InputError
from lockstep.weights.replacement import write_manifest
from lockstep_serve.bodies import BadRequest, path_below
from lockstep_serve.frames import UpdateWeights, WeightsUpdated
from lockstep_serve.log import log
from lockstep_serve.stream import StreamError

if TYPE_CHECKING:
    from lockstep_serve.service import Service

_POLL_S = 0.005  # how often a waiting update looks whether requests still run


class WeightUpdates:
    """The weights of a server's first model: those that it was started with, or those of a folder since.

    Requests that came before an update end with the old weights, later ones wait for it: no answer is of two.

    Attributes:
        version: How many updates there were; None for a server that takes none.
        folder: Whose weights are served; None: those that the server was started with.
    """

    def __init__(self, service: Service, root: Path | None):
        """root: the folder below which weights may be; None: no updates."""
        self._service = service
        self._root = root and root.resolve()
        self.version = None if root is None else 0
        self.folder: Path | None = None
        self._manifest: Path | None = None  # of `folder`
        self._identity = ""
        self._started_with = ""  # the identity of an engine that has just started
        self._is_open = asyncio.Event()  # no update runs
        self._is_open.set()
        self._numbers = itertools.count(1)  # of manifests
        self._num_entering = 0
        self._answer: asyncio.Future[WeightsUpdated] | None = None
        if root is not None:
            self._manifests = tempfile.TemporaryDirectory(prefix="lockstep-weights-")

    @property
    def updating(self) -> bool:
        return not self._is_open.is_set()

    def check_queueing(self) -> None:
        """Raise StreamError while an engine replaces its weights: for requests that did not wait for it."""
        if self._answer is not None:
            raise StreamError("the weights are being replaced; try again", 503, "updating_weights", retry_after=1)

    @contextlib.asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Wait while an update runs; the next one waits until this request is queued."""
        while self.updating:
            await self._is_open.wait()
        self._num_entering += 1
        try:
            yield
        finally:
            self._num_entering -= 1

    async def update(self, path: str) -> None:
        """Replace the weights by those of a folder. Raises BadRequest, and StreamError where no engine runs."""
        if self._root is None:
            raise BadRequest("path: expected a server with --allow-weight-updates, found one without", None, 403)
        folder = self._find(self._root, path)
        if self.updating:
            raise BadRequest("path: expected no other update, found one that runs; try again later", "path", 409)
        self._is_open.clear()
        # An engine that was told to replace its weights does, even if the client has gone.
        await asyncio.shield(asyncio.create_task(self._update(folder)))

    def _find(self, root: Path, path: str) -> Path:
        folder = path_below(root, path)
        if folder is None or None in (path_below(root, str(file)) for file in folder.glob("*.safetensors")):
            raise BadRequest(
                f"path: expected a folder in that of --allow-weight-updates, found {path[:80]!r}", "path", 403
            )
        return folder

    async def _update(self, folder: Path) -> None:
        service = self._service
        assert self.version is not None
        manifest = Path(self._manifests.name, f"weights-{next(self._numbers)}.json")
        try:
            try:
                await asyncio.to_thread(write_manifest, folder, Path(service.engine_options.weights), manifest)
            except (InputError, OSError) as error:
                raise BadRequest(f"path: {error}", "path") from None
            while service.streams or self._num_entering:
                await asyncio.sleep(_POLL_S)
            if service.link is None:
                raise StreamError("the engine is starting; try again", 503, "engine_starting", retry_after=1)
            self._answer = asyncio.get_running_loop().create_future()
            service.link.send(UpdateWeights(str(manifest)))
            answer = await self._answer
            if answer.error is not None:
                raise BadRequest(f"path: {answer.error}", "path")
            self.version += 1
            self.folder = folder
            self._manifest = manifest
            self._set_identity(answer.identity)
            log.warning(f"weights {self.version}: those of {folder}, which no check has seen")
        finally:
            self._answer = None
            self._is_open.set()

    def _set_identity(self, identity: str) -> None:
        self._identity = identity
        self._service.first_frame = replace(self._service.ready, identity=identity)

    def engine_answered(self, frame: WeightsUpdated) -> None:
        if self._answer is not None:
            self._answer.set_result(frame)
        elif frame.error is not None or frame.identity != self._identity:
            reason = frame.error or "they have changed"
            log.error(f"weights {self.version}: expected those of {self.folder}, found none: {reason}")
            self._service.fail_all(StreamError("the engine died, and the weights that it had are gone", 503))
            self.folder = None
            self._manifest = None
            self._set_identity(self._started_with)

    def engine_started(self) -> None:
        """Give a new engine the weights that the last one had."""
        self._started_with = self._service.ready.identity
        if self._manifest is not None and self._service.link is not None:
            self._service.link.send(UpdateWeights(str(self._manifest)))
            self._set_identity(self._identity)

    def engine_died(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(StreamError("the engine died while it read the weights; try again", 503))
