"""A client in its own environment."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

RUNS = 300  # seconds that a run may take on a busy machine; 10 on an idle one
# Nothing listens there. A client that asks more than the server under test fails.
NOWHERE = "http://127.0.0.1:9"


def run_client(
    environment: str, program: str, *arguments: object, work: Path, cwd: Path, seconds: float = RUNS, **variables: str
) -> str:
    """Run a program of an environment in LOCKSTEP_CLIENTS, with no variable of the user and no way to the internet.

    seconds: that it may take. work: the folder of its home and caches. Its temporary folder is another one: the path of
    a Unix socket is short.
    Returns its output. Raises AssertionError with the end of the output if it fails.
    """
    programs = Path(os.environ["LOCKSTEP_CLIENTS"], environment, "bin")
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    with tempfile.TemporaryDirectory() as temporary:
        run = subprocess.run(
            [programs / program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=seconds, cwd=cwd,
            env={
                "PATH": f"{programs}:{os.defpath}", "HOME": str(work), "TMPDIR": temporary, "HF_ENDPOINT": NOWHERE,
                **proxies, "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1", **variables,
            },
        )  # fmt: skip
    output = run.stdout.decode(errors="replace")
    assert run.returncode == 0, output[-6000:]
    return output
