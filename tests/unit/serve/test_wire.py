"""The wire between API process and engine process, and what a long prompt costs the steps of others."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.errors import InputError
from lockstep.runtime import Engine, Model
from lockstep.runtime.grammar import Grammar
from lockstep.runtime.request import Request
from lockstep.step.sampling import Logprobs, Sampling
from lockstep.targets import Results
from lockstep_serve.engine_process import Connection, EngineLoop
from lockstep_serve.frames import HEADER, LARGEST, Abort, Add, Counters, Failed, Frame, Step, packed, split, unpacked

LONG = np.arange(131072, dtype=np.int32) % 700


def received(frame: Frame) -> Any:
    (data,) = split(bytearray(packed(frame)))
    return unpacked(data)


def test_frames_arrive_as_they_were_sent() -> None:
    sampling = Sampling(0.5, logit_bias={3: -1.0}, bad_words=("a", (1, 2)), seed=(1 << 64) - 1)
    request = Request(
        LONG[:9], 5, stop_ids=frozenset({0, 7}), sampling=sampling, answer_ids=[4], grammar=Grammar("regex", "a*")
    )
    add = received(Add(7, request))
    assert add.request.prompt_ids.dtype == np.int32 and add.request.prompt_ids.tolist() == list(range(9))
    assert replace(add.request, prompt_ids=()) == replace(request, prompt_ids=()) and add.id == 7
    logprobs = Logprobs(-0.5, ((1, -0.5), (2, float("-inf"))))
    for frame in (
        Abort(1, 1 << 40),
        Failed("InputError", "no"),
        Step(Counters(running=1, drafts=[1, 2]), [(1, 0, 5, None, logprobs)], [(1, 0)], [(1, 1, [logprobs])]),
    ):
        assert received(frame) == frame


def test_frames_are_cut_wherever_their_bytes_end() -> None:
    data = packed(Abort(1)) + packed(Add(2, Request(LONG, 1))) + packed(Abort(3))
    buffer = bytearray()
    frames = []
    for start in range(0, len(data), 70_001):
        buffer += data[start : start + 70_001]
        frames += map(unpacked, split(buffer))
    assert [frame.id for frame in frames] == [1, 2, 3] and not buffer
    with pytest.raises(InputError, match=f"at most {LARGEST} bytes"):
        split(bytearray(HEADER.pack(LARGEST + 1)))


def test_a_frame_makes_nothing_but_frames() -> None:
    with pytest.raises(pickle.UnpicklingError, match="found posix.system"):
        unpacked(pickle.dumps(Abort(os.system)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(demo: Results) -> Model:
    names = "demo-llama", "fp32"
    return Model.open(demo.engines(*names, "onnxruntime"), demo.assembly(*names), demo.weights(*names))


def test_ids_are_raw_and_copied_by_nobody(model: Model) -> None:
    """One copy on the wire, and one in the engine: the frame's. No thread but the reader's walks them."""
    assert len(packed(Add(1, Request(LONG, 1)))) < LONG.nbytes + 2000
    engine = Engine(model)
    request = received(Add(1, Request(LONG[:200], 3))).request
    prepared = engine.prepare(request, is_checked=True)
    engine.add(prepared, 1)
    (choice,) = engine.choices.values()
    assert np.shares_memory(choice.prompt, request.prompt_ids)
    assert [token.token for token in engine.run()] == [token.token for token in engine.run([Request(LONG[:200], 3)])]


@pytest.mark.parametrize(("rows", "max_calls"), [(1, 212), (4, 365)])
def test_the_host_loop_makes_no_more_calls_than_it_did(model: Model, rows: int, max_calls: int) -> None:
    """Calls of Python and C functions in a step that decodes, counted: times would depend on the machine."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = Engine(model)
        loop = EngineLoop(Connection(theirs), engine, None)
        for number in range(rows):
            engine.add(Request([5 + number, 6, 7], 60))
        for _ in range(5):
            loop.turn()
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for _ in range(10):
                loop.turn()
        finally:
            sys.setprofile(None)
        engine.close()
    assert calls / 10 <= max_calls


def test_what_is_not_read_is_sent_later() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(theirs)
        connection.start(lambda frame: frame)
        count = 200
        for number in range(count):
            connection.send(Add(number, Request(LONG, 1)))
        ours.sendall(packed(Abort(5)))
        received_frames: list[Any] = []
        while not received_frames:
            received_frames = connection.take(0.1)
        assert received_frames == [Abort(5)]
        buffer = bytearray()
        frames: list[Any] = []
        ours.settimeout(0)
        while len(frames) < count:
            connection.drain(0)
            try:
                buffer += ours.recv(1 << 20)
            except BlockingIOError:
                continue
            frames += map(unpacked, split(buffer))
        assert [frame.id for frame in frames] == list(range(count))
        ours.close()
        with pytest.raises(EOFError):
            connection.take(60.0)
