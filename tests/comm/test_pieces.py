"""Contents that are fetched from several sources at once, of which some lie, stop or end."""

import random
import re
import socket
import threading

import pytest

from bagua.comm import Fetch, PhaseDeadline, PieceServer, Source, ask_now
from bagua.comm.pieces import fetching, server
from bagua.comm.pieces.server import LENGTH
from tests.harness import until


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(server, "PIECE_BYTES", 100)
    monkeypatch.setattr(fetching, "PIECE_BYTES", 100)


@pytest.fixture
def servers():
    made = [PieceServer(lambda number=number: [number]) for number in range(3)]
    yield made
    for one in made * 2:  # To close them twice does no harm.
        one.close()


def text(seed: int, length: int = 2050) -> bytearray:
    return bytearray(random.Random(seed).randbytes(length))


def fetched(sources, known=None, without=frozenset()):
    fetch = Fetch(known or {}, without, PhaseDeadline(60.0))
    return fetch, fetch.run(lambda: list(sources))


def test_what_is_offered_is_fetched_from_all_who_have_it(servers):
    contents = {"a": text(1), "b": text(2, 7), "empty": bytearray()}
    sources = [one.offer(contents) for one in servers]
    gates = [threading.Event() for _ in servers]
    for one, gate in zip(servers, gates, strict=True):  # Nobody gives a second piece before all have given one.
        _at_pieces(one, lambda count, gate=gate: (gate.set(), count > 1 and all(other.wait(60) for other in gates)))
    fetch, (leader, found) = fetched(sources)
    assert found == contents
    assert leader in sources
    assert set(fetch.received_bytes) == set(sources)
    assert sum(fetch.received_bytes.values()) == 2057
    assert ask_now(sources[2], 60.0) == [2]


def _at_pieces(one, hook):
    """Call ``hook`` with the number of pieces that were asked for, before each of them is given."""
    answer, counts = one._answer, iter(range(1, 1000))

    def hooked(question):
        if len(question) == 4:
            hook(next(counts))
        return answer(question)

    one._server.answer = hooked


def test_where_sources_differ_the_first_one_decides_and_the_others_give_what_is_equal(servers):
    shared = text(1)
    sources = [one.offer({"shared": shared, "own": text(10 + n)}) for n, one in enumerate(servers)]
    fetch, (leader, found) = fetched(sources)
    assert found == {"shared": shared, "own": text(10 + sources.index(leader))}
    assert all(count <= len(shared) for source, count in fetch.received_bytes.items() if source != leader)


def test_a_source_that_ends_is_replaced_by_another(servers):
    contents = {"a": text(1)}
    sources = [one.offer(contents) for one in servers[:2]]
    _at_pieces(servers[0], lambda count: count == 2 and servers[0]._server.connections.pop().shutdown(2))

    def find():  # The second one comes when the first has ended.
        return sources if sources[0] in fetch.failures else sources[:1]

    fetch = Fetch({}, frozenset(), PhaseDeadline(60.0))
    assert fetch.run(find) == (sources[1], contents)
    assert fetch.received_bytes[sources[0]] == 100


def test_only_what_has_changed_is_fetched_again(servers):
    known, after = text(1), text(1)
    after[550] ^= 1
    fetch, (_, found) = fetched([servers[0].offer({"a": after, "b": text(2)})], {"a": known}, frozenset("b"))
    assert found == {"a": after}
    assert sum(fetch.received_bytes.values()) == 100


def test_a_source_that_lies_is_given_up(servers):
    source = servers[0].offer({"a": text(1)})
    servers[0]._catalogue.text()
    servers[0]._catalogue.contents["a"][5] ^= 1
    fetch, found = fetched([source])
    assert found is None
    assert "another digest" in fetch.failures[source]


