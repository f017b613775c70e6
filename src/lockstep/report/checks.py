"""The checks: what the summary and the report's pages say of each, and how the results of one are read.

A target's files in; what is known of each check out. A check has passed where its report is there, has its record, and
is of what lies there now; it has failed where the report of a failure is there, which the next pass removes. Else it is
"not run". A row of `CHECKS` is all that the report needs of a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

from lockstep.artifacts import formats
from lockstep.artifacts.adapted import AdaptedReport
from lockstep.artifacts.files import read_json
from lockstep.artifacts.reports import ComparisonReport, GoldenReport, Report, ServedReport, ValidationReport
from lockstep.artifacts.summary import SummaryRow
from lockstep.errors import InputError
from lockstep.manifests.manifest_files import failed_path, record_path
from lockstep.report.verdict import FAIL, NOT_RUN
from lockstep.stages import STAGES, Stage
from lockstep.targets import Results, Target

AnyReport = TypeVar("AnyReport", bound=Report)
AnyDocument = TypeVar("AnyDocument")


@dataclass(frozen=True)
class Column:
    """A column of the summary.

    key: of a row. heading: in tables; "": in none, but in the CSV file. form: of a value, as `format` takes it. rank:
    the terminal's table has the columns of the lowest ranks that fit; the report has all.
    """

    key: str
    heading: str = ""
    form: str = ""
    rank: int = 0

    @property
    def is_number(self) -> bool:
        return self.form.endswith(("d", "e", "f", "%"))

    def of(self, row: SummaryRow) -> str:
        return number(getattr(row, self.key), self.form)


def number(value: object, form: str, absent: str = "-") -> str:
    """Return a value in the form that `format` takes; `absent` for None."""
    return absent if value is None else format(value, form)


@dataclass(frozen=True)
class Checked(Generic[AnyReport]):
    """What is known of a check.

    PASS with its report, FAIL with the reason and its report where it left one, or NOT_RUN with the reason.
    """

    result: str
    reason: str | None = None
    report: AnyReport | None = None


@dataclass(frozen=True)
class Check(Generic[AnyReport]):
    """A check.

    name: of its stage. kind: of its report. expected: where a target whose check has not run is "not run" itself:
    always; where it once ran, on what lies there now or on something older; never: a report of something older is left
    out. compares: what with what, in words. title: of its report, in words. result: the column of its result. figures:
    what else the summary has of its report, by column.
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
        """Return what is known of the check; None where the target does without it.

        cannot_run, content: as of `details.details`.
        """
        out = self.path(results, target)
        checked = self._checked(results, target, content)
        if checked.result != NOT_RUN:
            return checked
        if self.expected == "always":
            runs_here = not cannot_run or "backend" not in self.stage.wildcards or out.is_file()
            return checked if runs_here else Checked(NOT_RUN, cannot_run)
        has_run = out.is_file() or failed_path(out).is_file()
        return checked if has_run and self.expected == "once run" else None

    def _checked(self, results: Results, target: Target, content: Callable[[Path], str]) -> Checked[AnyReport]:
        out = self.path(results, target)
        failed = failed_path(out)
        try:
            if failed.is_file():
                said = read_json(failed).get("failure")
                return Checked(FAIL, str(said or f"see {failed}"), loaded(self.kind.load, failed))
            if not out.is_file():
                return Checked(NOT_RUN, f"{out} is not there")
            if not record_path(out).is_file():
                return Checked(NOT_RUN, f"no record says how {out} was made")
            report = self.kind.load(out)
            of = read_json(record_path(out), formats.BUILD)["inputs"]
            for name, pattern in self.stage.inputs(target.precision).items():
                path = results.root / pattern.format(**vars(target))
                if name in of and (not path.is_file() or content(path) != of[name]):
                    return Checked(NOT_RUN, f"{path} is another since")
            return Checked(report.result, None, report)
        except InputError as error:
            return Checked(NOT_RUN, " ".join(str(error).split()))
        except FileNotFoundError as error:  # a job beside this one is to make it again
            return Checked(NOT_RUN, f"{error.filename} is not there")
        except (LookupError, TypeError, AttributeError):
            return Checked(NOT_RUN, f"{out}: expected a report with its record, found other entries")


def loaded(load: Callable[[Path], AnyDocument], path: Path) -> AnyDocument | None:
    """Return a document; None where there is none that can be read. The checks that read it say so."""
    try:
        return load(path)
    except InputError:
        return None


# In the order in which their reasons stand.
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
            Column("logit_noise", "rounding error", ".1e", rank=1): lambda report: report.logit_noise,
            Column("tokens_differing"): lambda report: sum(len(prompt.differences) for prompt in report.prompts),
        },
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
FIGURES = tuple(column for check in CHECKS for column in check.figures)
# Of tables: in the terminal and in the report.
COLUMNS = (
    Column("target", "target"),
    Column("verdict", "result"),
    *(column for column in FIGURES if column.heading),
    Column("drift_logit_error", "quantization error", ".1e", rank=2),
    Column("drift_tokens_differing", "tokens differing", "d", rank=5),
    Column("drift_perplexity", "perplexity change", "+.1%", rank=4),
    Column("prefill_tokens_per_s", "prefill tokens/s", ".0f", rank=3),
    Column("decode_tokens_per_s", "decode tokens/s", ".0f"),
)
