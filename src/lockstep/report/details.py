"""The details of a target: its manifests in; the results of its checks, and the content of its page, out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.quantization_error import QuantizationError
from lockstep.artifacts.reports import GoldenReport, SpeedReport
from lockstep.artifacts.summary import Reproduction
from lockstep.artifacts.weights import WeightsManifest
from lockstep.manifests.digest_cache import size_of
from lockstep.manifests.manifest_files import content
from lockstep.report.checks import CHECKS, Checked, loaded
from lockstep.report.verdict import PASS
from lockstep.targets import Results, Target


@dataclass(frozen=True)
class Details:
    """The results of a target.

    checks: {name: result} of those that ran or should have. digest: of the engines that were checked, or else of those
    built. engines, speed, reproduction: None if missing, or of other engines.
    weights_bytes, engine_bytes: of all layers.
    """

    checks: Mapping[str, Checked]
    digest: str | None
    engines: EngineSetManifest | None
    speed: SpeedReport | None
    reproduction: Reproduction | None
    quantization_error: QuantizationError | None
    weights_bytes: int | None
    engine_bytes: int | None


def read_details(
    results: Results, target: Target, cannot_run: str | None = None, content: Callable[[Path], str] = content
) -> Details:
    """Read the results of a target.

    cannot_run: why its engines do not run here, or None. content: `manifest_files.content`, or a cached one, as targets
    share files.
    """
    names = (target.model, target.precision, target.layers, target.backend)
    checks = {}
    for check in CHECKS:
        checked = check.read(results, target, cannot_run, content)
        if checked:
            checks[check.name] = checked
    golden = checks["golden"]
    engines_json = results.engines(target.model, target.precision, target.backend)
    engines = loaded(EngineSetManifest.load, engines_json)
    weights = loaded(WeightsManifest.load, results.weights(target.model, target.precision))
    # Engines may have been built again since the check: figures of a page are of those that were checked.
    digest = getattr(engines, "digest", None)
    if isinstance(golden.report, GoldenReport):
        digest = golden.report.engine_digest
    reproduction = loaded(Reproduction.load, results.reproduction(*names))
    if reproduction and reproduction.engine_digest != digest:
        reproduction = None
    # A failed check leaves the speed file of earlier engines in place.
    speed = None
    if golden.result == PASS:
        speed = loaded(SpeedReport.load, results.speed(*names))
    weights_bytes = None
    if weights:
        weights_bytes = sum(place.length for place in weights.numbered.values())
    return Details(
        checks=checks,
        digest=digest,
        engines=engines,
        speed=speed,
        reproduction=reproduction,
        quantization_error=loaded(QuantizationError.load, results.quantization_error(*names[:3])),
        weights_bytes=weights_bytes,
        engine_bytes=_engine_bytes(engines_json, engines),
    )


def _engine_bytes(engines_json: Path, engines: EngineSetManifest | None) -> int | None:
    if engines is None:
        return None
    sizes = [size_of(engines_json.with_name(engine.file)) for engine in engines.engines.values()]
    return sum(filter(None, sizes))
