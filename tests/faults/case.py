"""One fault in one model and precision: planted, built, sent through the gates.

It is seen which gates say what, and what users would see.

`prepare` and `try_engines` need what engines need, no torch: they run in the Python that the backend runs in. `plant`
needs onnx, `try_graphs` torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from faults import gates, harm
from faults.edit import Edit
from faults.fault import Fault
from faults.list import FAULTS
from faults.models import MODELS, FaultModel, right
from lockstep import CheckError, InputError, Model, Results, Target, build_engines
from lockstep.artifacts import formats
from lockstep.artifacts.files import read_json, sha256_file, write_bytes, write_json
from lockstep.backends import get_backend


@dataclass(frozen=True)
class Setting:
    """Settings that all cases of a run share.

    tolerance: what the gates are given, by precision ("noise" and "rounding" as of `Tolerances`, and "compare" for an
    engine beside its graph);
    judged: the largest difference of a logit that is no harm.
    """

    work: str
    backend: str
    options: Mapping[str, Any]
    tolerance: Mapping[str, Mapping[str, float]]
    judged: Mapping[str, float]


class Case:
    """A fault, or none (""), in a model and a precision, with the places of its files."""

    def __init__(self, setting: Setting, model: str, precision: str, fault: str = ""):
        self.setting, self.name, self.precision = setting, model, precision
        self.fault: Fault | None = FAULTS[fault] if fault else None
        self.model: FaultModel = MODELS[model]
        self.results: Results = right(Path(setting.work))
        self.target = Target(model, precision, self.model.layers, setting.backend)
        self.tolerance, self.judged = setting.tolerance[precision], setting.judged[precision]
        self.folder = Path(setting.work) / "faulty" / (fault or f"none-{model}") / precision
        self.right_assembly, self.right_engines = (
            self.results.assembly(model, precision),
            self.results.engines(model, precision, setting.backend),
        )
        planted = self.fault is not None and self.fault.place != "runtime"
        self.assembly = self.folder / "graphs" / "assembly.json" if planted else self.right_assembly
        self.right_logits, self.right_error = (
            self.right_engines.with_name(name) for name in ("logits.npz", "error.json")
        )

    def options(self) -> dict[str, Any]:
        """For the build: backends whose engines are made for sizes get the limits."""
        known = get_backend(self.setting.backend).default_options()
        return {**{name: value for name, value in self.model.limits.items() if name in known}, **self.setting.options}

    def said(self, gate: str, *arguments: Any) -> str | None:
        """Return what compare, golden or adapted says of `arguments`."""
        terms = self.tolerance, self.model.limits, self.folder / f"{gate}.json"
        call = {"compare": gates.compare, "golden": gates.golden, "adapted": gates.adapted}[gate]
        return gates.said(lambda: call(self.results, *arguments, *terms), self.folder, Path(self.setting.work))

    def said_of_adapters(self, assembly: Path, engines: Path) -> str | None:
        """Return what the check of adapters says; None where the model has none."""
        return self.said("adapted", self.target, assembly, engines) if self.model.adapters else None

    def logits(
        self, assembly: Path, engines: Path, scenarios: Mapping[str, harm.Scenario] | None = None
    ) -> dict[str, np.ndarray]:
        sizes = {name: self.model.limits[name] for name in ("max_batch_size", "max_seq_len", "max_num_tokens")}
        if self.model.adapters:
            sizes["adapters_json"] = self.results.adapters(self.name)
            scenarios = harm.ADAPTED if scenarios is None else scenarios
        model = Model.open(
            engines, assembly, self.results.weights(self.name, self.precision), self.model.layers, **sizes
        )
        return harm.run(model, scenarios)

    @contextlib.contextmanager
    def cleared(self) -> Iterator[None]:
        """Give the folder of the case, for as long as it is looked at."""
        try:
            yield
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def plant(case: Case) -> None:
    """Write the faulty graphs and the assembly with their digests right.

    Nothing for a fault of the runtime.

    Raises ValueError for a fault that changes nothing, or makes what is no graph: a mistake in the fault.
    """
    fault = case.fault
    if fault.place == "runtime":
        return
    shutil.copytree(case.right_assembly.parent, case.assembly.parent)
    assembly = read_json(case.assembly, formats.ASSEMBLY)
    if fault.assembly:
        before = json.dumps(assembly)
        fault.assembly(assembly)
        if json.dumps(assembly) == before:
            raise ValueError(f"fault {fault.name}: expected a change of the assembly, found none")
    edited = [
        (name, entry)
        for name, entry in _graphs(assembly)
        if any(fnmatchcase(name, pattern) for pattern in fault.graphs)
    ]
    if fault.edit and not edited:
        raise ValueError(f"fault {fault.name}: expected graphs {fault.graphs} in {case.name}, found none")
    for name, entry in edited:
        path = case.assembly.parent / entry["graph"]
        edit = Edit(onnx.load(path), assembly["kinds"].get(name.rpartition(".")[0]))
        fault.edit(edit)
        write_bytes(path, edit.done())
        entry["sha256"] = sha256_file(path)
    write_json(case.assembly, assembly)


def try_graphs(case: Case) -> str | None:
    """Return what validate says of the case's graphs. Needs torch."""
    terms = case.model.layers, case.assembly, case.tolerance, case.model.limits, case.folder / "validate.json"
    return gates.said(
        lambda: gates.validate(case.results, case.name, case.precision, *terms), case.folder, Path(case.setting.work)
    )


