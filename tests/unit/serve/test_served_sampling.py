"""The part of `served` that sees how tokens are chosen: right servers pass, and each planted mistake is refused.

One server runs. Its engine's process plants what a file names, whenever a request comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sampling_faults
from demo_model import LIMITS, TOLERANCES

import fake_gpu
from fake_gpu import compiled
from lockstep.artifacts.chat_template import ChatTemplate
from lockstep.artifacts.reports import SampledCase
from lockstep.backends.builder import build
from lockstep.runtime.model import Model
from lockstep.runtime.tokenizer import Tokenizer, tokenizer_path
from lockstep.targets import Results
from lockstep.verify.golden.prompts import read_reference
from lockstep.verify.noise import LogitNoise
from lockstep.verify.sampled.forced import History
from lockstep.verify.sampled.texts import Texts
from lockstep.verify.served import sampling as check_sampling
from lockstep.verify.served.cases import Cases
from lockstep.verify.served.check import open_model
from lockstep.verify.served.sampling import SamplingCheck
from lockstep_serve.run import listening
from lockstep_serve.service import Service
from lockstep_serve.settings import EngineOptions, ServedModelOptions, ServiceOptions

pytestmark = pytest.mark.exports
ERROR = 0.02  # of a logit, as of fp16
# Of FACTS: one of the candidates, of their weights, of penalties, of the noise, of numbers and of text is planted in
# every run of the tests; their kin in the long ones.
NAMED = (
    "top-p keeps half the mass", "temperature squared", "repetition penalty squared", "seed ignored",
    "log-probabilities 0.1 off", "pieces in capitals",
)  # fmt: skip


class Served:
    """A server of the demo, and what judges it. planted: the file that names the fault of its engine."""

    def __init__(self, tree: Results, planted: Path, precision: str = "fp32", engines: Path | None = None):
        assembly = tree.assembly("demo-llama", precision)
        weights = tree.weights("demo-llama", precision)
        engines = engines or tree.engines("demo-llama", precision, "onnxruntime")
        self.prompts, _, _ = read_reference(tree.reference("demo-llama", "all"), (), TOLERANCES[precision])
        limits = {**vars(LIMITS), "max_input_len": LIMITS.max_seq_len}
        options = EngineOptions(str(engines), str(assembly), str(weights), "all", limits, 1)
        template = ChatTemplate.open(assembly)
        tokenizer = Tokenizer.open(assembly)
        self.service = Service(ServiceOptions([ServedModelOptions("demo-llama", tokenizer, template)], options))
        self.texts = Texts(tokenizer_path(assembly))
        self.model = open_model(options)
        self.planted = planted
        self.loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory()
        self.socket = Path(self._folder.name, "socket")
        self._listening = listening(self.service, self.socket)
        self.loop.run_until_complete(self._listening.__aenter__())

    def close(self) -> None:
        self.loop.run_until_complete(self._listening.__aexit__(None, None, None))
        self.loop.close()
        self._folder.cleanup()

    def judged(self, streams: Sequence[bool]) -> tuple[Mapping[str, SampledCase], list[str]]:
        """Return the check's answers and its errors."""
        check = SamplingCheck(self.service, self.prompts, [prompt.tokens for prompt in self.prompts], self.texts)
        for stream in streams:
            self.loop.run_until_complete(check.send(self.socket, stream))
        return check.judge(self.model), check.failures


