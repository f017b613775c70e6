"""The details of a target: its manifests in; the results of its checks, and what its page shows, out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.artifacts.drift import Drift
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.reports import GoldenReport, SpeedReport
from lockstep.artifacts.summary import Reproduction
from lockstep.manifests.manifest_files import content
from lockstep.report.checks import CHECKS, Checked, loaded
from lockstep.report.verdict import PASS
from lockstep.targets import Results, Target


@dataclass(frozen=True)
class Details:
    """The results of a target.

    checks: those that ran or should have, by name. digest: of the engines that were checked, or else of those built.
    engines, speed, reproduction: None if missing, or of other engines. drift: the quantization error.
    """

    checks: Mapping[str, Checked]
    digest: str | None
    engines: EngineSetManifest | None
    speed: SpeedReport | None
    reproduction: Reproduction | None
    drift: Drift | None


def details(
    results: Results, target: Target, cannot_run: str | None = None, content: Callable[[Path], str] = content
) -> Details:
    """Read the results of a target.

    cannot_run: why its engines do not run here, or None. content: `manifest_files.content`, or a cached one, as targets
    share files.
    """
    names = (target.model, target.precision, target.layers, target.backend)
    model, precision, layers, backend = names
    checks = {}
    for check in CHECKS:
        checked = check.read(results, target, cannot_run, content)
        if checked:
            checks[check.name] = checked
    golden = checks["golden"]
    engines = loaded(EngineSetManifest.load, results.engines(model, precision, backend))
    digest = engines.digest if engines else None
    if isinstance(golden.report, GoldenReport):
        digest = golden.report.engine_digest
    reproduction = loaded(Reproduction.load, results.reproduction(*names))
    if reproduction and reproduction.engine_digest != digest:
        reproduction = None
    return Details(
        checks=checks,
        digest=digest,
        engines=engines,
        speed=loaded(SpeedReport.load, results.speed(*names)) if golden.result == PASS else None,
        reproduction=reproduction,
        drift=loaded(Drift.load, results.drift(model, precision, layers)),
    )
