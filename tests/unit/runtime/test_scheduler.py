"""The page pool and the scheduler: pages return, whatever happens; no request starves; chunks end at fixed places."""

import itertools

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.runtime import scheduler as policy
from lockstep.runtime.scheduler import Scheduled, Scheduler, SchedulerOptions, Status
from lockstep.step.pages import PAGE_SIZE, PagePool, PageTables
from lockstep.step.residency import Residency

CHUNK = 2 * PAGE_SIZE
# It replaces the list of the profile in tests/conftest.py, which has `too_slow` too.
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def make(
    num_slots=3,
    pages=20,
    max_num_tokens=512,
    shares=True,
    admission="guaranteed",
    chunk_size=CHUNK,
    threshold=CHUNK,
    adapter_slots=0,
    prefill=None,
    compacts=False,
):
    tables = PageTables(PagePool(pages, 1), num_slots, shares=shares)
    residency = Residency(num_slots, adapter_slots)
    residency = residency if adapter_slots else None
    options = SchedulerOptions(num_slots, max_num_tokens, chunk_size, admission, threshold, prefill, compacts)
    return Scheduler(tables, options, residency)


def step(scheduler):
    """One step, with what an engine does around it; gives its shares."""
    while (victim := scheduler.victim()) is not None:
        scheduler.swapped_out(victim)
    if scheduler.is_spread:
        assert scheduler.compact() and not scheduler.is_spread
    schedule = scheduler.schedule()
    for _, pages in schedule.admitted:
        if not scheduler.tables.shares:
            scheduler.stored(pages)
    for _, _, pages in scheduler.computed(schedule):
        scheduler.stored(pages)
    for request, _ in schedule.shares:
        if request.siblings and not request.in_prompt:
            for sibling in scheduler.forked(request):
                if sibling.num_computed >= sibling.max_tokens:
                    scheduler.finish(sibling)
    return schedule


def run(scheduler, limit=10_000):
    """Step until all requests have come to their last token; gives the steps' shares."""
    steps = []
    while scheduler.num_running or scheduler.num_waiting:
        assert len(steps) < limit
        shares = step(scheduler).shares
        assert shares, "a step with requests brings something"
        steps.append([(request, request.num_computed - count, count) for request, count in shares])
        for request, _ in shares:
            if request.num_computed >= request.max_tokens:
                scheduler.finish(request)
    return steps


def abort_due(scheduler, aborts):
    """Count a step; end the requests, with their choices, whose number of steps (`aborts`) is over.

    Of an odd number just one of the further choices, if there are any.
    """
    for request in [request for request in aborts if request.status is not Status.FINISHED]:
        aborts[request] -= 1
        if not aborts[request]:
            for sibling in [request, *request.siblings]:
                if sibling.status is not Status.FINISHED:
                    scheduler.finish(sibling)


def keys(*names):
    return [name.encode() for name in names]


def test_pages_that_are_shared_are_free_behind_the_last_of_their_users():
    pool = PagePool(4, 1)
    pages = pool.allocate(3)
    assert pool.num_available == 1
    with pytest.raises(InputError, match="expected 2 free pages of 64 tokens, found 1 of 4; raise kv_bytes"):
        pool.allocate(2)
    assert pool.publish(b"a", pages[:2]) and not pool.publish(b"a", pages[2:])
    assert pool.find(keys("a", "b")) == pages[:2]
    pool.release(pages)
    assert (pool.num_available, pool.num_cached) == (2, 0)
    pool.release(pages[:2])
    assert (pool.num_available, pool.num_cached) == (4, 2)
    assert pool.find(keys("a")) == pages[:2]
    pool.release(pages[:2])
    pool.forget()
    assert pool.find(keys("a")) == [] and pool.num_cached == 0
    pool.check()


def test_prefixes_go_least_recently_used_first_and_leaves_before_roots():
    gone = []
    pool = PagePool(6, 1, gone.extend)
    chain = pool.allocate(4)
    other = pool.allocate(2)
    for number, key in enumerate(keys("root", "middle", "leaf")):
        pool.publish(key, chain[number : number + 1])
    pool.publish(b"other", other[:1])
    pool.release(chain)
    pool.release(other)
    pool.release(pool.find(keys("root")))  # used last
    pool.allocate(4)  # two are free
    assert gone == [chain[2], chain[1]]
    pool.allocate(1)
    assert gone[2:] == other[:1] and pool.holds(b"root")


