"""The quantization error of a model against the config's bound."""

from __future__ import annotations

from lockstep.artifacts.quantization_error import QuantizationError
from lockstep.artifacts.reports import PASS, QualityReport
from lockstep.stages.stage import Job, Stage
from lockstep.verify.metrics import finish


class Quality(Stage):
    is_check = is_judged = True

    def run(self, job: Job) -> None:
        name = f"{job.names['layers']}.quantization_error.json"
        error = QuantizationError.load(job.inputs["reference"].with_name(name))
        change = error.perplexity_change
        bound = job.options["max_perplexity_change"]
        failure = None
        # "not <=", so that a NaN fails too.
        if not change <= bound:
            failure = (
                f"perplexity: expected at most {bound:+.1%} of the checkpoint's (golden.max_perplexity_change), found "
                f"{change:+.1%} in {job.names['precision']}; take a precision of more bits, or a smaller group_size"
            )
        finish(job.output, QualityReport(result=PASS, perplexity_change=change, max_perplexity_change=bound), failure)