def prepare(case: Case) -> None:
    """Make engines without a fault, and their logits.

    Raises CheckError where a gate refuses them: it would refuse every fault.
    """
    build_engines(case.right_assembly, case.setting.backend, case.right_engines, case.options())
    with case.cleared():
        for gate, message in {
            "compare": case.said("compare", case.name, case.precision, case.right_assembly, case.right_engines),
            "golden": case.said("golden", case.target, case.right_assembly, case.right_engines),
            "adapted": case.said_of_adapters(case.right_assembly, case.right_engines),
        }.items():
            if message is not None:
                raise CheckError(f"{case.target} without a fault: expected {gate} to pass, found: {message}")
        write_json(case.right_error, {"max_logit_error": read_json(case.folder / "golden.json")["max_logit_error"]})
    np.savez(case.right_logits, **case.logits(case.right_assembly, case.right_engines))


def try_engines(case: Case) -> list[dict[str, Any]]:
    """Return a record for each place that the fault was planted in.

    A graph with the engine built from it, and that engine beside the right graph; the assembly; or the runtime. Empty
    where the backend builds no engine from what the fault changes (fused attention has its own).
    """
    fault = case.fault
    if fault.place != "graph":
        with fault.runtime() if fault.runtime else contextlib.nullcontext():
            return [_record(case, fault.place, case.assembly, case.right_engines)]
    engines = case.folder / "engines" / "engines.json"
    shutil.copytree(case.right_engines.parent, engines.parent)
    try:
        build_engines(case.assembly, case.setting.backend, engines, case.options())
    except (CheckError, InputError) as error:
        line = gates.said(functools.partial(_raise, error), case.folder, Path(case.setting.work))
        return [
            {
                "where": "graph",
                "refused": True,
                "largest_logit_difference": None,
                "scenario": None,
                "harmful": False,
                "gates": {"build": line},
            }
        ]
    made, before = read_json(engines, formats.ENGINES), read_json(case.right_engines, formats.ENGINES)
    if all(entry["sha256"] == before["engines"][name]["sha256"] for name, entry in made["engines"].items()):
        return []
    for name, entry in made["engines"].items():
        entry["graph_sha256"] = before["engines"][name]["graph_sha256"]
    beside = engines.with_name("beside.json")
    write_json(beside, made)
    record = _record(case, "graph", case.assembly, engines)
    compared = case.said("compare", case.name, case.precision, case.right_assembly, beside)
    # The engines are the same files: what the runtime makes of them, and so golden, is too.
    return [record, {**record, "where": "engine", "gates": {**record["gates"], "compare": compared}}]


def _raise(error: Exception) -> None:
    raise error


def _graphs(assembly: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, entry) of the graphs of assembly.json, to be changed in place."""
    yield from assembly["classes"].items()
    for name, kind in assembly["kinds"].items():
        yield from ((f"{name}.{phase}", kind[phase]) for phase in ("decode", "prefill"))


def _record(case: Case, where: str, assembly: Path, engines: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"compare": case.said("compare", case.name, case.precision, assembly, engines)}
    found["golden"] = case.said("golden", case.target, assembly, engines)
    found["adapted"] = case.said_of_adapters(assembly, engines)
    if case.fault.shown_by is None:
        with np.load(case.right_logits) as expected:
            largest, scenario = harm.largest_difference(expected, case.logits(assembly, engines))
    else:
        narrow = {"its own": case.fault.shown_by}
        expected = case.logits(case.right_assembly, case.right_engines, narrow)
        largest, scenario = harm.largest_difference(expected, case.logits(assembly, engines, narrow))
    # The right engines are off the reference themselves: only beyond both are logits certainly out of tolerance.
    bound = case.judged + read_json(case.right_error)["max_logit_error"]
    return {
        "where": where, "refused": False, "largest_logit_difference": largest, "scenario": scenario,
        "harmful": largest is None or largest > bound, "gates": found,
    }  # fmt: skip


def in_backends_python(
    setting: Mapping[str, Any], models: Sequence[Sequence[str]], cases: Sequence[Sequence[str]], out: str
) -> None:
    """Prepare each of `models`, then try the engines of each of `cases`.

    models: (model, precision), for `prepare`. cases: (fault, precision), planted already, for `try_engines`.

    Writes a line of JSON to `out` after each case: [fault, precision, records].
    """
    shared = Setting(**setting)
    for model, precision in models:
        prepare(Case(shared, model, precision))
    for fault, precision in cases:
        records = try_engines(Case(shared, FAULTS[fault].model, precision, fault))
        with open(out, "a") as file:
            file.write(json.dumps([fault, precision, records]) + "\n")


def as_json(setting: Setting) -> dict[str, Any]:
    return asdict(replace(setting, options=dict(setting.options)))