def test_a_request_that_could_never_fit_is_refused_with_both_numbers():
    scheduler = make(pages=3)
    with pytest.raises(InputError, match=r"at most 192 tokens .* \(3 pages of 64\), found a need for 256: 100 prompt"):
        scheduler.add(Scheduled(100, 193))
    scheduler.add(Scheduled(100, 192))
    assert len(run(scheduler)) == 93
    with pytest.raises(InputError, match=r"n: expected at most 3 choices \(max_batch_size\), found 4"):
        make(pages=99).add(Scheduled(1, 2, siblings=[Scheduled(1, 2) for _ in range(3)]))


def test_a_step_must_have_room_for_a_chunk_beside_all_others():
    with pytest.raises(InputError, match="max_num_tokens: expected at least max_batch_size .3., found 2"):
        make(max_num_tokens=2, chunk_size=1)
    with pytest.raises(InputError, match="chunk_size: expected 1 to 98 .* of 2 other requests.*, found 99"):
        make(max_num_tokens=100, chunk_size=99)


def test_a_request_that_holds_all_that_it_may_brings_nothing_until_its_last_token_is_known():
    """The step after is decided meanwhile: its slot and pages are not free yet."""
    scheduler = make(num_slots=2, pages=99)
    for prompt, max_tokens in ((5, 6), (9, 20), (7, 9)):
        scheduler.add(Scheduled(prompt, max_tokens))
    first, second = (request for request, _ in step(scheduler).shares)
    assert [request for request, _ in step(scheduler).shares] == [first, second]
    assert (first.decodes, first.in_prompt) == (False, False)
    assert [request for request, _ in step(scheduler).shares] == [second]
    assert scheduler.num_waiting == 1
    scheduler.finish(first)
    assert [count for _, count in step(scheduler).shares] == [1, 7]


def test_a_threshold_below_one_is_refused():
    with pytest.raises(InputError, match="long_prefill_token_threshold: expected at least 1, found 0; leave it out"):
        make(threshold=0)


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (None, [[3 * CHUNK + 9, CHUNK, 2], [4 * CHUNK]]),
        (2 * CHUNK + 40, [[2 * CHUNK, 2 * CHUNK, 2], [CHUNK + 9, 2 * CHUNK], [CHUNK]]),
        (1, [[CHUNK, CHUNK, 2], [CHUNK, CHUNK], [CHUNK, CHUNK], [9, CHUNK], [CHUNK]]),  # never less than a chunk
    ],
)
def test_beside_those_that_decode_a_prompt_brings_what_the_threshold_lets_it(threshold, expected):
    scheduler = make(num_slots=4, pages=99, max_num_tokens=4 * CHUNK + 20, threshold=threshold)
    scheduler.add(Scheduled(4, 30))
    step(scheduler)
    for prompt in (3 * CHUNK + 9, 5 * CHUNK, 2):
        scheduler.add(Scheduled(prompt, prompt + 9))
    actual = []
    for shares in run(scheduler):
        assert shares[0][2] == 1, "the first decodes in each step"
        actual.append(prompt_shares(shares))
    assert [counts for counts in actual if counts] == expected


def prompt_shares(shares):
    """The tokens that requests in their prompts bring to a step."""
    return [count for request, start, count in shares if start < request.num_prompt_tokens]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([2 * CHUNK, 2 * CHUNK], [[2 * CHUNK], [2 * CHUNK]]),  # two that came together follow each other
        ([CHUNK + 9, CHUNK], [[CHUNK + 9], [CHUNK]]),  # whole chunks only
        ([CHUNK, CHUNK, 9], [[CHUNK, CHUNK], [9]]),
        ([5 * CHUNK, CHUNK], [[2 * CHUNK], [2 * CHUNK], [CHUNK, CHUNK]]),  # 6: just as many as are no pile
        ([7 * CHUNK, 2], [[7 * CHUNK, 2]]),
        ([3 * CHUNK, 3 * CHUNK, CHUNK], [[3 * CHUNK, 3 * CHUNK, CHUNK]]),
    ],
)
def test_beside_those_that_decode_prompts_bring_so_much_together_unless_they_pile_up(lengths, expected):
    scheduler = make(num_slots=4, pages=99, max_num_tokens=9 * CHUNK, threshold=None, prefill=2 * CHUNK + 8)
    scheduler.add(Scheduled(4, 30))
    step(scheduler)
    for prompt in lengths:
        scheduler.add(Scheduled(prompt, prompt + 9))
    actual = [prompt_shares(shares) for shares in run(scheduler)]
    assert [counts for counts in actual if counts] == expected


