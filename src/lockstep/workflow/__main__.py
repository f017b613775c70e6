"""The process that the Snakefile starts: a question as JSON on stdin, an answer as JSON on stdout.

`python -m lockstep.workflow plan` makes the plan; `refresh` and `summarise` write the summary after a run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lockstep.errors import guard

NOT_INSTALLED = 3


def _answer(command: str, question: dict[str, Any]) -> Any:
    if command == "plan":
        from lockstep.workflow.plan import make_plan

        return make_plan(question)
    from lockstep.report.summary import refresh, summarise
    from lockstep.targets import Results, Target

    results = Results(Path(question["results"]))
    if command == "refresh":
        return refresh(results)
    return str(summarise(results, [Target.parse(name) for name in question["names"]], question["not_run"]))


def main() -> None:
    """Answer one question. A user's mistake is one line on stderr and exit code 2."""
    with guard():
        command = sys.argv[1]
        try:
            answer = _answer(command, json.load(sys.stdin))
        # Of a package that is not installed: the Snakefile has the remedy.
        except ModuleNotFoundError as error:
            print(error, file=sys.stderr)
            sys.exit(NOT_INSTALLED)
    json.dump(answer, sys.stdout)


main()
