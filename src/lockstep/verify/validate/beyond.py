"""Graphs beyond what token sequences reach: adapters in every slot, and hidden states up to the precision's end.

Graphs and the model in torch in; CheckError for the first that differs out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.errors import CheckError
from lockstep.tolerances import GROSS, Tolerances
from lockstep.verify.graphs import Graphs
from lockstep.verify.records import Record
from lockstep.verify.validate.parity import layer_errors, where, wrong_layers
from lockstep.verify.validate.torch_trace import TorchModel
from lockstep.verify.walk import Override

# Parts of the precision's range that hidden states are scaled to: the first that the model itself stays within counts.
_PARTS = (0.9, 2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8)
_LARGEST = 2.0**40  # of float32, in which norms accumulate squares


def check_adapter_slots(
    graphs: Graphs, torch_model: TorchModel, records: Sequence[Record], tolerance: Tolerances
) -> None:
    """Check each layer with an adapter in every slot, and tokens without any. Raises CheckError."""
    adapters = graphs.assembly.adapters
    if adapters is None:
        return
    sequences = [record.token_ids for record in records]
    ends = np.cumsum([len(token_ids) for token_ids in sequences])
    has_adapter = np.arange(ends[-1]) % 3 != 0
    numbers = np.cumsum(has_adapter) - 1  # of tokens with an adapter
    slot_of_column = np.repeat(np.arange(adapters.max_adapters), adapters.max_lora_rank)
    modules = graphs.adapted_modules()
    # As many rounds as it takes until each slot has had a token.
    for first in range(0, adapters.max_adapters, int(numbers[-1]) + 1):
        ids = np.where(has_adapter, (first + numbers) % adapters.max_adapters, -1)
        adapted = []
        for token_ids, end in zip(sequences, ends):
            columns = ids[end - len(token_ids) : end, None] == slot_of_column
            with torch_model.adapted(modules, columns):
                record = torch_model.record(token_ids)
                adapted.append((record, torch_model.noisy(record)))
        errors, _ = layer_errors(graphs, adapted, tolerance, ids)
        for place, line in wrong_layers(errors):
            raise CheckError(
                f"{where(place)}, tokens with adapters in every slot and without: {line}; does a token get another's "
                "adapter?"
            )


def check_magnitudes(graphs: Graphs, torch_model: TorchModel, record: Record, choices: Override | None) -> None:
    """Check what leaves each layer for hidden states that grow to the end of their precision.

    The embedded tokens of `record` are made larger, each more than the one before. Raises CheckError for a layer that
    clips or overflows where the model does not.
    """
    hidden = graphs.classes[graphs.layers[0].block.graph].inputs[0]
    end = min(float(np.finfo(hidden.numpy_dtype).max), _LARGEST)
    peaks = np.abs(record.embedded).max(1, keepdims=True)
    unit = record.embedded / np.where(peaks > 0, peaks, 1)
    overflow = ""
    for part in _PARTS:
        levels = np.geomspace(1, part * end, len(unit), dtype=np.float32)[:, None]
        grown = torch_model.record(record.token_ids, embedded=np.ascontiguousarray(unit * levels))
        if max(float(np.abs(layer.hidden).max()) for layer in grown.layers) > 0.95 * end:
            continue
        errors, _ = layer_errors(graphs, [(grown, grown)], Tolerances("fp16"), choices=choices)  # judged by GROSS
        reach = f"hidden states of up to {part * end:.3g}"
        infinite = [entry for entry in errors if any(error.max_abs_error is None for error in entry.tensors.values())]
        if infinite:  # a branch of a block may leave the range first: the next, smaller part decides
            overflow = f"{where(infinite[0])}, {reach}: expected finite numbers, found NaN or infinity"
            continue
        for entry in errors:
            error = entry.tensors.get("hidden")
            if error is not None and not (error.relative_error or 0.0) <= GROSS:
                raise CheckError(
                    f"{where(entry)}, {reach}: expected an error of at most {GROSS:g} of their size, found "
                    f"{error.relative_error:.3g}; are they clipped?"
                )
        return
    if overflow:
        raise CheckError(overflow)
