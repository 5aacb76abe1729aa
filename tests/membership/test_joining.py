"""What ``join_islands`` and the commands of islands refuse, and what all islands must hold alike."""

import io
import signal
import socket

import pytest
import torch

import bagua.torch_api as bagua
from bagua.cli.baguarun import main as baguarun
from bagua.cli.main import main
from bagua.comm import close_store, open_bucket, open_store, serve_store_at
from bagua.errors import CollectiveMismatchError, ConfigurationError
from tests.membership import training
from tests.membership.servers import needs_obstore
from tests.membership.training import ALGORITHMS, PERIOD, among, check_equal, survivors, train, train_all, wrapped

pytestmark = pytest.mark.threads


def test_the_address_comes_from_the_environment(monkeypatch, where):
    monkeypatch.setenv("BAGUA_ISLANDS", where)
    with bagua.join_islands() as first, bagua.join_islands() as second:
        assert (first.seat, second.seat, first.name) == (0, 1, "default")
        assert first.members().in_epoch == ()
        with pytest.raises(CollectiveMismatchError):
            bagua.join_islands(minimum=2)


def test_no_address_is_refused(monkeypatch):
    monkeypatch.delenv("BAGUA_ISLANDS", raising=False)
    with pytest.raises(ConfigurationError, match="no store where islands meet"):
        bagua.join_islands()


@pytest.mark.parametrize(
    ("argument", "value"),
    [("size", 0), ("size", 2.0), ("minimum", 0), ("minimum", "1"), ("name", 3), ("timeout", 0), ("timeout", "1")],
)
def test_bad_arguments_are_refused_before_anybody_is_asked(argument, value):
    with pytest.raises(ConfigurationError, check=lambda error: error.argument == argument):
        bagua.join_islands("tcp://127.0.0.1:1", **{argument: value})


