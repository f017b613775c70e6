"""Steps of several checkpoints: they take turns, and none waits for ever."""

from __future__ import annotations

from collections import Counter

from lockstep.runtime.scheduler import ADAPTER_WAIT_STEPS, Scheduled, Scheduler, SchedulerOptions
from lockstep.step.pages import PagePool, PageTables
from lockstep.step.residency import Residency


def make(num_networks: int, bound: set[str] | None = None) -> tuple[Scheduler, Residency]:
    networks = Residency(4, num_networks)
    tables = PageTables(PagePool(64, 1), 4)
    is_bound = (lambda name: True) if bound is None else bound.__contains__
    return Scheduler(tables, SchedulerOptions(4, 64, 16), None, networks, is_bound), networks


def step(scheduler: Scheduler, turns: list[str]) -> None:
    """Run a step and end the requests that have all their tokens; it has requests of one checkpoint."""
    output = scheduler.schedule()
    names = {request.checkpoint for request, _ in output.shares}
    assert len(names) <= 1
    turns += names
    scheduler.computed(output)
    for request, _ in output.shares:
        if request.num_computed >= request.max_tokens:
            scheduler.finish(request)
    scheduler.check()


def test_checkpoints_take_turns_however_many_requests_each_has() -> None:
    scheduler, _ = make(2)
    for name in ("a", "a", "a", "b"):
        scheduler.add(Scheduled(4, 40, checkpoint=name))
    turns: list[str] = []
    for _ in range(40):
        step(scheduler, turns)
    assert Counter(turns) == {"a": 20, "b": 20}


def test_a_checkpoint_whose_weights_are_not_there_stops_no_other() -> None:
    bound = {"a"}
    scheduler, _ = make(2, bound)
    scheduler.add(Scheduled(4, 9, checkpoint="b"))
    scheduler.add(Scheduled(4, 9, checkpoint="a"))
    turns: list[str] = []
    for _ in range(4):
        step(scheduler, turns)
    bound.add("b")
    for _ in range(4):
        step(scheduler, turns)
    assert turns[:4] == 4 * ["a"] and turns[4] == "b" and set(turns[4:]) == {"a", "b"}


def test_a_checkpoint_without_a_network_gets_one_however_many_requests_of_another_come() -> None:
    scheduler, networks = make(1)
    turns: list[str] = []
    for number in range(2 * ADAPTER_WAIT_STEPS):
        scheduler.add(Scheduled(2, 5, checkpoint="a"))  # always more of them than there are slots
        if number == 3:
            late = Scheduled(2, 5, checkpoint="b")
            scheduler.add(late)
        step(scheduler, turns)
    assert "b" in turns and networks.loads > 1
    assert turns.index("b") < ADAPTER_WAIT_STEPS + 20
