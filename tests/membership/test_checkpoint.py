"""A store that is gone ends training with an error and, where that is wanted, with a file to begin from."""

import threading
from pickle import UnpicklingError

import pytest
import torch

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm
from bagua.comm import open_store, serve_store_at
from bagua.errors import CollectiveMismatchError, ConfigurationError, StoreLostError
from bagua.membership.islands import write_state
from bagua.parallel import with_bagua
from bagua.testing import RankDiedError
from tests.harness import on_ranks, until
from tests.membership import training
from tests.membership.training import PERIOD, Unsteady, among, joined, new_store, together, train, wrapped

pytestmark = pytest.mark.threads


def losing(lose, processes=2, seat=1):
    """In the third step of all processes ``seat`` dies, and the store with it, by ``lose()``; nobody waits for long.

    All processes have taken in the first exchange before.
    """
    all_of_them = threading.Barrier(processes)

    def before(islands, step):
        if step == PERIOD + 1:
            if islands.place[0] == 0:
                islands._participant._timeout_s = 0.2
            all_of_them.wait(60)
            if islands.seat == seat:
                lose()
                training.vanish(islands)

    return before


def survivors(ends):
    return [end for end in ends if not isinstance(end, RankDiedError)]


def test_each_member_saves_its_state_and_a_new_run_begins_from_one(tmp_path):
    """The server of the store is closed, after one outer step; the weights of the new run are those of plain torch."""

    def ending():
        with joined(open_store(where, 5.0), 3, checkpoint=folder / "{seat}.pt") as islands:
            train(islands, wrapped(islands, "diloco"), 2 * PERIOD, lambda step: lose(islands, step))

    def beginning(islands):
        return train(islands, wrapped(islands, "diloco"), 4 * PERIOD)

    folder = tmp_path / "runs"
    server, where = serve_store_at("127.0.0.1", 0)
    served = [server]
    del server
    lose = losing(served.clear, processes=3, seat=2)
    first, second = survivors(training.run(3, ending))
    for error in (first, second):
        assert isinstance(error, StoreLostError)
        assert "the store does not answer" in str(error)
        assert f"{folder}/" in str(error)
    assert sorted(one.name for one in folder.iterdir()) == ["0.pt", "1.pt"]

    outer = torch.nn.Parameter(training.new_model(0).weight.detach().clone())
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)

    def outer_step(ends):
        outer.grad = torch.stack([outer.detach() - end for end in ends]).mean(0)
        optimizer.step()
        return outer.detach().clone()

    anchor = outer_step([training.inner_steps(outer.detach(), seat) for seat in range(3)])
    saved = torch.load(folder / "0.pt")["state"]
    own = training.inner_steps(anchor, 0)
    torch.testing.assert_close(saved["tensors"]["weight"], own)
    assert saved["engine"]["step"] == 2 * PERIOD
    wanted = [outer_step([training.inner_steps(own, seat) for seat in (0, 1)])]
    wanted.append(outer_step([training.inner_steps(wanted[0], seat) for seat in (0, 1)]))
    by_step = training.check_equal(among(2, beginning, resume=folder / "0.pt"))
    assert sorted(by_step) == [3 * PERIOD, 4 * PERIOD]
    for step, weights in zip(sorted(by_step), wanted, strict=True):
        torch.testing.assert_close(by_step[step].weights, weights)


def test_with_gradients_in_each_step_the_weights_of_the_last_one_are_saved(tmp_path):
    store = Unsteady()
    lose = losing(store.on.clear)

    def island(islands):
        model = wrapped(islands, "gradient_allreduce", momentum=0.9, elastic=True)
        with pytest.raises(StoreLostError):
            train(islands, model, 9, lambda step: lose(islands, step))
        return model.weight.detach().clone()

    (weights,) = survivors(among(2, island, store=store, checkpoint=tmp_path / "{seat}.pt"))
    saved = torch.load(tmp_path / "0.pt")["state"]
    assert torch.equal(saved["tensors"]["weight"], weights)

    with joined(new_store(), 1, resume=tmp_path / "0.pt") as islands:
        model = wrapped(islands, "gradient_allreduce", momentum=0.9, elastic=True)
        assert torch.equal(model.weight, weights)
        (remembered,) = model.bagua_optimizers[0].state_dict()["state"].values()
    assert torch.equal(remembered["momentum_buffer"], saved["optimizers"][0]["state"][0]["momentum_buffer"])