def test_fewer_cannot_begin_than_may_go_on():
    with pytest.raises(ConfigurationError, match="at most size, which is 2"):
        bagua.join_islands("tcp://127.0.0.1:1", size=2, minimum=3)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        *(([address], f"not {address}") for address in ("29600", "head:", "127.0.0.1:x", "127.0.0.1:65536")),
        (["127.0.0.1:0", "train.py"], "takes host:port"),
    ],
    ids=str,
)
def test_a_store_is_served_at_an_address_without_a_script(arguments, why, capsys):
    assert baguarun(["--serve-islands", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_a_store_can_be_ended_from_when_its_address_is_known(monkeypatch):
    """Who reads the address may send a signal at once."""

    class Reader(io.StringIO):
        def flush(self):
            assert "Islands meet at tcp://127.0.0.1:" in self.getvalue()
            assert signal.getsignal(signal.SIGTERM) is not before  # It would end this process.
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("sys.stdout", Reader())
    assert baguarun(["--serve-islands=127.0.0.1:0"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_an_address_of_ipv6_is_printed_as_it_is_read():
    store, where = serve_store_at("::1", 0)
    assert where.startswith("tcp://[::1]:")
    store.set("served", "here")
    reached = open_store(where, 60.0)
    assert reached.get("served") == b"here"
    close_store(reached)
    del store


def test_a_store_is_not_served_where_another_one_is(capsys, where):
    assert baguarun([f"--serve-islands={where.removeprefix('tcp://')}"]) == 1
    assert "no store can be served there" in capsys.readouterr().err


@needs_obstore
def test_what_a_run_has_left_is_deleted_and_nothing_else_when_it_has_ended_or_that_is_forced(tmp_path, capsys):
    where = f"file://{tmp_path}/run"
    with bagua.join_islands(where, timeout=5.0) as islands:
        assert main(["islands", "clean", where]) == 1
        assert f"a run is alive at {where}" in capsys.readouterr().err
        assert "process" in islands._state.record.host
        assert main(["islands", "clean", "--force", where]) == 0
        islands._state.look()
        assert not islands._state.trouble, "it waits for no cell that is gone"
    with bagua.join_islands(where):
        pass
    (tmp_path / "run" / "mine.txt").write_text("kept")
    open_bucket(where, 1.0).bucket.put("objects/a/1", b"12")
    assert main(["islands", "clean", where]) == 0
    assert "Deleted " in capsys.readouterr().out
    assert [*open_bucket(where, 1.0).bucket.list()] == ["mine.txt"]


@needs_obstore
def test_an_address_that_is_none_is_an_error(capsys):
    assert main(["islands", "clean", "s3://"]) == 1
    assert "bagua islands: " in capsys.readouterr().err


#: Algorithms that hold something alike on all islands.
ANCHORED = ["diloco", "slowmo"]


def load_others(model):
    """Load other weights, as a program does that goes on from a file."""
    model.load_state_dict({name: value + 1.0 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("algorithm", ANCHORED)
@pytest.mark.parametrize(("count", "strange"), [(3, (1,)), (2, (0, 1))])
def test_weights_loaded_on_one_island_before_the_first_exchange_end_all_and_name_it(algorithm, count, strange):
    def load(islands, model, step):
        if islands.seat == step == 1:
            load_others(model)

    ends = train_all(count, algorithm, 2, load)
    assert [type(end) for end in ends] == [CollectiveMismatchError] * count, ends
    assert [end.peers for end in ends] == [strange] * count
    assert "seats [1] is not that of seats [0, 2]" in str(ends[0]) or count == 2


@pytest.mark.parametrize("algorithm", ANCHORED)
def test_weights_loaded_on_all_islands_before_the_first_exchange_are_what_all_go_on_with(algorithm):
    ends = train_all(2, algorithm, 2, lambda islands, model, step: load_others(model) if step == 1 else None)
    assert len(check_equal(ends)) == 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("what", ["weights", "state"])
def test_a_load_after_the_first_exchange_is_refused_and_the_others_go_on(algorithm, what):
    refused = []

    def island(islands):
        model = wrapped(islands, algorithm)
        saved = model.bagua_state_dict()

        def before(step):
            if islands.seat != 1 or step != PERIOD + 2 - ALGORITHMS[algorithm].get("overlap", 0):
                return
            if what == "state":
                model.bagua_load_state_dict(saved)
            load_others(model)
            for _ in range(2):  # Also when it is tried once more.
                with pytest.raises(ConfigurationError, match="seat 1 loads") as caught:
                    model(torch.zeros(1, 3))
                refused.append(caught.value)
            raise caught.value

        return train(islands, model, 3 * PERIOD, before)

    ends = among(3, island)
    rows = survivors(ends)
    assert len(rows) == 2, ends
    assert [one.contributed for one in check_equal(rows).values()] == [(0, 1, 2), (0, 2), (0, 2)]
    assert len(refused) == (0 if what == "state" else 2)
    assert sum(isinstance(end, ConfigurationError) for end in ends) == 1


@pytest.mark.parametrize("algorithm", ANCHORED)
def test_weights_that_are_put_back_are_no_load(algorithm):
    def put_back(islands, model, step):
        if islands.seat == 1:  # As an evaluation with averaged weights does.
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            load_others(model)
            model.load_state_dict(kept)

    assert len(check_equal(train_all(2, algorithm, before=put_back))) == 3


@pytest.mark.parametrize("algorithm", ANCHORED)
@pytest.mark.parametrize(("by", "goes_on"), [(1e-7, True), (1e-2, False)])
def test_shared_state_that_differs_ends_all_unless_that_is_rounding(algorithm, by, goes_on, caplog):
    """Islands on other processors round differently: that is told once, and newcomers are told to compare nothing."""

    def load(islands, model, step):
        if islands.seat == 2 and step == PERIOD:
            saved = model.bagua_state_dict()
            saved["parameters"]["weight"]["anchor"].mul_(1 + by)
            model.bagua_load_state_dict(saved)

    ends = train_all(3, algorithm, before=load)
    told = [record for record in caplog.records if "rounding" in record.message]
    if goes_on:
        assert ([len(rows) for rows in ends], len(told)) == ([3] * 3, 1)
    else:
        assert [(type(end), end.peers) for end in ends] == [(CollectiveMismatchError, (2,))] * 3


def test_every_rank_of_an_island_learns_which_island_differs():
    def rank(islands):
        model = wrapped(islands, "diloco")
        if islands.seat == 1:
            load_others(model)
        return train(islands, model, 2 * PERIOD)

    ends = [end for rows in training.among_ranks(2, rank) for end in rows]
    assert [(type(end), end.peers) for end in ends] == [(CollectiveMismatchError, (0, 1))] * 4


@pytest.mark.parametrize("changed", [1, 3])
def test_weights_that_differ_where_gradients_are_exchanged_end_all(changed, monkeypatch):
    monkeypatch.setattr("bagua.algorithms.local.between_islands._COMPARE_EVERY", 4)

    def island(islands):
        model = wrapped(islands, "gradient_allreduce", elastic=True)

        def before(step):
            if islands.seat == 0 and step == changed:
                with torch.no_grad():
                    model.weight.add_(0.5)

        train(islands, model, 8, before)

    ends = among(3, island)
    assert [(type(end), end.peers) for end in ends] == [(CollectiveMismatchError, (0,))] * 3
