"""A checkpoint's tensors in one precision: made once (`convert`) and mapped at run time (`Weights`)."""

from lockstep.weights.convert import convert
from lockstep.weights.experts import WeightInputs
from lockstep.weights.reader import Tensors, Weights
from lockstep.weights.slots import check_arrays, check_bound_slots, check_inputs, check_slots, slot_array

__all__ = [
    "Tensors",
    "WeightInputs",
    "Weights",
    "check_arrays",
    "check_bound_slots",
    "check_inputs",
    "check_slots",
    "convert",
    "slot_array",
]
