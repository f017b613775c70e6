"""What the kernels of mixers with a state are compiled for, and what they compute, in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from lockstep.artifacts.graph_files import StateMixer
from lockstep.errors import CheckError, InputError
from lockstep.onnx_tools.judge import Bound, measure, peak, wrong
from lockstep.tolerances import STATE_KERNEL

THREADS = 128  # of a block
_INPUTS = ("query", "key", "value", "decay", "beta")  # of a recurrence, in the kernel's order; the last may be absent
_MOST_KEY_DIM = 256  # of which a thread has 32 numbers in registers
# Of what blocks give and take, as the macro ELEMENT says them.
_ELEMENTS = {"float16": 0, "bfloat16": 1, "float32": 2}
_STATES = ("past_state", "state_out")
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class StateKernelSpec:
    """Sizes of a mixer, by their macros in state_mixers.cu. inputs: what it takes of each token, in order."""

    kernel: str
    inputs: tuple[str, ...]
    state: tuple[int, ...]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, mixer: StateMixer, where: str) -> StateKernelSpec:
        """Return the spec of a mixer. Raises InputError, which begins with `where`, for one that has no kernel."""
        signature = mixer.decode.signature
        dtypes = {io.dtype for io in (*signature.inputs, *signature.outputs) if io.name not in _STATES}
        if len(dtypes) != 1 or not dtypes <= _ELEMENTS.keys():
            raise InputError(
                f"{where}: expected inputs and outputs of one type of {', '.join(_ELEMENTS)}, found "
                f"{', '.join(sorted(dtypes))}; use the backend onnxruntime"
            )
        (dtype,) = dtypes
        return cls.of_sizes({io.name: io.shape for io in signature.inputs}, where, dtype)

    @classmethod
    def of_sizes(cls, shapes: Mapping[str, Sequence[int | str]], where: str, dtype: str = "float16") -> StateKernelSpec:
        """Return the spec of a mixer whose decode graph has inputs of these shapes; dtype: of all but the state."""
        element = _ELEMENTS[dtype]
        widths = {name: int(shape[-1]) for name, shape in shapes.items()}
        state = tuple(int(size) for size in shapes["past_state"][1:])
        taken = shapes.keys() - {"past_state"}
        if taken == {"value"} and len(state) == 2:
            return cls("token_window", ("value",), state, {"ELEMENT": element, "WIDTH": state[0] + 1, "SIZE": state[1]})
        if taken | {"beta"} != set(_INPUTS) or len(state) != 3 or state[1] > _MOST_KEY_DIM:
            raise InputError(
                f"{where}: expected a short convolution, or a recurrence whose keys have at most {_MOST_KEY_DIM} "
                f"numbers, found {', '.join(sorted(taken))} with a state of {list(state)}; use the backend onnxruntime"
            )
        heads, key_dim, value_dim = state
        inputs = tuple(name for name in _INPUTS if name in taken)
        sizes = {
            "ELEMENT": element,
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
        """Return the blocks of a request."""
        sizes = self.sizes
        if sizes["WIDTH"]:
            return -(-sizes["SIZE"] // THREADS)
        return -(-sizes["VALUE_HEADS"] * sizes["VALUE_DIM"] // (THREADS // sizes["LANES"]))

    def advance(self, given: Arrays, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what one token of each request gives, and their new states [num_requests, *state], in float32.

        given: inputs [num_requests, size].
        """
        values = {name: np.asarray(given[name], np.float32) for name in self.inputs}
        if self.sizes["WIDTH"]:
            rows = np.concatenate([state, values["value"][:, None]], axis=1)
            return rows.reshape(len(rows), -1), rows[:, 1:]
        count, heads, (_, key_dim, value_dim) = len(state), self.sizes["KEY_HEADS"], self.state
        query, key = (
            values[name].reshape(count, heads, key_dim).repeat(self.state[0] // heads, axis=1)
            for name in ("query", "key")
        )
        value = values["value"].reshape(count, -1, value_dim)
        state = state * np.exp(values["decay"])[:, :, None, None]
        if "beta" in values:
            value = (value - np.einsum("rhk,rhkv->rhv", key, state)) * values["beta"][:, :, None]
        state = state + key[..., None] * value[:, :, None]
        return np.einsum("rhk,rhkv->rhv", query, state).reshape(count, -1), state


def check_state_graph(decode: onnx.ModelProto, where: str) -> None:
    """Raise CheckError where a mixer's decode graph computes something else than its kernel."""
    from lockstep.onnx_tools.prepare import random_inputs  # needed only where engines are built
    from lockstep.onnx_tools.sessions import compute

    feeds = random_inputs(decode)
    feeds["past_state"] = feeds["past_state"].astype(np.float16).astype(np.float32)  # as a window's tokens are
    for name in ("decay", "key"):  # a state that neither grows nor is forgotten
        if name in feeds:
            feeds[name] = -np.abs(feeds[name]) if name == "decay" else feeds[name] / np.float32(8)
    shapes = {name: array.shape for name, array in feeds.items()}
    found = StateKernelSpec.of_sizes(shapes, where).advance(feeds, feeds["past_state"])
    for name, expected in compute(decode, feeds).items():
        error = measure(expected, found[name == "state_out"], Bound(STATE_KERNEL), peak(expected))
        if line := wrong(f"output {name}", error):
            raise CheckError(f"{where}: {line}: the kernel of its kind computes something else; please report it")