def ends_of_ranks(folder, before=lambda islands, step: None):
    """How the ranks of two islands end that lose one of them and the store; each saves a file. Not who died."""
    store = Unsteady()
    lose = losing(store.on.clear, processes=4)

    def island(_):
        with together(store, 2, checkpoint=folder / "{seat}-{rank}.pt") as islands:
            train(islands, wrapped(islands), 2 * PERIOD, lambda step: (before(islands, step), lose(islands, step)))

    return [end for ends in training.run_islands(2, island) for end in survivors(ends)]


def test_ranks_of_an_island_save_files_of_their_own(tmp_path):
    def beginning(_):
        with together(new, 1, resume=tmp_path / "0-{rank}.pt") as islands:
            model = wrapped(islands)
            begun = model.weight.detach().clone()
            return begun, train(islands, model, 4 * PERIOD)

    new = new_store()
    assert [type(end) for end in ends_of_ranks(tmp_path)] == [StoreLostError] * 2
    saved = [torch.load(tmp_path / f"0-{rank}.pt")["state"]["tensors"]["weight"] for rank in range(2)]
    (found,) = training.run_islands(1, beginning)
    for (begun, rows), weights in zip(found, saved, strict=True):
        assert torch.equal(begun, weights)
        assert [row.step for row in rows] == [3 * PERIOD, 4 * PERIOD]
    training.check_equal([rows for _, rows in found])


def test_a_rank_whose_first_rank_is_lost_with_the_store_saves_its_file(tmp_path):
    def before(islands, step):
        if islands.seat == 0 and islands.place[0] == 0 and step == PERIOD + 1:
            islands._participant._change = lambda: training.vanish(islands)

    (end,) = ends_of_ranks(tmp_path, before)
    assert isinstance(end, StoreLostError)
    assert "the store does not answer: nobody is there" in str(end)
    assert [one.name for one in tmp_path.iterdir()] == ["0-1.pt"]


def test_a_state_that_cannot_be_saved_does_not_hide_why_training_ended(tmp_path):
    (tmp_path / "file").touch()
    store = Unsteady()
    lose, options = losing(store.on.clear), {"store": store, "checkpoint": tmp_path / "file" / "state.pt"}
    (error,) = survivors(training.train_all(2, before=lambda islands, model, step: lose(islands, step), **options))
    assert isinstance(error, StoreLostError)
    assert "Its state could not be saved in" in str(error)


def test_no_file_is_written_where_training_ends_otherwise(tmp_path):
    def island(islands):
        train(islands, wrapped(islands, "diloco"), PERIOD)
        raise ValueError("a mistake of the user")

    ends = among(2, island, checkpoint=tmp_path / "{seat}.pt")
    assert [str(error) for error in ends] == ["a mistake of the user"] * 2
    assert not list(tmp_path.iterdir())


def fill_the_disk(_, open_file):
    open_file.write(b"half")
    raise OSError("no space left on device")


@pytest.mark.parametrize(
    ("save", "number", "error", "why"),
    [
        (fill_the_disk, 2, OSError, "no space left"),
        (torch.save, threading.Barrier, UnpicklingError, "Weights only load failed"),
    ],
    ids=["half a file", "one that nobody could read"],
)
def test_no_other_file_takes_the_place_of_a_whole_one(tmp_path, monkeypatch, save, number, error, why):
    file = tmp_path / "state.pt"
    write_state(file, ["a fact"], {"number": 1})
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(error, match=why):
        write_state(file, ["a fact"], {"number": number})
    assert [one.name for one in tmp_path.iterdir()] == ["state.pt"]
    assert torch.load(file)["state"] == {"number": 1}