def test_beside_those_that_decode_prompts_fill_the_step_while_others_wait_and_where_nobody_decodes():
    scheduler = make(num_slots=3, pages=99, max_num_tokens=9 * CHUNK, threshold=None, prefill=CHUNK)
    for prompt in (2 * CHUNK, 2 * CHUNK):
        scheduler.add(Scheduled(prompt, prompt + 9))
    assert [count for _, count in step(scheduler).shares] == [2 * CHUNK, 2 * CHUNK]
    for _ in range(2):
        scheduler.add(Scheduled(2 * CHUNK, 2 * CHUNK + 9))
    assert [count for _, count in step(scheduler).shares] == [1, 1, 2 * CHUNK], "one waits for a slot"


@pytest.mark.parametrize("shares", [True, False])
def test_chunks_that_come_together_are_published_each_with_its_pages(shares):
    scheduler = make(pages=40, max_num_tokens=2048, shares=shares, threshold=None)
    scheduler.add(Scheduled(4, 30))
    step(scheduler)
    prefix = keys("a", "b", "c")
    pool = scheduler.tables.pool
    scheduler.add(first := Scheduled(3 * CHUNK + 5, 3 * CHUNK + 20, prefix=prefix))
    schedule = scheduler.schedule()
    assert schedule.shares[1:] == [(first, 3 * CHUNK + 5)]
    copies = scheduler.computed(schedule)
    assert [start for _, start, _ in copies] == ([] if shares else [0, CHUNK, 2 * CHUNK])
    actual = pool.find(prefix)
    copied = list(itertools.chain.from_iterable(pages for _, _, pages in copies))
    assert actual == (scheduler.tables[first.slot][:6] if shares else copied)
    assert len(set(actual)) == 6
    pool.release(actual)
    for _, _, pages in copies:
        scheduler.stored(pages)
    scheduler.add(Scheduled(2 * CHUNK + 9, 2 * CHUNK + 12, prefix=[*prefix[:2]]))  # begins inside the larger piece
    assert step(scheduler).shares[-1][1] == 9
    run(scheduler)
    scheduler.check()


def test_prompts_come_in_order_beside_those_that_decode_one_chunk_each():
    scheduler = make(num_slots=4, pages=99, max_num_tokens=CHUNK + 3)
    for prompt in (5, 3 * CHUNK, 300, 4):
        scheduler.add(Scheduled(prompt, prompt + 20))
    first, second, third, fourth, fifth, *_ = run(scheduler)

    def count(shares):
        return [(request.num_prompt_tokens, count) for request, _, count in shares]

    assert count(first) == [(5, 5), (4, 4)]  # a chunk of the long one has no room left: the head's came first
    assert count(second) == [(5, 1), (4, 1), (3 * CHUNK, CHUNK)]
    assert count(third) == [(5, 1), (4, 1), (3 * CHUNK, CHUNK)]
    assert count(fourth)[2:] == [(3 * CHUNK, CHUNK)] and count(fifth)[3:] == [(300, CHUNK)]


def test_a_prompt_alone_takes_as_many_chunks_as_a_step_has_room_for():
    scheduler = make(pages=99, max_num_tokens=2 * CHUNK + 40)
    scheduler.add(Scheduled(5 * CHUNK + 1, 6 * CHUNK))
    counts = [shares[0][2] for shares in run(scheduler)]
    assert counts[:4] == [2 * CHUNK, 2 * CHUNK, CHUNK, 1]  # one token decodes: it never comes with a chunk


