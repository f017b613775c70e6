"""All that is known of a target: its manifests in; the results of its checks, and what the report shows of it, out."""

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
    """All that is known of a target.

    checks: those that ran or should have, by name. digest: of the engines that were checked, else of those that are
    there. engines, speed, reproduction: None where they are not there or of other engines. drift: of quantised weights
    and KV caches.
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
    """Return what lies there of a target now.

    cannot_run: why its engines do not run here, where they do not. content: as `manifest_files.content`; one that
    remembers spares many targets what they share.
    """
    names = (target.model, target.precision, target.layers, target.backend)
    model, precision, layers, backend = names
    found = {check.name: check.read(results, target, cannot_run, content) for check in CHECKS}
    checks = {name: checked for name, checked in found.items() if checked}
    golden = checks["golden"]
    built = loaded(EngineSetManifest.load, results.engines(model, precision, backend))
    digest = built.digest if built else None
    if isinstance(golden.report, GoldenReport):
        digest = golden.report.engine_digest
    reproduction = loaded(Reproduction.load, results.reproduction(*names))
    return Details(
        checks=checks,
        digest=digest,
        engines=built,
        speed=loaded(SpeedReport.load, results.speed(*names)) if golden.result == PASS else None,
        reproduction=reproduction if reproduction and reproduction.engine_digest == digest else None,
        drift=loaded(Drift.load, results.drift(model, precision, layers)),
    )
