"""The checks: how their results are read, and what the summary and the report show of each.

A check has passed if its report exists with its statement, and the inputs in that are those of now. It has
failed if there is the report of a failure, which the next pass removes. Otherwise it is "not run". A new check needs a
row of `CHECKS`, and nothing else in this package.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

from lockstep.artifacts.adapted import AdaptedReport
from lockstep.artifacts.files import read_json
from lockstep.artifacts.reports import (
    ComparisonReport,
    GoldenReport,
    QualityReport,
    Report,
    ServedReport,
    ValidationReport,
)
from lockstep.artifacts.statement import statement_path
from lockstep.artifacts.summary import SummaryRow
from lockstep.errors import InputError
from lockstep.manifests.manifest_files import failed_path
from lockstep.report.jobs import changed_input
from lockstep.report.verdict import FAIL, NOT_RUN
from lockstep.stages import STAGES, Stage
from lockstep.targets import Results, Target

AnyReport = TypeVar("AnyReport", bound=Report)
AnyDocument = TypeVar("AnyDocument")


@dataclass(frozen=True)
class Column:
    """A column of the summary.

    key: of a row. heading: in tables; "": in the CSV file only. form: of a value, as `format` takes it. rank: the
    table on a terminal has the columns of the lowest ranks that fit; the report has all.
    """

    key: str
    heading: str = ""
    form: str = ""
    rank: int = 0

    @property
    def is_number(self) -> bool:
        return self.form.endswith(("d", "e", "f", "%"))

    @property
    def side(self) -> Literal["left", "right"]:
        return "right" if self.is_number else "left"

    def of(self, row: SummaryRow) -> str:
        return number(getattr(row, self.key), self.form)


def number(value: object, form: str, absent: str = "-") -> str:
    if value is None:
        return absent
    return format(value, form)


@dataclass(frozen=True)
class Checked(Generic[AnyReport]):
    """The result of a check: PASS with its report, FAIL with a reason (and a report, if any), NOT_RUN with a reason."""

    result: str
    reason: str | None = None
    report: AnyReport | None = None


@dataclass(frozen=True)
class Check(Generic[AnyReport]):
    """A check.

    name: of its stage. kind: the class of its report. expected: when a target counts as "not run" because this check
    has not run: always; once it has run, on these files or older ones; or never. compares, title: in words. result: the
    column of its result. figures: other columns of the summary, each with a function that takes it from the report.
    """

    name: str
    kind: type[AnyReport]
    expected: Literal["always", "once run", "never"]
    compares: str
    title: str
    result: Column | None = None
    figures: Mapping[Column, Callable[[AnyReport], object]] = field(default_factory=dict)

    @property
    def stage(self) -> Stage:
        return STAGES[self.name]

    def path(self, results: Results, target: Target) -> Path:
        return results.root / self.stage.output.format(**vars(target))

    def read(
        self, results: Results, target: Target, cannot_run: str | None, content: Callable[[Path], str]
    ) -> Checked[AnyReport] | None:
        """Return the result of the check; None if the target does not need it. The arguments are `read_details`'s."""
        out = self.path(results, target)
        checked = self._checked(results, target, content)
        if checked.result != NOT_RUN:
            return checked
        if self.expected == "always":
            # Checks of graphs run anywhere. A report from another machine may be here: then `checked` has its reason.
            if cannot_run and "backend" in self.stage.wildcards and not out.is_file():
                return Checked(NOT_RUN, cannot_run)
            return checked
        # Some targets only have this check; a report, even an outdated one, shows that this is one of them.
        if self.expected == "once run" and (out.is_file() or failed_path(out).is_file()):
            return checked
        return None

    def _checked(self, results: Results, target: Target, content: Callable[[Path], str]) -> Checked[AnyReport]:
        out = self.path(results, target)
        failed = failed_path(out)
        try:
            if failed.is_file():
                message = read_json(failed).get("failure")
                return Checked(FAIL, str(message or f"see {failed}"), loaded(self.kind.load, failed))
            if not out.is_file():
                # No path in it, so that `verdict.reasons` groups targets by this text.
                return Checked(NOT_RUN, "not made yet")
            if not statement_path(out).is_file():
                return Checked(NOT_RUN, f"no statement says how {out} was made")
            report = self.kind.load(out)
            reads = self.stage.rule.reads(None, vars(target)).items()
            inputs = {name: results.root / pattern.format(**vars(target)) for name, pattern in reads}
            changed = changed_input(out, inputs, content)
            if changed:
                return Checked(NOT_RUN, f"{changed} is another since")
            return Checked(report.result, None, report)
        except InputError as error:
            return Checked(NOT_RUN, " ".join(str(error).split()))
        except FileNotFoundError as error:
            # A job that runs now has removed it and will write it again.
            return Checked(NOT_RUN, f"{error.filename} is not there")
        except (LookupError, TypeError, AttributeError):  # JSON of another shape: `failed` is read without a type
            return Checked(NOT_RUN, f"{out}: expected a report, found other entries")


def loaded(load: Callable[[Path], AnyDocument], path: Path) -> AnyDocument | None:
    """Return a document, or None if it cannot be read, which the checks report."""
    try:
        return load(path)
    except InputError:
        return None


# A row gives the reasons of its checks in this order.
CHECKS: tuple[Check, ...] = (
    Check(
        "validate",
        ValidationReport,
        "always",
        compares="graphs against PyTorch",
        title="validation of the graphs",
        result=Column("validation"),
    ),
    Check(
        "golden",
        GoldenReport,
        "always",
        compares="tokens and logits against transformers",
        title="golden check",
        result=Column("golden"),
        figures={
            Column("max_logit_error", "logit error", ".1e"): lambda report: report.max_logit_error,
            Column("logit_noise", "rounding error", ".1e", rank=2): lambda report: report.logit_noise,
            Column("tokens_differing"): lambda report: sum(len(prompt.differences) for prompt in report.prompts),
        },
    ),
    Check(
        "quality",
        QualityReport,
        "once run",
        compares="the perplexity of quantized weights against the config's bound",
        title="quality check",
        result=Column("quality"),
    ),
    Check(
        "compare",
        ComparisonReport,
        "never",
        compares="engines against ONNX Runtime",
        title="comparison of the engines",
        figures={Column("engine_error"): lambda report: report.relative_error},
    ),
    Check(
        "served",
        ServedReport,
        "once run",
        compares="a server's answers against the golden check and a second sampler",
        title="server check",
        result=Column("served"),
        figures={Column("max_logprob_error"): lambda report: report.max_logprob_error},
    ),
    Check(
        "adapted",
        AdaptedReport,
        "once run",
        compares="several adapters in one batch against transformers with each",
        title="check of the adapters",
        result=Column("adapters"),
    ),
)

RESULTS = tuple(check.result for check in CHECKS if check.result)
FIGURES = tuple(itertools.chain(*(check.figures for check in CHECKS)))
# The columns of tables, on a terminal and in the report.
COLUMNS = (
    Column("target", "target"),
    Column("verdict", "result"),
    *(column for column in FIGURES if column.heading),
    Column("quality_in_words", "quality", rank=1),
    Column("quantization_logit_error", "quantization error", ".1e", rank=4),
    Column("quantization_tokens_differing", "tokens differing", "d", rank=5),
    Column("prefill_tokens_per_s", "prefill tokens/s", ".0f", rank=3),
    Column("decode_tokens_per_s", "decode tokens/s", ".0f"),
)