def test_lower_priorities_go_first_but_none_waits_for_ever():
    scheduler = make(num_slots=1, pages=99)
    late = Scheduled(4, 5, priority=1)
    soon = Scheduled(4, 5, priority=0)
    scheduler.add(Scheduled(4, 5))
    scheduler.add(late)
    scheduler.add(soon)
    order = [request for request, start, _ in itertools.chain.from_iterable(run(scheduler)) if start == 0]
    assert order[1:] == [soon, late]
    scheduler.add(late := Scheduled(4, 5, priority=1))
    number = 0
    while number < 600:
        number += 1
        scheduler.add(Scheduled(4, 5))
        scheduler.finish(next(request for request, _ in step(scheduler).shares))
        if late.status is Status.FINISHED:
            break
    assert 100 < number < 500  # it went before those that came 256 steps after it


@pytest.mark.parametrize("shares", [True, False])
def test_a_prefix_is_reused_in_whole_chunks(shares):
    scheduler = make(pages=40, shares=shares)
    prefix = keys("a", "b")
    scheduler.add(Scheduled(300, 310, prefix=prefix))
    run(scheduler)
    scheduler.add(Scheduled(290, 300, prefix=[*prefix, b"c"]))
    schedule = step(scheduler)
    ((request, pages),) = schedule.admitted
    assert len(pages) == 4 and schedule.shares == [(request, 34)]
    run(scheduler)
    scheduler.check()
    assert scheduler.tables.pool.num_available == 40


def test_a_prefix_that_stands_in_the_way_of_its_own_request_goes():
    scheduler = make(num_slots=1, pages=6, shares=False)  # copies: the pages of the prefix are further ones
    for _ in range(2):
        scheduler.add(Scheduled(130, 6 * PAGE_SIZE, prefix=keys("a")))
        scheduler.add(Scheduled(130, 2 * PAGE_SIZE + 3, prefix=keys("a")))
    run(scheduler)
    scheduler.check()


def test_choices_share_their_prompt():
    scheduler = make(num_slots=4, pages=9)
    siblings = [Scheduled(4 * PAGE_SIZE + 5, 5 * PAGE_SIZE) for _ in range(3)]
    scheduler.add(Scheduled(4 * PAGE_SIZE + 5, 5 * PAGE_SIZE, siblings=siblings))  # 4 + 4 * 1 pages
    step(scheduler)
    step(scheduler)
    step(scheduler)
    assert {sibling.status for sibling in siblings} == {Status.RUNNING} and scheduler.num_running == 4
    assert scheduler.tables.pool.num_available == 1
    run(scheduler)
    scheduler.check()


requests = st.lists(
    st.tuples(
        st.integers(1, 700),  # prompt
        st.integers(1, 120),  # new
        st.integers(0, 2),  # priority
        st.integers(0, 3),  # which prefix
        st.integers(0, 2),  # further choices
        st.integers(0, 30),  # steps until it is aborted; 0: never
    ),
    max_size=12,
)


@pytest.fixture
def lookahead_stays(monkeypatch):
    monkeypatch.setattr(policy, "LOOKAHEAD", policy.LOOKAHEAD)
    monkeypatch.setattr(policy, "ADAPTER_WAIT_STEPS", policy.ADAPTER_WAIT_STEPS)


