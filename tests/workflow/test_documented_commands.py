"""The `lockstep` commands in blocks of the pages: each page's in order, by a shell, in a copy of the demo's run.

`curl` lines are those of tests/unit/serve/test_curl.py, load generators those of tests/clients, `make` and
`snakemake` those of other tests here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import REPOSITORY, TIMEOUT, Checkout

import registry

pytestmark = pytest.mark.long
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "examples" / "README.md"]
COMMAND = re.compile(
    r"^(?: {4}|\$ )?(?:\.venv/bin/)?((?:lockstep [a-z]|snakemake -|python examples/|openssl ).*)$", re.MULTILINE
)
# Commands that another machine is for.
ELSEWHERE = {
    "hf:": "the hub: tests/workflow/test_fetched.py asks a local one",
    "SmolLM2": "the hub",
    "smollm2/": "what `make real` makes",
    "base/fp16": "fine-tunes: tests/unit/serve/test_many_models.py",
    "certify ": "an endpoint: tests/unit/certify",
    "certificate.json": "which that makes",
    "config device=": "GPUs: tests/workflow/test_two_devices.py",
    "config/openvino.yaml": "a CPU with bf16 instructions: `make demo` has these targets",
}
MY_MODEL = """\
models:
  my-llama:
    source: models/my-llama
    layers: [2, all]
    precisions: [fp16]
limits: {max_batch_size: 4, max_num_tokens: 512, max_seq_len: 256, max_input_len: 128}
"""
# What a page takes for done.
BEFORE = {"locking.md": ["lockstep run my.yaml"]}
# Where a page's words represent a reader's own.
WORDS = {
    "/models/my-llama": "models/my-llama",
    "/srv/adapters": "resources/demo-adapters",
    "TARGET": "demo-llama/fp16/2",
    "--rounds 3": "--rounds 1",  # of the same
}


def commands(page: Path) -> list[str]:
    """Return the commands of a page that run here, without their comments."""
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    results = [re.sub(r"\s+(#.*|&\s*(#.*)?)$", "", match) for match in COMMAND.findall(text)]
    return list(filter(runs_here, results))


def runs_here(command: str) -> bool:
    return not any(part in command for part in ELSEWHERE)


def has_commands(page: Path) -> bool:
    # Those of the other two need GPUs: tests/workflow/test_two_devices.py, records/gpu/ci.log.
    is_for_gpus = page.name in ("ci.md", "devices.md")
    return not is_for_gpus and any(command.startswith("lockstep") for command in commands(page))


WITH_COMMANDS = list(filter(has_commands, PAGES))


class Reader:
    """Someone in a checkout, who types what a page says."""

    def __init__(self, checkout: Checkout) -> None:
        self.folder = checkout.folder
        self.words = dict(WORDS)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # `lockstep`, of the checkout's package
        self.environment = {**checkout.environment(), "PATH": path, "LOCKSTEP_CACHE": str(self.folder / "cache")}
        self.server: subprocess.Popen[str] | None = None

    def types(self, command: str) -> None:
        for word, options in self.words.items():
            command = command.replace(word, options)
        if command.startswith("lockstep serve"):
            return self.serves(command)
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, text=True, capture_output=True,
            stdin=subprocess.DEVNULL, timeout=TIMEOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    def serves(self, command: str) -> None:
        """Start a server, and leave it until the next."""
        self.leaves()
        words = shlex.split(re.sub(r" --(grpc-)?port \d+", "", command))
        self.server = subprocess.Popen(
            [*words, "--port", "0"], cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.server.stdout is not None
        match = re.match(r"ready: http://127\.0\.0\.1:(\d+) ", self.server.stdout.readline())
        assert match is not None, command
        self.words[":8000"] = f":{match[1]}"

    def leaves(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            assert self.server.wait(60) == 0


def test_most_pages_that_say_how_have_commands() -> None:
    assert len(WITH_COMMANDS) >= 14


@pytest.fixture(scope="module")
def both_precisions(first_run: Checkout, filled_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Return the demo in fp32 and fp16, with its cache: pages speak of both."""
    checkout = first_run.copy(tmp_path_factory.mktemp("both") / "checkout")
    shutil.copytree(filled_cache, checkout.folder / "cache")
    checkout.edit_config(lambda config: config["models"]["demo-llama"].update(precisions=["fp32", "fp16"]))
    checkout.finish("--config", "cache=cache")
    return checkout


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_the_commands_of_a_page_work(page: Path, both_precisions: Checkout, tmp_path: Path) -> None:
    checkout = both_precisions.copy(tmp_path / "checkout")
    for part in ("examples", "locks"):
        shutil.copytree(REPOSITORY / part, checkout.folder / part)
    shutil.copytree(checkout.folder / "resources" / "demo-llama", checkout.folder / "models" / "my-llama")
    (checkout.folder / "my.yaml").write_text(MY_MODEL)
    reader = Reader(checkout)
    with contextlib.ExitStack() as stack:
        if page.name == "publish.md":
            reader.words["registry.example.org"] = stack.enter_context(registry.running(tmp_path)).host
        stack.callback(reader.leaves)
        for command in [*BEFORE.get(page.name, ()), *commands(page)]:
            reader.types(command)