@contextlib.contextmanager
def serving(folder: Path, tree: Results, before: str = "", **options: Any) -> Iterator[Served]:
    """Serve, with a fault as a file says. before: what the engine's process runs first."""
    (folder / "fault").write_text("")
    lines = [*before.splitlines(), "import sampling_faults", "sampling_faults.follow()"]
    condition = "import sys\nif 'lockstep_serve.engine_process' in sys.orig_argv:\n    "
    (folder / "sitecustomize.py").write_text(condition + "\n    ".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setenv(sampling_faults.NAMED, str(folder / "fault"))
        running = Served(tree, folder / "fault", **options)
    yield running
    running.close()


@pytest.fixture(scope="module")
def served(references: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("planted"), references) as running:
        yield running


def test_a_right_server_passes_and_each_parameter_decides_tokens(served: Served) -> None:
    checked, failures = served.judged([False, True])
    assert not failures
    assert set(checked) == {
        "temperature", "top_k", "top_p", "min_p", "top_k and top_p", "min_p and top_p", "repetition_penalty",
        "repetition_penalty of negative logits", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens",
        "end token", "ignore_eos", "stop", "stop, not reached", "bad_words", "structured output", "n", "logprobs",
        "top_logprobs", "echo", "chat",
    }  # fmt: skip
    undecided = {name for name, case in checked.items() if not case.decided}
    assert undecided == {"stop", "stop, not reached", "top_logprobs", "echo"}, "which change no token"
    assert all(case.answers >= 2 and case.tokens and not case.near for case in checked.values())
    # float32 of logits near 20, and sums of 768 terms in float64
    assert 0 < max(case.max_logprob_error or 0.0 for case in checked.values()) < 1e-5


@pytest.mark.parametrize("count", [6, 40])
def test_a_stop_string_begins_where_the_answer_ends(count: int, served: Served) -> None:
    """However long golden's answers are."""
    expected = [(3 * list(prompt.tokens))[:count] for prompt in served.prompts]
    cases = {case.name: case for case in Cases(served.prompts, expected, served.texts, 4, 256, ()).all(False)}
    case = cases["stop, not reached"]
    (tokens,) = (tokens[:16] for prompt, tokens in zip(served.prompts, expected) if prompt is case.prompts[0])
    assert case.body["max_tokens"] == len(tokens)
    assert case.body["stop"][0][0] == served.texts.added(case.prompts[0].prompt_ids, tokens)[-1]


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
    assert failures


@pytest.mark.parametrize("fault", ["", *(pytest.param(name, marks=pytest.mark.long) for name in NAMED)])
def test_where_bits_depend_on_company_errors_of_logits_pass_and_mistakes_do_not(
    served: Served, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge's logits are off by what a bound allows, as those of another run on such a device would be."""
    right = check_sampling.write_logits

    def off(model: Model, histories: Sequence[History], out: Path) -> None:
        right(model, histories, out)
        logits = np.load(out, mmap_mode="r+")
        logits += np.random.default_rng(0).uniform(-ERROR, ERROR, logits.shape).astype(np.float32)

    monkeypatch.setattr(check_sampling, "write_logits", off)
    monkeypatch.setattr(served.service, "first_frame", replace(served.service.ready, batch_invariant=False))
    bounds = served.prompts[0].bounds
    unit = bounds.tolerances.rounding
    bounds = replace(bounds, noise=LogitNoise({0: (ERROR / unit / bounds.tolerances.noise, ERROR / unit)}))
    monkeypatch.setattr(served, "prompts", [replace(prompt, bounds=bounds) for prompt in served.prompts])
    if fault:
        test_a_planted_mistake_is_refused(fault, served)
    else:
        checked, failures = served.judged([False])
        assert not failures and any(case.near for case in checked.values())


@pytest.mark.long
def test_a_device_that_draws_is_held_to_it_too(references: Results, tmp_path: Path) -> None:
    """On the fake GPU: `cuda` draws without the host, and gives it logits where a request needs them."""
    install = "import fake_gpu\nfrom pathlib import Path\nfrom fake_gpu import compiled\nfrom shared import Shared\n"
    install += f"compiled.folders = Shared(Path({str(compiled.folders.root)!r}))\n"  # type: ignore[union-attr]
    install += "gpu = fake_gpu.installed(name='cuda')\ngpu.__enter__()"
    with fake_gpu.installed(name="cuda"):
        options = {name: getattr(LIMITS, name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
        engines = build(references.assembly("demo-llama", "fp16"), "cuda", tmp_path / "engines.json", options)
        with serving(tmp_path, references, install, precision="fp16", engines=engines) as served:
            assert served.service.ready.backend == "cuda"
            checked, failures = served.judged([False, True])
    assert not failures and checked["top_p"].decided and checked["n"].decided