@pytest.mark.usefixtures("lookahead_stays")
@settings(suppress_health_check=CHECKS)
@given(
    requests, st.integers(1, 4), st.integers(6, 40), st.sampled_from([CHUNK + 3, 512, 2048]), st.booleans(),
    st.sampled_from(["guaranteed", "optimistic"]), st.integers(0, 3), st.sampled_from([16, 64, 256]),
    st.sampled_from([None, 1, CHUNK, 3 * CHUNK - 1]), st.sampled_from([None, 1, 2 * CHUNK + 9]),
)  # fmt: skip
def test_any_traffic_ends_with_the_pool_whole_and_every_prompt_cut_alike(
    given_requests, num_slots, pages, max_num_tokens, shares, admission, every, lookahead, threshold, prefill
):
    policy.LOOKAHEAD = lookahead
    scheduler = make(num_slots, pages, max_num_tokens, shares, admission, threshold=threshold, prefill=prefill)
    waiting = list(given_requests)
    aborts = {}
    cuts = {}
    count = 0
    while waiting or scheduler.num_running or scheduler.num_waiting:
        count += 1
        assert count < 8000
        if waiting and (count % (every + 1) == 0 or not (scheduler.num_running or scheduler.num_waiting)):
            prompt, new, priority, which, choices, abort = waiting.pop()
            siblings = [Scheduled(prompt, prompt + new - 1, priority) for _ in range(choices)]
            prefix = [bytes([which, i]) for i in range((prompt - 1) // CHUNK)]
            request = Scheduled(prompt, prompt + new - 1, priority, prefix, siblings)
            try:
                scheduler.add(request)
            except InputError:
                assert choices >= num_slots or (choices + 1) * (prompt + new) > (pages - choices - 1) * PAGE_SIZE
                continue
            if abort:
                aborts[request] = abort
        schedule = step(scheduler)
        assert schedule.shares or not (scheduler.num_running or scheduler.num_waiting), "everybody waits"
        assert sum(share for _, share in schedule.shares) <= max_num_tokens
        assert len({request.slot for request, _ in schedule.shares}) == len(schedule.shares)
        decoding = sum(request.num_computed > request.num_prompt_tokens for request, _ in schedule.shares)
        if decoding and threshold is not None:
            assert all(share <= max(threshold, CHUNK) for _, share in schedule.shares)
        prompts = [share for share in schedule.shares if share[0].num_computed <= share[0].num_prompt_tokens]
        if prompts and threshold is prefill is None:  # the rest of the budget is less than the first could have used
            head, share = prompts[0]
            remaining = head.num_prompt_tokens - head.num_computed
            room = max_num_tokens - decoding
            assert remaining <= 1 or share > room - CHUNK or share == 1
        for request, share in schedule.shares:
            end = request.num_computed
            assert end <= max(request.max_tokens, request.num_prompt_tokens)
            assert scheduler.tables.pages_for(end) <= len(scheduler.tables[request.slot])
            if end - share < request.num_prompt_tokens:
                cuts.setdefault(request, []).append((end - share, end))
            if end >= request.max_tokens:
                scheduler.finish(request)
        abort_due(scheduler, aborts)
        scheduler.check()
    for request, cut_points in cuts.items():
        assert all(start % CHUNK == 0 for start, _ in cut_points)
        assert all(end % CHUNK == 0 or end == request.num_prompt_tokens for _, end in cut_points)
        # one token of a prompt comes alone exactly where its last chunk has no more
        assert all((end - start == 1) == (end % CHUNK == 1 and start == end - 1) for start, end in cut_points)
    assert scheduler.tables.pool.num_available == pages


@pytest.mark.parametrize("shares", [True, False])
def test_what_is_swapped_out_does_not_take_the_pages_back_that_others_were_short_of(shares, monkeypatch):
    monkeypatch.setattr(policy, "LOOKAHEAD", 16)
    scheduler = make(num_slots=4, pages=7, shares=shares, admission="optimistic")
    requests = [Scheduled(60, 160) for _ in range(4)]
    for request in requests:
        scheduler.add(request)
    ends = {}
    for number, shares_of_step in enumerate(run(scheduler)):
        ends.update({request: number for request, _, _ in shares_of_step})
    assert scheduler.num_swaps >= 1
    assert sorted(ends, key=ends.get) == requests  # the youngest is swapped out
    scheduler.check()


@pytest.mark.parametrize("shares", [True, False])
def test_a_prompt_that_is_swapped_out_half_way_comes_back_when_there_is_room_for_all_of_it(shares, monkeypatch):
    monkeypatch.setattr(policy, "LOOKAHEAD", 16)
    scheduler = make(5, 38, 200, shares, "optimistic", PAGE_SIZE, PAGE_SIZE)
    for request in (requests := [*(Scheduled(48, 400) for _ in range(4)), Scheduled(2000, 2100)]):
        scheduler.add(request)
    swapped = 0
    while scheduler.num_running or scheduler.num_waiting:
        for request, _ in step(scheduler).shares:
            assert scheduler.tables.pages_for(request.num_computed) <= len(scheduler.tables[request.slot])
            if request.num_computed >= request.max_tokens:
                scheduler.finish(request)
        swapped += requests[-1].status is Status.SWAPPED and requests[-1].in_prompt
    assert swapped
    scheduler.check()


def test_a_choice_that_ends_before_its_prompt_is_begun_is_not_begun():
    scheduler = make(num_slots=4)
    first = Scheduled(9, 20)
    second = Scheduled(9, 20)
    request = Scheduled(9, 20, siblings=[first, second])
    scheduler.add(Scheduled(9, 12, siblings=[Scheduled(9, 12) for _ in range(3)]))
    scheduler.add(request)
    step(scheduler)
    scheduler.finish(first)
    assert scheduler.num_waiting == 1
    run(scheduler)
    assert first.status is Status.FINISHED and not first.num_computed and second.num_computed == 20
    scheduler.check()


def test_of_prefixes_that_are_copied_leaves_go_before_roots_and_do_not_push_them_out():
    scheduler = make(num_slots=1, pages=10, shares=False)
    names = keys("a", "b", "c")
    pool = scheduler.tables.pool
    scheduler.add(Scheduled(3 * CHUNK + 1, 3 * CHUNK + 1, prefix=names))  # 7 pages, which leave room for one copy
    run(scheduler)
    assert [pool.holds(name) for name in names] == [True, False, False]
    scheduler = make(num_slots=1, pages=12, shares=False, chunk_size=PAGE_SIZE, threshold=PAGE_SIZE)
    pool = scheduler.tables.pool
    scheduler.add(Scheduled(3 * PAGE_SIZE + 1, 3 * PAGE_SIZE + 1, prefix=names))
    run(scheduler)
    assert pool.num_cached == 3
    for num_left in (2, 1, 0):
        pool.release(pool.allocate(pool.num_available - num_left))
        assert [pool.holds(name) for name in names] == [number < num_left for number in range(3)]
    scheduler.check()


def test_a_request_whose_adapter_has_no_slot_lets_those_behind_it_pass():
    scheduler = make(num_slots=4, pages=99, adapter_slots=1)
    names = ["a", "b", "b", None, "a", "c"]
    requests = [Scheduled(4, 30 + number, adapter=name) for number, name in enumerate(names)]
    for request in requests:
        scheduler.add(request)

    def running():
        return {requests.index(request) for request, _ in step(scheduler).shares}

    assert running() == {0, 3, 4}
    scheduler.finish(requests[0])
    assert running() == {3, 4}, "the other one holds the place"
    scheduler.finish(requests[4])
    assert running() == {1, 2, 3}, "in their order"
    scheduler.finish(requests[1])
    scheduler.finish(requests[2])
    assert running() == {3, 5}
    run(scheduler)
    scheduler.check()


@pytest.mark.parametrize("admission", ["guaranteed", "optimistic"])
def test_a_place_that_others_pass_on_among_them_becomes_free(admission):
    """Without an end come requests of the adapter that is there; and of none, which go on."""
    scheduler = make(num_slots=4, pages=99, adapter_slots=1, admission=admission)

    def add(adapter):
        request = Scheduled(4, 8, adapter=adapter)
        scheduler.add(request)
        return request

    running = [add("a"), add("a")]
    number = 0
    late = add("b")
    while late.status is Status.WAITING:
        number += 1
        assert number < 2 * policy.ADAPTER_WAIT_STEPS
        schedule = step(scheduler)
        for request, _ in schedule.shares:
            if request.num_computed >= request.max_tokens:
                scheduler.finish(request)
                running.append(add(request.adapter))
        if number % 8 == 4:
            running.append(add("a"))
        if number == 20:
            running.append(add(None))
    assert number > policy.ADAPTER_WAIT_STEPS, "others passed it before"
    assert running[0].status is Status.FINISHED
    scheduler.check()


@pytest.mark.usefixtures("lookahead_stays")
@settings(suppress_health_check=CHECKS)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 200),  # prompt
            st.integers(1, 60),  # new
            st.sampled_from([None, "a", "b", "c"]),
            st.sampled_from([0, 0, 0, 1, 2]),  # further choices
            st.sampled_from([0, 0, 1, 9, 25]),  # steps until it is aborted; 0: never
        ),
        min_size=4,
        max_size=14,
    ),
    st.integers(2, 5),
    st.integers(1, 3),
    st.integers(12, 30),
    st.booleans(),
    st.sampled_from(["guaranteed", "optimistic"]),
    st.integers(0, 3),
    st.sampled_from([0, 3, 256]),
    st.booleans(),
)
def test_any_traffic_of_adapters_ends_and_nobody_waits_where_there_is_room(
    given_requests, num_slots, adapter_slots, pages, shares, admission, every, patience, forks
):
    policy.LOOKAHEAD = 16
    policy.ADAPTER_WAIT_STEPS = patience
    scheduler = make(num_slots, pages, 512, shares, admission, adapter_slots=adapter_slots, compacts=shares)
    residency = scheduler.residency
    waiting = list(given_requests)
    aborts = {}
    added = []
    count = 0
    passed = 0
    while waiting or scheduler.num_running or scheduler.num_waiting:
        count += 1
        assert count < 4000
        if waiting and (count % (every + 1) == 0 or not (scheduler.num_running or scheduler.num_waiting)):
            prompt, new, adapter, choices, abort = waiting.pop()
            siblings = [Scheduled(prompt, prompt + new - 1, adapter=adapter) for _ in range(choices * forks)]
            request = Scheduled(prompt, prompt + new - 1, siblings=siblings, adapter=adapter)
            try:
                scheduler.add(request)
            except InputError:
                continue
            added.append(request)
            if abort:
                aborts[request] = abort
        schedule = step(scheduler)
        residency.loading.clear()
        assert schedule.shares or not (scheduler.num_running or scheduler.num_waiting), "everybody waits"
        resident = {request.adapter for request, _ in schedule.shares} - {None}
        assert len(resident) <= adapter_slots
        for request, _ in schedule.shares:
            slot_of_adapter = residency.place_of.get(request.adapter, -1)
            assert residency.places[request.slot] == slot_of_adapter and (slot_of_adapter >= 0) == (
                request.adapter is not None
            )
        queued = [item for item in added if item.status is Status.WAITING]
        swapped = [item for item in added if item.status is Status.SWAPPED]
        slot_of_adapter = {
            adapter for adapter, adapter_slot in residency.place_of.items() if (residency.places == adapter_slot).any()
        }
        first = next((item for item in queued if item.adapter is None or item.adapter in slot_of_adapter), None)
        ahead = queued[: queued.index(first)] if first is not None else []
        full = (
            len(slot_of_adapter) == adapter_slots and not forks
        )  # further choices may end within `step`, and make room
        if first is not None and not swapped and full and (first.adapter is None or patience > count):
            # Those ahead of it have no place, so it waits for a slot or for pages, for nothing else.
            assert all(item.adapter not in slot_of_adapter for item in ahead)
            tokens = first.max_tokens
            if admission == "optimistic":
                tokens = min(tokens, first.num_prompt_tokens + policy.LOOKAHEAD)
            room = len(scheduler.free_slots) > len(first.siblings)
            assert not room or scheduler.pages_for(first, tokens) > scheduler.tables.pool.num_available
            passed += bool(ahead)
        for request, _ in schedule.shares:
            if request.num_computed >= request.max_tokens:
                scheduler.finish(request)
        abort_due(scheduler, aborts)
        scheduler.check()
    event("others were passed" if passed else "nobody was passed")
    assert (residency.places == -1).all() and scheduler.tables.pool.num_available == pages


def test_requests_move_to_low_slots_with_pages_and_adapters_where_none_waits():
    scheduler = make(8, compacts=True, adapter_slots=2)
    requests = [Scheduled(70, 71 + (number in (5, 7)) * 9, adapter="ab"[number % 2]) for number in range(8)]
    for request in requests:
        scheduler.add(request)
    while scheduler.num_running != 2:
        for request, _ in step(scheduler).shares:
            if request.num_computed >= request.max_tokens:
                scheduler.finish(request)
    pages = [list(scheduler.tables[slot]) for slot in (5, 7)]
    assert [requests[5].slot, requests[7].slot] == [5, 7] and scheduler.is_spread
    waiting = Scheduled(70, 71)
    scheduler.add(waiting)
    assert not scheduler.is_spread, "a request that waits takes a slot between"
    scheduler.finish(waiting)
    step(scheduler)
    assert [requests[5].slot, requests[7].slot] == [0, 1] and [list(scheduler.tables[slot]) for slot in (0, 1)] == pages
    assert scheduler.residency.places.tolist() == 2 * [1] + 6 * [-1]
    scheduler.check()
