"""Every bound of an error, once: for a precision, a backend and a comparison.

Each has a comment with the measurement that it comes from, and its date. `onnx_tools.judge` applies them, for
`validate`, `compare`, `golden`, `bisect`, the checks of builders and the benchmarks. The limit of a harmless fault
(`HARMLESS` of tests/faults) is no bound: it is decided by logits alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from lockstep.targets import is_quantized

T = TypeVar("T")

GRAPH = ""  # instead of a backend: the graphs of an assembly, in PyTorch's and ONNX Runtime's kernels
# The noise of a precision, without the rounding of weights, in units of the noise of fp16 on the same weights and
# inputs, which every check measures. {precision: {backend: noise}}; "*" is any other backend.
ROUNDING = {
    # One rounding is 2^13 times finer than fp16's, but a sum of thousands of numbers rounds at each of them, in another
    # order in each library: 2^5 for that.
    "fp32": {"*": 2**-8},
    "fp16": {"*": 1.0},
    # OpenVINO rounds to bf16 toward zero where the last bit is 0, to nearest where it is 1: 1.6 times the rms error
    # (2026.4, an EPYC with avx512_bf16, November 2026). Right engines of Gemma are off by 2.3 times the noise's rms;
    # on a GPU those of Gemma 3 4B's tiny shape by 2.1 times, with `cuda` and with TensorRT, which is a third of what
    # transformers' own bf16 is off by there (H200, November 2026).
    "bf16": {GRAPH: 8.0, "*": 10.0},
    # Graphs compute in float32. Engines cut activations in parts that are finer than 16 bits: on two CPU backends
    # errors are 0.03 of fp16's for the demo, and 0.1 for all layers of SmolLM2, whose groups have outliers (October
    # 2026). `cuda` has float16 activations.
    "w8a16": {GRAPH: 2**-8, "cuda": 1.0, "*": 2**-2},
    "w4a16": {GRAPH: 2**-8, "cuda": 1.0, "*": 2**-2},
    # Where activations are of 8 bits, the noise is measured on a model that rounds them too. A difference of any size
    # makes another number the nearest one somewhere, and layers later nearly as many as fp16's: logits of engines that
    # compute in float32 are off by up to 0.69 of that noise (w8a8, ONNX Runtime, the whole demo, November 2026).
    "w8a8": {GRAPH: 1.0, "cuda": 1.0, "*": 2**-1},
    "w4a8": {GRAPH: 1.0, "cuda": 1.0, "*": 2**-1},
    "w8a8-fp8": {GRAPH: 1.0, "cuda": 1.0, "*": 2**-1},
}
# The allowed error of one number, in units of the precision's noise. An engine rounds elsewhere than the measurement:
# rows of logits are off by up to 1.6 times (fp16) and 4 times (bf16) (October 2026).
NOISE = 6.0
RMS = 1 / 3  # of that: see `onnx_tools.judge`
# Where nothing is rounded but the result, it is still off by half of the last bit of fp16: at most 2^-11 of its size,
# rms a quarter of that.
FLOOR = 2.0**-11
FLOOR_RMS = 2.0**-13
ENOUGH = 8  # rows from which on the rms does not depend on single roundings
# Rows at one size that decide. One of few that is off says little: where activations are of 8 bits, up to 5 % of a
# right engine's rows are (SmolLM2, w4a8, November 2026), by 30 times what their rms may be.
DECISIVE_ROWS = 256
# Times the bound of the rms that fewer rows may have in `validate`: of one decoded token 2.2 times the noise is seen,
# where 2 pass for many (fp16, published families in tiny shapes: OLMo 2 and Command R, November 2026).
FEW_ROWS = 1.5
ROWS_WITHIN_RMS = 0.9  # share of the rows whose rms must pass, where each has its own bound
TAIL = 3  # times the noise of the usual row, that another may have: see `verify.noise.LogitNoise`
THROWN_OFF = 16  # times the rms of the usual row; 2 to 9 times is seen where no token is thrown off
# The allowed error of hidden states up to the end of the precision: one that is clipped, or overflows, is off by its
# own size; rounding errors, judged elsewhere, are far smaller.
GROSS = 0.1
# The allowed error of an engine relative to its graph on the same inputs, in units of fp16's noise there: the largest
# error, and the rms that nine of ten rows do not exceed. {precision: {backend: both}}.
ENGINE = {
    # ONNX Runtime and OpenVINO: no more than 2^-10 (demo, November 2026). With TensorRT keys after a RoPE angle of
    # 250 rad are off by 6e-5 (September 2026), 2^-6 of fp16's noise, and in all rows there.
    "fp32": {"onnxruntime": (2**-8, 2**-8), "openvino": (2**-8, 2**-8), "*": (2**-6, 2**-3)},
    "fp16": {"*": (1.0, 1.0)},
    "bf16": {"openvino": (8.0, 12.0), "*": (8.0, 8.0)},  # see `ROUNDING`: 2.1 times the noise's rms is seen (Gemma)
    "w8a16": {"cuda": (1.0, 1.0), "*": (2**-2, 2**-2)},
    "w4a16": {"cuda": (1.0, 1.0), "*": (2**-2, 2**-2)},
    # Graph and engine round activations alike, and differ as in fp32: 1e-4 of fp16's noise in all but one of 100 rows
    # (one of 20: SmolLM2). There a value is nearest to another number, and the row is off: by up to 1.6 times the noise
    # (w4a8, demo) and 5.2 times (w8a8, SmolLM2, whose groups have outliers: ONNX Runtime, November 2026).
    "w8a8": {"cuda": (1.0, 1.0), "*": (2.0, 2**-8)},
    "w4a8": {"cuda": (1.0, 1.0), "*": (2.0, 2**-8)},
    # `cuda` has float16 activations, so another e4m3 number is sometimes the nearest, 1/16 to 1/8 away: one of a row of
    # 144 moves all outputs of the row, by 45 times the noise, and its rms by 44 (demo on a stand-in for a GPU, November
    # 2026).
    "w8a8-fp8": {"cuda": (16.0, 16.0), "*": (2.0, 2**-8)},
}
# The same of engines of w8a16 and w4a16 with bfloat16 activations, in units of those with float16. Seen are 0.7 of the
# noise in logits, and 1.4 relative to graphs (a random Llama on a stand-in for a GPU, November 2026).
BFLOAT16 = 8.0
# The allowed error of a rewritten graph relative to the original, {dtype: relative to the largest magnitude, or 1}: the
# same products in another order or blocking. fp16 anywhere rounds weights, and the last bits of their fp32 products.
REWRITE = {"float32": 1e-5, "float16": 4e-3}
# The allowed error of the pieces and products of a `cuda` block in float32 relative to its graph, relative to the
# largest magnitude, or 1: the same sums in another order. With e4m3 activations now and then another number is the
# nearest, 1/16 of it away: 3e-2 is seen (October 2026).
KERNELS = {"*": 1e-4, "fp8": 1e-1}
STATE_KERNEL = 1e-5  # of a state's kernel in NumPy relative to its graph, as `KERNELS`: fp32 sums in another order
# The allowed error of a small model's logits in split form, or in its multimodal wrapper, relative to transformers in
# fp32, in units of their standard deviation: 1e-6 to 2e-5 is seen over all families. The faults that the tests plant,
# each as small as a wrong export can be, cause 1e-3 and more (September 2026).
EXPORT = 1e-4
# Times what transformers in fp32 is itself off by, relative to fp64, that a model may be off by: some weights make fp32
# inaccurate. 1.7 times is seen where that is more than `EXPORT` (Gemma 4 in a tiny shape, October 2026).
OWN_ERRORS = 4
# The allowed error of a sampler in float32 relative to one in float64, relative to the largest number of a comparison:
# products, sums and logarithms are off by a few times 6e-8 each. 2e-7 is seen (demo, five precisions, November 2026).
SAMPLER = 2e-6
# The assumed noise in fp16 of a logit without a reference, relative to the largest: for `bisect` with a new prompt,
# where the runtime is compared with the graphs. 1e-3 is seen (demo, November 2026).
LOGITS = 2.0**-8
STEP = 1e-3  # of a quantised weight's step: the float32 rounding error on top of half a step


@dataclass(frozen=True)
class Tolerances:
    """The allowed errors in a precision, of engines of a backend or of graphs (`GRAPH`).

    One number may be off by `noise` times the noise of the precision on this model, which is `rounding` times that of
    fp16 (`verify.noise`), or `engine` times that of fp16 for an engine and its graph. These two default to the tables'
    values, as fields, so that locks have them and show a change.
    """

    precision: str
    backend: str = GRAPH
    noise: float = NOISE
    rounding: float = 0.0
    engine: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        rounding = self.rounding or _by_backend(ROUNDING, self.precision, self.backend)
        object.__setattr__(self, "rounding", rounding)
        engine = self.engine
        if not any(engine):
            engine = _by_backend(ENGINE, self.precision, self.backend)
        object.__setattr__(self, "engine", tuple(engine))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "engine": list(self.engine)}

    @property
    def in_bfloat16(self) -> Tolerances:
        """Return the tolerances of engines of quantised weights whose activations are bfloat16.

        Those of 8 bits round more.
        """
        if self.precision not in ("w8a16", "w4a16"):
            return self
        largest, rms = self.engine
        return replace(self, rounding=BFLOAT16 * self.rounding, engine=(BFLOAT16 * largest, BFLOAT16 * rms))

    @property
    def of_attention(self) -> Tolerances:
        """Return the tolerances of engines without weights, which compute in float32 where weights are integers.

        Not on a backend with 16-bit activations.
        """
        if not is_quantized(self.precision) or self.backend == "cuda":
            return self
        return replace(self, engine=_by_backend(ENGINE, "fp32", self.backend))

    @property
    def of_experts(self) -> Tolerances:
        """Return the tolerances of engines of blocks with experts, whose activations no precision rounds to 8 bits.

        CPUs cut them into two numbers of 8 bits, as in w8a16: all rows are off by 2^-6 of fp16's noise (w4a8, Mixtral's
        and Qwen 3 MoE's tiny shapes on both backends, November 2026).
        """
        if not is_quantized(self.precision):
            return self
        largest, rms = self.engine
        _, rms_of_parts = _by_backend(ENGINE, "w8a16", self.backend)
        return replace(self, engine=(largest, max(rms, rms_of_parts)))


def _by_backend(table: Mapping[str, Mapping[str, T]], precision: str, backend: str) -> T:
    bounds = table[precision]
    return bounds.get(backend, bounds["*"])
