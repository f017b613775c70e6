"""All that is known of a target.

Its manifests in; the results of its checks, and what the report shows of it, out.

A check has passed where its report is there, has its record, and is of what lies there now; it has failed where the
report of a failure is there, which the next pass removes. Else it is "not run".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from lockstep.artifacts import formats
from lockstep.artifacts.adapted import AdaptedReport
from lockstep.artifacts.drift import Drift
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import read_json
from lockstep.artifacts.reports import (
    ComparisonReport,
    GoldenReport,
    Report,
    ServedReport,
    SpeedReport,
    ValidationReport,
)
from lockstep.artifacts.summary import Reproduction
from lockstep.errors import InputError
from lockstep.manifests.manifest_files import content, failed_path, record_path
from lockstep.report.verdict import FAIL, NOT_RUN, PASS
from lockstep.targets import Results, Target, is_quantized

AnyReport = TypeVar("AnyReport", bound=Report)
AnyDocument = TypeVar("AnyDocument")


@dataclass(frozen=True)
class Checked(Generic[AnyReport]):
    """What is known of a check.

    PASS with its report, FAIL with the reason and its report where it left one, or NOT_RUN with the reason.
    """

    result: str
    reason: str | None = None
    report: AnyReport | None = None


def _checked(
    kind: type[AnyReport], out: Path, inputs: Mapping[str, Path], content: Callable[[Path], str]
) -> Checked[AnyReport]:
    """Return what is known of the check that writes `out`.

    inputs: what the check reads, by the names of its record.
    """
    failed = failed_path(out)
    try:
        if failed.is_file():
            said = read_json(failed).get("failure")
            return Checked(FAIL, str(said or f"see {failed}"), _loaded(kind.load, failed))
        if not out.is_file():
            return Checked(NOT_RUN, f"{out} is not there")
        if not record_path(out).is_file():
            return Checked(NOT_RUN, f"no record says how {out} was made")
        report, of = kind.load(out), read_json(record_path(out), formats.BUILD)["inputs"]
        for name, path in inputs.items():
            if name in of and (not path.is_file() or content(path) != of[name]):
                return Checked(NOT_RUN, f"{path} is another since")
        return Checked(report.result, None, report)
    except (InputError, LookupError, TypeError, AttributeError) as error:
        return Checked(
            NOT_RUN,
            " ".join(str(error).split())
            if isinstance(error, InputError)
            else f"{out}: expected a report with its record, found other entries",
        )


@dataclass(frozen=True)
class Details:
    """All that is known of a target.

    compare: None where it did not run. served, engines, speed, reproduction, adapted: None where they are not there or
    of other engines. drift: of quantised weights.
    """

    validate: Checked[ValidationReport]
    golden: Checked[GoldenReport]
    compare: Checked[ComparisonReport] | None
    engines: EngineSetManifest | None
    speed: SpeedReport | None
    served: Checked[ServedReport] | None
    reproduction: Reproduction | None
    adapted: Checked[AdaptedReport] | None = None
    drift: Drift | None = None

    def checks(self) -> Mapping[str, Checked]:
        """Return the checks by name, those that ran or should have."""
        found: dict[str, Checked | None] = {
            "validate": self.validate,
            "golden": self.golden,
            "compare": self.compare,
            "served": self.served,
            "adapted": self.adapted,
        }
        return {name: check for name, check in found.items() if check is not None}


def details(
    results: Results, target: Target, cannot_run: str | None = None, content: Callable[[Path], str] = content
) -> Details:
    """Return what lies there of a target now.

    cannot_run: why its engines do not run here, where they do not. content: as `manifest_files.content`; one that
    remembers spares many targets what they share.
    """
    names = (target.model, target.precision, target.layers, target.backend)
    model, precision, layers, backend = names
    graphs = {"assembly": results.assembly(model, precision), "weights": results.weights(model, precision)}
    engines = {"engines": results.engines(model, precision, backend)}
    validation = _checked(
        ValidationReport,
        results.validation(model, precision, layers),
        {**graphs, "checkpoint": results.checkpoint(model)},
        content,
    )
    reference = results.reference_of(model, precision, layers)
    golden = _checked(GoldenReport, results.golden(*names), {**graphs, **engines, "reference": reference}, content)
    comparison = _checked(
        ComparisonReport, results.comparison(model, precision, backend), {**graphs, **engines}, content
    )
    served = results.served(*names)
    is_served = served.is_file() or failed_path(served).is_file()
    adapted = results.adapted(*names)
    of_adapters = {
        "adapters": results.adapters(model),
        "adapted_reference": results.adapted_reference_of(model, precision, layers),
    }
    is_adapted = adapted.is_file() or failed_path(adapted).is_file()
    built = _loaded(EngineSetManifest.load, engines["engines"])
    if golden.result == NOT_RUN and cannot_run and not results.golden(*names).is_file():
        golden = Checked(NOT_RUN, cannot_run)
    digest = golden.report.engine_digest if golden.report else built.digest if built else None
    reproduction = _loaded(Reproduction.load, results.reproduction(*names))
    return Details(
        validate=validation,
        golden=golden,
        compare=comparison if comparison.result != NOT_RUN else None,  # only some backends are compared, not always
        engines=built,
        served=_checked(ServedReport, served, {**graphs, **engines, "golden": results.golden(*names)}, content)
        if is_served
        else None,
        speed=_loaded(SpeedReport.load, results.speed(*names)) if golden.result == PASS else None,
        drift=_loaded(Drift.load, results.drift(model, precision, layers)) if is_quantized(precision) else None,
        reproduction=reproduction if reproduction and reproduction.engine_digest == digest else None,
        adapted=_checked(AdaptedReport, adapted, {**graphs, **engines, **of_adapters}, content) if is_adapted else None,
    )


def _loaded(load: Callable[[Path], AnyDocument], path: Path) -> AnyDocument | None:
    """Return a document; None where there is none that can be read.

    The checks that read it say so.
    """
    try:
        return load(path)
    except InputError:
        return None
