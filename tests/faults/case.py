"""One fault in one model and precision: planted, built, sent through the gates, and what users would see of it.

`prepare` and `try_engines` need what engines need, no torch: they run in the Python that the backend runs in. `plant`
needs onnx, `try_graphs` torch.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx

import lockstep
from faults import harm
from faults.edit import Edit
from faults.fault import ASSEMBLY, RUNTIME
from faults.models import MODELS, right
from faults.table import FAULTS
from lockstep import CheckError, InputError, Limits, Model, ModelOptions, Target, Tolerances, build_engines
from lockstep.artifacts import formats
from lockstep.artifacts.files import read_json, sha256_file, write_bytes, write_json
from lockstep.backends.base import get_backend
from lockstep.backends.engine_set import EngineSet

# In the order in which the workflow comes to them; a build may refuse a graph.
GATES = ("build", "validate", "compare", "golden", "adapted")
# Of an engine. More than its sizes take, so that what is caught does not depend on how busy the machine is.
_COMPARE_SECONDS = 600


@dataclass(frozen=True)
class Setting:
    """Settings that all cases of a run share.

    tolerance: of the gates, by precision, as `Tolerances` takes it. judged: the largest difference of a
    logit that is no harm.
    """

    work: str
    backend: str
    options: Mapping[str, Any]
    tolerance: Mapping[str, Mapping[str, Any]]
    judged: Mapping[str, float]


class Case:
    """A fault, or none (""), in a model and a precision, with the places of its files."""

    def __init__(self, setting: Setting, model: str, precision: str, fault: str = ""):
        self.setting = setting
        self.name = model
        self.precision = precision
        self.fault = FAULTS[fault] if fault else None
        self.model = MODELS[model]
        self.results = right(Path(setting.work))
        self.target = Target(model, precision, self.model.layers, setting.backend)
        self.tolerance = setting.tolerance[precision]
        self.judged = setting.judged[precision]
        self.folder = Path(setting.work) / "faulty" / setting.backend / model / precision / (fault or "none")
        self.right_assembly = self.results.assembly(model, precision)
        self.right_engines = self.results.engines(model, precision, setting.backend)
        self.right_logits, self.right_error = (
            self.right_engines.with_name(name) for name in ("logits.npz", "error.json")
        )
        planted = self.fault is not None and self.fault.place != RUNTIME
        self.assembly = self.folder / "graphs" / "assembly.json" if planted else self.right_assembly
        self._weights, self._limits = self.results.weights(model, precision), Limits(**self.model.limits)

    def options(self) -> dict[str, Any]:
        """For the build: backends whose engines are made for sizes get the limits."""
        names = get_backend(self.setting.backend).default_options()
        return {**{name: value for name, value in self.model.limits.items() if name in names}, **self.setting.options}

    def message(self, gate: Callable[[], Any]) -> str | None:
        """Return a gate's error as one line without folders, or None if it passes."""
        try:
            gate()
        except (CheckError, InputError) as error:
            line = " ".join(str(error).split()).partition("; details in ")[0]
            return line.replace(f"{self.folder}/", "").replace(f"{self.setting.work}/", "")
        return None

    def validate(self) -> str | None:
        """Graphs against torch. Needs it."""
        tolerances = Tolerances(self.precision, noise=self.tolerance["noise"])
        return self.message(
            lambda: lockstep.validate_graphs(
                self.assembly, self._weights, self.results.checkpoint(self.name), self.model.layers, tolerances,
                self.model.limits["max_seq_len"], self.folder / "validate.json", self.name,
            )
        )  # fmt: skip

    def compare(self, assembly: Path, engines: Path) -> str | None:
        """Each engine with its graph: of a fault those alone that it changed, for the others passed without it."""
        right = {} if self.fault is None else _digests(self.right_engines)
        names = [name for name, digest in _digests(engines).items() if digest != right.get(name)]
        if not names:
            return None
        out = self.folder / "compare.json"
        with mock.patch.object(EngineSet, "names", lambda _: names):
            return self.message(
                lambda: lockstep.compare_engines(
                    assembly, self._weights, engines, self._tolerances, self._limits, out, seconds=_COMPARE_SECONDS
                )
            )

    def golden(self, assembly: Path, engines: Path) -> str | None:
        """Engines in the runtime against the reference."""
        reference = self.results.reference_of(self.name, self.precision, self.model.layers)
        return self.message(
            lambda: lockstep.check_golden(
                assembly, self._weights, engines, reference, self.target, self._tolerances, self._limits,
                self.folder / "golden.json", self.folder / "golden.speed.json",
            )
        )  # fmt: skip

    def adapted(self, assembly: Path, engines: Path) -> str | None:
        """Engines with adapters against the reference with each; None where the model has none."""
        if not self.model.adapters:
            return None
        from lockstep.verify.golden.adapted import check

        plain = self.results.reference_of(self.name, self.precision, self.model.layers)
        reference = plain.parent.with_name("adapted_reference") / plain.name
        return self.message(
            lambda: check(
                assembly, self._weights, engines, self.results.adapters(self.name), reference, self.target,
                self._tolerances, self._limits, self.folder / "adapted.json",
            )
        )  # fmt: skip

    def messages(self, assembly: Path, engines: Path) -> dict[str, str | None]:
        """Return what the gates of engines say.

        The engine of a faulty graph agrees with it: `compare` is asked where `golden` passes.
        """
        errors = {"golden": self.golden(assembly, engines), "adapted": self.adapted(assembly, engines)}
        return {"compare": None if any(errors.values()) else self.compare(assembly, engines), **errors}

    @property
    def _tolerances(self) -> Tolerances:
        return Tolerances(**self.tolerance)

    def logits(
        self, assembly: Path, engines: Path, scenarios: Mapping[str, harm.Scenario] | None = None
    ) -> dict[str, np.ndarray]:
        sizes = {name: self.model.limits[name] for name in ("max_batch_size", "max_seq_len", "max_num_tokens")}
        if self.model.adapters:
            sizes["adapters_json"] = self.results.adapters(self.name)
            scenarios = harm.ADAPTED if scenarios is None else scenarios
        return harm.run(
            Model.open(engines, assembly, self._weights, self.model.layers, ModelOptions(**sizes)), scenarios
        )

    @contextlib.contextmanager
    def cleared(self) -> Iterator[None]:
        """Keep the folder of the case for as long as it is looked at."""
        try:
            yield
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def plant(case: Case) -> None:
    """Write the faulty graphs and the assembly with their digests right; nothing for a fault of the runtime.

    Raises ValueError for a fault that changes nothing or makes an invalid graph: a mistake in the fault.
    """
    fault = case.fault
    if fault.place == RUNTIME:
        return
    shutil.copytree(case.right_assembly.parent, case.assembly.parent)
    assembly = read_json(case.assembly, formats.ASSEMBLY)
    before = json.dumps(assembly)
    if fault.place == ASSEMBLY:
        fault.change(assembly)
    else:
        for name, entry in _graphs(assembly):
            if any(fnmatchcase(name, pattern) for pattern in fault.where):
                path = case.assembly.parent / entry["graph"]
                edit = Edit(onnx.load(path), assembly["kinds"].get(name.rpartition(".")[0]))
                fault.change(edit)
                write_bytes(path, edit.done())
                entry["sha256"] = sha256_file(path)
    if json.dumps(assembly) == before:
        raise ValueError(f"fault {fault.name}: expected a change in {case.name}, found none in {fault.where}")
    write_json(case.assembly, assembly)