def test_who_offers_nothing_more_or_is_not_there_or_knows_another_key_is_given_up(servers):
    withdrawn = servers[0].offer({"a": text(1)})
    servers[0].withdraw()
    replaced = servers[1].offer({"a": text(1)})
    stranger = servers[1].offer({"a": text(2)})._replace(key="guessed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = Source("127.0.0.1", free.getsockname()[1], "", 1)
    fetch, found = fetched([withdrawn, replaced, stranger, nobody])
    assert found is None
    assert {"it offers that no longer"} == {fetch.failures[one] for one in (withdrawn, replaced, stranger)}
    assert "refused" in fetch.failures[nobody]
    assert ask_now(stranger, 60.0) is ask_now(nobody, 60.0) is None


def test_a_source_that_is_no_longer_named_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = Source(*silent.getsockname(), "", 1)
        named, fetch = iter([[source], [source]]), Fetch({}, frozenset(), PhaseDeadline(60.0))
        assert fetch.run(lambda: next(named, [])) is None
    assert fetch.failures == {source: "it is no longer there"}


def test_an_end_that_the_caller_wants_leaves_no_thread(servers):
    def find():
        for source in named:
            return [source]
        raise KeyboardInterrupt

    with socket.create_server(("127.0.0.1", 0)) as silent:
        named = iter([Source(*silent.getsockname(), "", 1)])
        with pytest.raises(KeyboardInterrupt):
            Fetch({}, frozenset(), PhaseDeadline(60.0)).run(find)
        for thread in threading.enumerate():
            if thread.name == "bagua-fetch":
                thread.join(60)
                assert not thread.is_alive()


@pytest.mark.parametrize(
    ("durations", "seconds"),
    [
        *(([], 60.0), ([0.1], 1.0), ([30.0], 60.0)),
        ([2.0, 2.0, 2.0], 6.0),  # 3 times the median of the first.
        ([2.0] * 4 + [3.0] * 5, 7.5),  # Median 3, no deviation; the first 8 have 2.5 as their median.
        ([1.0, 2.0, 3.0, 4.0, 5.0], 11.0),  # Median 3, deviation 1.
        ([9.0] * 8 + [1.0] * 64, 27.0),
        ([1.0] * 8 + [4.0] * 64, 4.0),
    ],
)
def test_a_deadline_follows_what_was_measured(durations, seconds):
    deadline = PhaseDeadline(60.0)
    for duration_s in durations:
        deadline.note(duration_s)
    assert deadline.seconds == seconds


def test_contents_are_written_in_another_thread_before_anybody_has_their_digests(servers):
    content, begin = bytearray(5), threading.Event()

    def fill():
        assert begin.wait(60)
        content[:] = b"hello"

    source = servers[0].offer({"text": content}, fill)
    assert bytes(content) == bytes(5)
    begin.set()
    servers[0].wait_until_filled()
    assert content == b"hello"
    assert fetched([source])[1][1] == {"text": b"hello"}


def liar(answer):
    """A source that gives ``answer`` to whatever it is asked, and then says nothing."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        with server, server.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(answer)
            connection.recv(4096)

    threading.Thread(target=serve, daemon=True).start()
    return Source("127.0.0.1", server.getsockname()[1], "key", 1)


def said(text: bytes) -> bytes:
    return LENGTH.pack(len(text)) + text


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (LENGTH.pack(1 << 62), "too many"), (said(b"[]"), "what it offers"), (said(b'{"a": 1}'), "what a is"),
        (said(b'{"a": [7, 3]}'), "what a is"), (said(b'{"a": [-7, []]}'), "what a is"),
        (said(b'{"a": [4611686018427387904, ["x"]]}'), "what a is"), (said(b'{"a": [1, [["x"]]]}'), "what a is"),
        (said(b"[" * 100_000), "recursion"), (said(b"\xff"), "utf-8"), (LENGTH.pack(9) + b"no", "slow|timed out"),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_understood_or_does_not_end_gives_the_source_up(servers, answer, why):
    source, good = liar(answer), servers[0].offer({"a": text(1)})
    fetch = Fetch({}, frozenset(), PhaseDeadline(0.5))
    assert fetch.run(lambda: [source]) is None
    assert re.search(why, fetch.failures[source])
    assert Fetch({}, frozenset(), PhaseDeadline(60.0)).run(lambda: [liar(answer), good])[0] == good


@pytest.mark.parametrize("answer", [said(b"{}"), said(b'["x"]'), LENGTH.pack(1 << 40), said(b"[" * 4000)])
def test_news_that_are_no_numbers_are_none(answer):
    assert ask_now(liar(answer), 60.0) is None


def test_strangers_get_little_time_and_few_connections(servers, monkeypatch):
    monkeypatch.setattr(server, "_FIRST_S", 0.05)
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 2)
    source = servers[0].offer({"a": text(1)})
    for stranger in [socket.create_connection((source.host, source.port), timeout=60) for _ in range(3)]:
        assert stranger.recv(1) == b""  # It was refused, or its time is over.
        stranger.close()
    until(lambda: not servers[0]._server.connections)
    assert fetched([source])[1][1] == {"a": text(1)}
