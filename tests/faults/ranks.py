"""Faults of a model that is split over ranks.

Parts of weights, heads and logits that are another rank's, biases that all add, sums that are left out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from faults.fault import Fault

Assembly = dict[str, Any]


def _exchange(kind: str, name: str, *classes: str) -> Callable[[Assembly], None]:
    """Give each rank the other's part of what is named so.

    kind: "weights" or "values".
    """

    def plant(assembly: Assembly) -> None:
        for each in classes:
            shards = assembly["tensor_parallel"]["classes"][each][kind]
            shards[next(found for found in shards if name in found)]["ranges"].reverse()

    return plant


def _all_add(bias: str) -> Callable[[Assembly], None]:
    """Each rank adds the bias to its partial sum."""

    def plant(assembly: Assembly) -> None:
        for sharded in assembly["tensor_parallel"]["classes"].values():
            sharded["first"] = [slot for slot in sharded["first"] if bias not in slot]

    return plant


@contextlib.contextmanager
def _sums(made: Callable[[np.ndarray, list[np.ndarray]], None]) -> Iterator[None]:
    """Sums over ranks are made by `made(result, parts)`."""
    with mock.patch("lockstep.step.ranks._adding", lambda parts, result: functools.partial(made, result, parts)):
        yield


def _left_out(result: np.ndarray, parts: list[np.ndarray]) -> None:
    np.copyto(result, parts[0])


def _mean(result: np.ndarray, parts: list[np.ndarray]) -> None:
    np.copyto(result, np.mean(parts, axis=0), casting="same_kind")


def _first_twice(result: np.ndarray, parts: list[np.ndarray]) -> None:
    np.copyto(result, parts[0] + parts[0])


def _of_ranks(name: str, about: str, **place: Any) -> Fault:
    return Fault(name, about, model="ranks", backends=("onnxruntime",), precisions=("fp32", "fp16"), **place)


def _weights(name: str, *classes: str) -> Callable[[Assembly], None]:
    return _exchange("weights", name, *classes)


FAULTS = (
    _of_ranks("rank-query", "query heads of the other rank", assembly=_weights("q_proj.weight", "middle")),
    _of_ranks("rank-key", "key heads of the other rank", assembly=_weights("k_proj.weight", "middle")),
    _of_ranks("rank-value-bias", "the value's bias of the other rank", assembly=_weights("v_proj.bias", "middle")),
    _of_ranks("rank-output", "rows of the output projection swapped", assembly=_weights("o_proj.weight", "middle")),
    _of_ranks("rank-gate", "the gate's part of the other rank", assembly=_weights("gate_proj.weight", "middle")),
    _of_ranks("rank-down", "rows of the down projection swapped", assembly=_weights("down_proj.weight", "middle")),
    _of_ranks("rank-down-last", "the same in the exit", assembly=_weights("down_proj.weight", "exit")),
    _of_ranks("rank-vocabulary", "each rank has the other's tokens", assembly=_weights("lm_head.weight", "exit")),
    _of_ranks("rank-logits", "logits put together in reverse", assembly=_exchange("values", "logits", "exit")),
    _of_ranks("rank-heads", "the key is put at the other rank's heads", assembly=_exchange("values", "key", "middle")),
    _of_ranks(
        "rank-attention",
        "attention of the other rank's heads",
        assembly=_exchange("values", "attention", "middle", "exit"),
    ),
    _of_ranks("down-bias-twice", "all ranks add the down projection's bias", assembly=_all_add("down_proj.bias")),
    _of_ranks("output-bias-twice", "all ranks add the output's bias", assembly=_all_add("o_proj.bias")),
    _of_ranks("sum-left-out", "the first rank's partial sums stand for all", runtime=lambda: _sums(_left_out)),
    _of_ranks("sum-mean", "the mean of the partial sums", runtime=lambda: _sums(_mean)),
    _of_ranks("sum-twice", "the first rank's partial sum twice", runtime=lambda: _sums(_first_twice)),
)