def _graphs(assembly: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, entry) of the graphs of assembly.json, to be changed in place."""
    yield from assembly["classes"].items()
    for name, variant in assembly["kinds"].items():
        yield from ((f"{name}.{phase}", variant[phase]) for phase in ("decode", "prefill"))


def prepare(case: Case) -> None:
    """Make engines without a fault, and their logits.

    Raises CheckError where a gate refuses them: it would refuse every fault.
    """
    build_engines(case.right_assembly, case.setting.backend, case.right_engines, case.options())
    with case.cleared():
        for gate, message in case.messages(case.right_assembly, case.right_engines).items():
            if message is not None:
                raise CheckError(f"{case.target} without a fault: expected {gate} to pass, found: {message}")
        write_json(case.right_error, {"max_logit_error": read_json(case.folder / "golden.json")["max_logit_error"]})
    np.savez(case.right_logits, **case.logits(case.right_assembly, case.right_engines))


def try_engines(case: Case) -> list[dict[str, Any]]:
    """Return a record for each place that the fault was planted in.

    A graph with the engine built from it, and that engine next to the right graph; the assembly; or the runtime. Empty
    where the backend builds no engine from what the fault changes (fused attention has its own).
    """
    fault = case.fault
    if fault.place in (ASSEMBLY, RUNTIME):
        return [_record(case, fault.place, case.assembly, case.right_engines)]
    engines = case.folder / "engines" / "engines.json"
    shutil.copytree(case.right_engines.parent, engines.parent)
    message = case.message(partial(build_engines, case.assembly, case.setting.backend, engines, case.options()))
    if message is not None:
        result = {"largest_logit_difference": None, "scenario": None, "harmful": False}
        return [{"where": "graph", "refused": True, **result, "gates": {"build": message}}]
    built = read_json(engines, formats.ENGINES)
    if _digests(engines) == _digests(case.right_engines):
        return []
    for name, entry in read_json(case.right_engines, formats.ENGINES)["engines"].items():
        built["engines"][name]["graph_sha256"] = entry["graph_sha256"]
    beside = engines.with_name("beside.json")
    write_json(beside, built)
    record = _record(case, "graph", case.assembly, engines)
    # The engines are the same files: what the runtime makes of them, and so golden, is too.
    gates = {**record["gates"], "compare": case.compare(case.right_assembly, beside)}
    return [record, {**record, "where": "engine", "gates": gates}]


def _digests(engines: Path) -> dict[str, str]:
    """Return the digest of each engine of a set."""
    return {name: entry["sha256"] for name, entry in sorted(read_json(engines, formats.ENGINES)["engines"].items())}


def _record(case: Case, where: str, assembly: Path, engines: Path) -> dict[str, Any]:
    if case.fault.shown_by is None:
        scenarios = None
        with np.load(case.right_logits) as saved:
            expected = dict(saved)
    else:
        scenarios = {"its own": case.fault.shown_by}
        expected = case.logits(case.right_assembly, case.right_engines, scenarios)
    with case.fault.change() if where == RUNTIME else contextlib.nullcontext():
        gates = case.messages(assembly, engines)
        largest, scenario = harm.largest_difference(expected, case.logits(assembly, engines, scenarios))
    # The right engines are off the reference themselves: only beyond both are logits certainly out of tolerance.
    bound = case.judged + read_json(case.right_error)["max_logit_error"]
    return {
        "where": where, "refused": False, "largest_logit_difference": largest, "scenario": scenario,
        "harmful": largest is None or largest > bound, "gates": gates,
    }  # fmt: skip


def try_all(
    setting: Mapping[str, Any], models: Sequence[Sequence[str]], cases: Sequence[Sequence[str]], out: str
) -> None:
    """Prepare each of `models` (model, precision), then try the engines of each of `cases`, planted already.

    cases: (fault, precision). Writes a line of JSON to `out` after each: [fault, precision, records].
    """
    shared = Setting(**setting)
    for model, precision in models:
        prepare(Case(shared, model, precision))
    for fault, precision in cases:
        records = try_engines(Case(shared, FAULTS[fault].model, precision, fault))
        with open(out, "a") as file:
            file.write(json.dumps([fault, precision, records]) + "\n")
