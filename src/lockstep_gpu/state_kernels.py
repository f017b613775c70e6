"""The kernels of recurrent token mixers: their compile-time sizes, and a NumPy reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from lockstep.artifacts.graph_files import StateMixer
from lockstep.errors import CheckError, InputError
from lockstep.onnx_tools.judge import Bound, measure, peak, wrong
from lockstep.tolerances import STATE_KERNEL
from lockstep_gpu.kernels.library import KINDS

THREADS = 128  # of a block
_INPUTS = ("query", "key", "value", "decay", "beta")  # of a recurrence, in the kernel's order; beta may be absent
_MAX_KEY_DIM = 256  # a thread keeps 32 of them in registers
_STATES = ("past_state", "state_out")
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class StateKernelSpec:
    """What a mixer's kernel is compiled for.

    kernel: its name in state_mixers.cu. inputs: names, in the kernel's order. state: shape of a request's state. sizes:
    values of the macros.
    """

    kernel: str
    inputs: tuple[str, ...]
    state: tuple[int, ...]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, mixer: StateMixer, where: str) -> StateKernelSpec:
        """Return the spec of a mixer. Raises InputError, prefixed with `where`, if it has no kernel."""
        signature = mixer.decode.signature
        dtypes = {io.dtype for io in (*signature.inputs, *signature.outputs) if io.name not in _STATES}
        if len(dtypes) != 1 or not dtypes <= KINDS.keys():
            raise InputError(
                f"{where}: expected inputs and outputs of one type of {', '.join(KINDS)}, found "
                f"{', '.join(sorted(dtypes))}; use the backend onnxruntime"
            )
        (dtype,) = dtypes
        return cls.of_sizes({io.name: io.shape for io in signature.inputs}, where, dtype)

    @classmethod
    def of_sizes(cls, shapes: Mapping[str, Sequence[int | str]], where: str, dtype: str = "float16") -> StateKernelSpec:
        """Return the spec of a mixer by the shapes of its decode graph's inputs; dtype: of all except the state."""
        kind = KINDS[dtype]
        widths = {name: int(shape[-1]) for name, shape in shapes.items()}
        state = tuple(int(size) for size in shapes["past_state"][1:])
        names = shapes.keys() - {"past_state"}
        if names == {"value"} and len(state) == 2:
            return cls("token_window", ("value",), state, {"KIND": kind, "WIDTH": state[0] + 1, "SIZE": state[1]})
        if names | {"beta"} != set(_INPUTS) or len(state) != 3 or state[1] > _MAX_KEY_DIM:
            raise InputError(
                f"{where}: expected a short convolution, or a recurrence whose keys have at most {_MAX_KEY_DIM} "
                f"numbers, found {', '.join(sorted(names))} with a state of {list(state)}; use the backend onnxruntime"
            )
        heads, key_dim, value_dim = state
        inputs = tuple(name for name in _INPUTS if name in names)
        sizes = {
            "KIND": kind,
            "WIDTH": 0,
            "KEY_HEADS": widths["key"] // key_dim,
            "VALUE_HEADS": heads,
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "BETA": int("beta" in inputs),
            "LANES": 4 if key_dim <= 128 else 8,
        }
        return cls("recurrence", inputs, state, sizes)

    @property
    def blocks(self) -> int:
        """Return the number of thread blocks per request."""
        sizes = self.sizes
        if sizes["WIDTH"]:
            return -(-sizes["SIZE"] // THREADS)
        return -(-sizes["VALUE_HEADS"] * sizes["VALUE_DIM"] // (THREADS // sizes["LANES"]))

    def advance(self, inputs: Arrays, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute one token of each request in float32: the reference of the kernels.

        Args:
            inputs: Each [num_requests, size].
            state: [num_requests, *state].

        Returns the outputs [num_requests, size] and the new states.
        """
        values = {name: np.asarray(inputs[name], np.float32) for name in self.inputs}
        if self.sizes["WIDTH"]:
            rows = np.concatenate([state, values["value"][:, None]], axis=1)
            return rows.reshape(len(rows), -1), rows[:, 1:]
        count = len(state)
        key_heads = self.sizes["KEY_HEADS"]
        heads, key_dim, value_dim = self.state
        query = values["query"].reshape(count, key_heads, key_dim).repeat(heads // key_heads, axis=1)
        key = values["key"].reshape(count, key_heads, key_dim).repeat(heads // key_heads, axis=1)
        value = values["value"].reshape(count, -1, value_dim)
        # Decay the state, then add key x value. With beta (the delta rule) the value is its difference from what the
        # state predicts.
        state = state * np.exp(values["decay"])[:, :, None, None]
        if "beta" in values:
            value = (value - np.einsum("rhk,rhkv->rhv", key, state)) * values["beta"][:, :, None]
        state = state + key[..., None] * value[:, :, None]
        return np.einsum("rhk,rhkv->rhv", query, state).reshape(count, -1), state


def check_state_graph(decode: onnx.ModelProto, where: str) -> None:
    """Raise CheckError if a mixer's decode graph computes something else than its kernel."""
    from lockstep.onnx_tools.prepare import random_inputs  # needed only where engines are built
    from lockstep.onnx_tools.sessions import compute
    from lockstep.onnx_tools.widened import widened

    decode = widened(decode)
    feeds = random_inputs(decode)
    # The states of a token window are fp16 values.
    feeds["past_state"] = feeds["past_state"].astype(np.float16).astype(np.float32)
    # Keep the state from growing, and from decaying to nothing.
    if "decay" in feeds:
        feeds["decay"] = -np.abs(feeds["decay"])
    if "key" in feeds:
        feeds["key"] = feeds["key"] / np.float32(8)
    shapes = {name: array.shape for name, array in feeds.items()}
    output, new_state = StateKernelSpec.of_sizes(shapes, where).advance(feeds, feeds["past_state"])
    for name, expected in compute(decode, feeds).items():
        actual = new_state if name == "state_out" else output
        error = measure(expected, actual, Bound(STATE_KERNEL), peak(expected))
        if line := wrong(f"output {name}", error):
            raise CheckError(f"{where}: {line}: the kernel of its kind computes something else; please report it")
