"""The part of `served` that sees how tokens are chosen: right servers pass, and each planted mistake is refused.

One server runs. Its engine's process plants what a file names, whenever a request comes.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import sampling_faults
from demo_model import LIMITS, TOLERANCES

from lockstep.artifacts.chat_template import ChatTemplate
from lockstep.artifacts.reports import SampledCase
from lockstep.runtime.tokenizer import Tokenizer, tokenizer_path
from lockstep.serve.check import open_model
from lockstep.serve.check_sampling import SamplingCheck
from lockstep.serve.run import listening
from lockstep.serve.service import Service
from lockstep.serve.settings import EngineOptions, ServiceLimits
from lockstep.targets import Results
from lockstep.verify.golden.prompts import read_reference
from lockstep.verify.sampled.texts import Texts

pytestmark = pytest.mark.exports
# Of FACTS, each is planted in every run of the tests; its kin in the long ones.
NAMED = (
    "top-p keeps half the mass", "temperature squared", "min-p ignored", "repetition penalty squared",
    "logit_bias of the other sign", "min_tokens ignored", "seed ignored", "log-probabilities 0.1 off",
    "pieces in capitals",
)  # fmt: skip


class Served:
    """A server of the demo, and what judges it. planted: the file that names the fault of its engine."""

    def __init__(self, tree: Results, planted: Path):
        assembly, weights = tree.assembly("demo-llama", "fp32"), tree.weights("demo-llama", "fp32")
        engines = tree.engines("demo-llama", "fp32", "onnxruntime")
        self.prompts, _, _ = read_reference(tree.reference("demo-llama", "all"), (), TOLERANCES["fp32"])
        limits = {**vars(LIMITS), "max_input_len": LIMITS.max_seq_len}
        options = EngineOptions(str(engines), str(assembly), str(weights), "all", limits, 1)
        template = ChatTemplate.open(assembly)
        tokenizer = Tokenizer.open(assembly)
        self.service = Service("demo-llama", tokenizer, options, ServiceLimits(), chat_template=template)
        self.texts = Texts(tokenizer_path(assembly))
        self.model = open_model(options)
        self.planted, self.loop = planted, asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory()
        self.socket = Path(self._folder.name, "socket")
        self._listening = listening(self.service, self.socket)
        self.loop.run_until_complete(self._listening.__aenter__())

    def close(self) -> None:
        self.loop.run_until_complete(self._listening.__aexit__(None, None, None))
        self.loop.close()
        self._folder.cleanup()

    def judged(self, streams: Sequence[bool]) -> tuple[Mapping[str, SampledCase], list[str]]:
        """Return what the check sees, and what it says is wrong."""
        check = SamplingCheck(self.service, self.prompts, [prompt.tokens for prompt in self.prompts], self.texts)
        for stream in streams:
            self.loop.run_until_complete(check.send(self.socket, stream))
        return check.judge(self.model), check.failures


@pytest.fixture(scope="module")
def served(references: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "fault").write_text("")
    (folder / "sitecustomize.py").write_text(
        "import sys\nif 'lockstep.serve.engine_process' in sys.orig_argv:\n"
        "    import sampling_faults\n    sampling_faults.follow()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setenv(sampling_faults.NAMED, str(folder / "fault"))
        running = Served(references, folder / "fault")
    yield running
    running.close()


def test_a_right_server_passes_and_each_parameter_decides_tokens(served: Served) -> None:
    seen, failures = served.judged([False, True])
    assert not failures
    undecided = {name for name, case in seen.items() if not case.decided}
    assert undecided == {"stop", "top_logprobs", "echo"}, "which change no token"
    assert all(case.answers >= 2 and case.tokens and not case.near for case in seen.values())
    # float32 of logits near 20, and sums of 768 terms in float64
    assert 0 < max(case.max_logprob_error or 0.0 for case in seen.values()) < 1e-5


FAULTS = [*sampling_faults.IN_ENGINE, *sampling_faults.in_server()]


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[] if name in NAMED else pytest.mark.long) for name in FAULTS]
)
def test_a_planted_mistake_is_refused(fault: str, served: Served) -> None:
    in_server: dict[str, Any] = sampling_faults.in_server()
    served.planted.write_text(fault if fault in sampling_faults.IN_ENGINE else "")
    try:
        with in_server[fault]() if fault in in_server else functools.partial(open, "/dev/null")():
            _, failures = served.judged([fault == "streamed text loses letters"])
    finally:
        served.planted.write_text("")
    print(fault, failures)
    assert failures