def without_tensors(file):
    with joined(new_store(), 1) as islands:
        wrapped(islands, "diloco")
        write_state(file, islands._facts, {"samples": None, "tensors": {}})


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda file: None, id="there is none"),
        pytest.param(lambda file: write_state(file, ["buckets=[]", "weight: 7x1"], {}), id="saved by another model"),
        pytest.param(lambda file: file.write_bytes(b"something else"), id="not a file of ours"),
        without_tensors,
    ],
)
def test_a_file_that_nobody_can_begin_from_is_refused(tmp_path, make):
    make(tmp_path / "state.pt")
    with joined(new_store(), 1, resume=tmp_path / "state.pt") as islands, pytest.raises(ConfigurationError) as caught:
        wrapped(islands, "diloco")
    assert caught.value.argument == "resume"
    assert str(tmp_path / "state.pt") in str(caught.value)


def test_a_newcomer_needs_no_file_and_all_say_whether_they_have_one(tmp_path):
    file, begun = tmp_path / "state.pt", threading.Event()
    with joined(new_store(), 1) as islands:
        wrapped(islands, "diloco")
        write_state(file, islands._facts, islands._state.give())

    def island(number):
        assert number == 0 or begun.wait(60)
        with joined(store, 1, resume=file) as islands:
            model = wrapped(islands, "diloco")
            if number == 0:
                file.unlink()
                begun.set()
                until(lambda: islands.rest() or len(islands.members().in_epoch) == 2)
            return model

    store = new_store()
    first, second = training.run_numbered(2, island)
    assert torch.equal(first.weight, second.weight)
    with pytest.raises(CollectiveMismatchError, match="resumes=True"), joined(store, 1):
        pass


DATA = torch.arange(48.0)


def sampling(islands):
    sampler, model = bagua.ElasticSampler(DATA, islands, shuffle=False), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    return sampler, with_bagua(model, optimizer, Algorithm.init("diloco", sync_every=2), between=islands)


@pytest.mark.parametrize("count", [2, 3])
def test_a_new_run_draws_what_nobody_had_drawn_before(tmp_path, count):
    """What loaders of the old run had drawn ahead is left out of this pass."""
    file = tmp_path / "state.pt"

    def train_behind_a_loader_that_is_ahead(islands):
        """Two exchanges, with two batches more drawn than trained on, as worker processes of a loader do it."""
        sampler, model = sampling(islands)
        numbers, drawn, trained = iter(sampler), [], []
        for _ in range(4):
            while len(drawn) < 6:
                drawn.append(next(numbers))
            batch, drawn = drawn[:2], drawn[2:]
            sampler.record(2)
            training.learn(model, DATA[batch].view(-1, 1))
            trained += batch
        if islands.seat == 0:
            write_state(file, islands._facts, islands._state.give())
        return trained

    def train_on(islands):
        sampler, model = sampling(islands)
        trained = []
        for batch in sampler.batches(torch.utils.data.DataLoader(range(48), batch_size=2, sampler=sampler)):
            training.learn(model, DATA[batch].view(-1, 1))
            trained += batch.tolist()
        return trained

    ends = [*among(2, train_behind_a_loader_that_is_ahead), *among(count, train_on, resume=file)]
    assert sorted(number for trained in ends for number in trained) == [*range(16), *range(24, 48)]


def test_the_options_of_the_algorithm_may_be_others(tmp_path):
    file = tmp_path / "state.pt"
    with joined(new_store(), 1) as islands:
        model = wrapped(islands, "diloco")
        write_state(file, islands._facts, islands._state.give())
    with joined(new_store(), 1, resume=file) as islands:
        begun = wrapped(islands, Algorithm.init("diloco", sync_every=9, outer_lr=0.1))
    assert torch.equal(begun.weight, model.weight)


@pytest.mark.parametrize("argument", ["checkpoint", "resume"])
@on_ranks(2)
def test_one_file_for_several_ranks_is_refused(argument):
    with pytest.raises(ConfigurationError, match="one file for all ranks", check=lambda one: one.argument == argument):
        bagua.join_islands("tcp://127.0.0.1:1", **{argument: "state.pt"})
