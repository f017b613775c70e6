"""Call a function in a new process, with nothing loaded and nothing of an earlier call in its memory.

    python -m benchmarks.cold < request.json       {"call": "module:function", "arguments": {...}}

Arguments and answer are JSON. The answer is the last line of stdout, if the function returns one; its own output goes
to the streams of this process.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from lockstep import processes
from lockstep.cli.guarded import guard


def ask(function: str, /, **arguments: Any) -> Any:
    """Call a function, `module:name`, and return its answer. Where it fails, end with its exit code."""
    request = json.dumps({"call": function, "arguments": arguments})
    ended = processes.run(
        [sys.executable, "-m", __name__], request, env=processes.environment(), stdout=subprocess.PIPE
    )
    *lines, answer = ended.stdout.splitlines() or [""]
    for line in lines:
        print(line)
    if ended.returncode:
        raise SystemExit(ended.returncode)
    return json.loads(answer)


def function_named(name: str) -> Callable[..., Any]:
    """Return the function that `module:name` names."""
    module, _, function = name.rpartition(":")
    return getattr(importlib.import_module(module), function)


def main() -> None:
    with guard():
        request = json.load(sys.stdin)
        print(json.dumps(function_named(request["call"])(**request["arguments"])))


if __name__ == "__main__":
    main()
