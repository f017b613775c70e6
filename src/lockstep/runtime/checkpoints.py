"""The checkpoints that one set of engines runs with, and which of them are bound to networks.

Engines hold no weights, so they serve every fine-tune of a shape. A model has one or several networks; a checkpoint
whose requests run is bound to one of them, and a step runs requests of one checkpoint. One that is not bound takes the
network of the checkpoint that is unused for longest: its weights are loaded while steps of others run.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.artifacts.assembly import Assembly
from lockstep.errors import InputError, LockstepError
from lockstep.manifests.manifest_files import content
from lockstep.runtime.bad_words import Vocabulary
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.advance import Executor, Load
from lockstep.step.network import Network
from lockstep.step.residency import Residency


class Checkpoint:
    """The weights of one checkpoint, and the files that belong to them.

    Attributes:
        weights_sha256: The digest of the tensors, which does not depend on where the files are.
    """

    def __init__(
        self, name: str, assembly_json: Path, weights_json: Path, assembly: Assembly, weights_sha256: str | None = None
    ):
        """weights_sha256: the digest of weights that may have changed since; None: read it."""
        self.name = name
        self.assembly_json = assembly_json
        self.weights_json = weights_json
        self._state = None if weights_sha256 else _state(weights_json)
        self.weights_sha256 = weights_sha256 or content(weights_json)
        self.eos_token_ids = assembly.eos_token_ids
        self._vocab_size = assembly.vocab_size

    def check_unchanged(self) -> None:
        """Raise InputError for weights that were converted again since: cached prefixes are of the earlier ones."""
        if _state(self.weights_json) != self._state and content(self.weights_json) != self.weights_sha256:
            raise InputError(
                f"{self.weights_json}: expected the weights of when they were opened, found others; start the server "
                "again"
            )

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """Return the texts of all tokens, read from the assembly's tokenizer on first use.

        Raises InputError without a tokenizer that can be opened, CheckError for another one than was exported.
        """
        return Vocabulary(Tokenizer.open(self.assembly_json).pieces, self._vocab_size)


class _FailedLoad:
    """A load that could not begin."""

    def __init__(self, error: Exception):
        self._error = error

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        raise self._error


class Checkpoints:
    """The checkpoints of a model by name, and the networks that they are bound to.

    Attributes:
        residency: The network of each request slot, and which checkpoint each network has; None for one checkpoint
            alone.
    """

    def __init__(
        self,
        checkpoints: Sequence[Checkpoint],
        executor: Executor,
        bind: Callable[[Path], Network],
        bound: Sequence[Checkpoint],
    ):
        """Start with these checkpoints bound to the networks; one that is bound to several has the first of them.

        bind: see `Executor.load`.
        """
        self.by_name = {checkpoint.name: checkpoint for checkpoint in checkpoints}
        self.residency: Residency | None = None
        if len(checkpoints) > 1:
            self.residency = Residency(executor.num_slots, len(bound))
            for number, checkpoint in enumerate(bound):
                self.residency.place_of.setdefault(checkpoint.name, number)
        self._executor = executor
        self._bind = bind
        self._loads: dict[int, tuple[str, Load]] = {}  # by network

    def __getitem__(self, name: str) -> Checkpoint:
        if name not in self.by_name:
            names = ", ".join(sorted(filter(None, self.by_name))) or "none, for there is one alone"
            raise InputError(f"checkpoint: expected one of {names}; found {name!r}")
        return self.by_name[name]

    def network(self, slot: int) -> int:
        """Return the number of the network that runs a slot's request."""
        return 0 if self.residency is None else int(self.residency.places[slot])

    def is_bound(self, name: str) -> bool:
        """Return whether a step can run requests of a checkpoint that holds a network."""
        if self.residency is None:
            return True
        number = self.residency.place_of[name]
        return number not in self._loads and number not in self.residency.loading

    def start_loads(self) -> None:
        """Start to load the checkpoints that were given a network since the last call, unless it is still loading."""
        assert self.residency is not None  # one checkpoint alone is never loaded again
        for number in self.residency.loading.keys() - self._loads.keys():
            name = self.residency.loading.pop(number)
            checkpoint = self.by_name[name]
            load: Load
            try:
                checkpoint.check_unchanged()
                load = self._executor.load(number, checkpoint.weights_json, self._bind)
            except (LockstepError, OSError) as error:
                load = _FailedLoad(error)
            self._loads[number] = name, load

    def finish_loads(self) -> Iterator[tuple[str, Exception]]:
        """Let steps use the networks whose weights are there; yield the checkpoints whose load failed, and why."""
        for number, (name, load) in [*self._loads.items()]:
            if not load.done():
                continue
            del self._loads[number]
            try:
                load.finish()
            except (LockstepError, OSError) as error:
                # Unless the network was given to another checkpoint meanwhile: then nobody waits for this one.
                if self.residency is not None and self.residency.place_of.get(name) == number:
                    yield name, error

    def update(self, name: str, weights_json: Path, waiting: Callable[[], None]) -> None:
        """Replace the weights of a checkpoint that no request uses; the old ones stay where the new ones fail.

        waiting: called again and again until they are there.
        """
        old = self[name]
        network = 0 if self.residency is None else self.residency.place_of.get(name)
        new = copy.copy(old)  # with its vocabulary, if that was read: the tokenizer stays
        new.weights_json = weights_json
        new.weights_sha256 = content(weights_json)
        # An earlier load into this network must not end after the new one.
        for number, (loading, load) in [*self._loads.items()]:
            if loading == name:
                load.finish()
                del self._loads[number]
        if network is not None:
            load = self.load(network, weights_json)
            try:
                while not load.done():
                    waiting()
                load.finish()
            except BaseException:
                self.load(network, old.weights_json).finish()
                raise
        self.by_name[name] = new

    def preload(self) -> Iterator[None]:
        """Read the weights of all checkpoints into host memory, in parts, those first that are not bound."""
        if self.residency is None:
            return iter(())
        names = sorted(self.by_name, key=self.residency.place_of.__contains__)  # False sorts first
        return self._executor.preload([self.by_name[name].weights_json for name in names])

    def load(self, network: int, weights_json: Path) -> Load:
        """Start to replace the weights of a network: for benchmarks, while no request of it runs."""
        return self._executor.load(network, weights_json, self._bind)

    def wait(self, seconds: float) -> None:
        """Wait so long if a load is not done: there is nothing to compute."""
        if self._loads and not any(load.done() for _, load in self._loads.values()):
            time.sleep(seconds)

    def forget(self, name: str) -> None:
        """Free the network of a checkpoint whose load failed; no request may hold it."""
        assert self.residency is not None
        self.residency.drop(name)


def _state(path: Path) -> tuple[int, int, int]:
    """Return what of a file changes with its contents, for a check without reading it."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def check_shares(first: Path, assembly: Assembly, other: Path) -> Assembly:
    """Return the assembly of a checkpoint that shares the engines of another one.

    Raises InputError, with the first thing that differs, for one of other graphs. Its tokenizer, chat template and end
    ids may be its own.
    """
    other_assembly = Assembly.load(other)
    expected = _graphs_of(assembly)
    actual = _graphs_of(other_assembly)
    for name in Assembly.__dataclass_fields__:
        if getattr(expected, name) != getattr(actual, name):
            raise InputError(
                f"{other}: expected the graphs of {first}, whose engines it is to share, found another {name}; serve "
                "it by another server"
            )
    return other_assembly


def _graphs_of(assembly: Assembly) -> Assembly:
    """Return an assembly without what each checkpoint may have its own of."""
    return replace(assembly, tokenizer=None, chat_template=None, eos_token_ids=())
