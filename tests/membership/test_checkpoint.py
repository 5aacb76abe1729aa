"""A store that is gone ends training with an error and, where that is wanted, with a file to begin from."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm
from bagua.comm import open_store, serve_store_at
from bagua.errors import CollectiveMismatchError, ConfigurationError, StoreLostError
from bagua.membership.islands import write_state
from bagua.parallel import with_bagua
from bagua.testing import ThreadRanks
from bagua.testing.ranks import RankDiedError
from tests.harness import until
from tests.membership.training import (
    PERIOD,
    Unsteady,
    among,
    check_equal,
    inner_steps,
    joined,
    new_model,
    new_store,
    run,
    run_islands,
    run_numbered,
    together,
    train,
    train_all,
    vanish,
    wrapped,
)

pytestmark = pytest.mark.threads


class Loss:
    """In the third step of all processes the one on seat 1 dies, and the store with it; nobody waits for long.

    Args:
        processes: number of processes, which all have taken in the first exchange before.
    """

    def __init__(self, processes: int = 2) -> None:
        self.store = Unsteady()
        self._all = threading.Barrier(processes)

    def before(self, islands, step):
        if step != PERIOD + 1:
            return
        if islands.place[0] == 0:
            islands._participant._timeout_s = 0.2
        self._all.wait(60)
        if islands.seat == 1:
            self.store.on.clear()
            vanish(islands)


def survivors(ends):
    return [end for end in ends if not isinstance(end, RankDiedError)]


def test_each_member_saves_its_state_and_a_new_run_begins_from_one(tmp_path):
    """The server of the store is closed, after one outer step; the weights of the new run are those of plain torch."""

    def ending(where, folder):
        store = open_store(where, 5.0)
        with joined(store, 3, checkpoint=folder / "runs" / "{seat}.pt") as islands:
            model = wrapped(islands, "diloco")

            def fail(step):
                if step == PERIOD + 1:
                    islands._participant._timeout_s = 0.2
                    together.wait(60)
                    if islands.seat == 2:
                        served.clear()
                        vanish(islands)

            train(islands, model, 2 * PERIOD, fail)

    def beginning(store, folder):
        with joined(store, 2, resume=folder / "runs" / "0.pt") as islands:
            return train(islands, wrapped(islands, "diloco"), 4 * PERIOD)

    folder = tmp_path
    server, where = serve_store_at("127.0.0.1", 0)
    served, together = [server], threading.Barrier(3)
    del server
    first, second = survivors(run(3, ending, where, folder))
    for error in (first, second):
        assert isinstance(error, StoreLostError)
        assert "the store does not answer" in str(error)
        assert f"{folder}/runs/" in str(error)
    assert sorted(one.name for one in (folder / "runs").iterdir()) == ["0.pt", "1.pt"]

    outer = torch.nn.Parameter(new_model(0).weight.detach().clone())
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)

    def outer_step(ends):
        outer.grad = torch.stack([outer.detach() - end for end in ends]).mean(0)
        optimizer.step()
        return outer.detach().clone()

    anchor = outer_step([inner_steps(outer.detach(), seat) for seat in range(3)])
    saved = torch.load(folder / "runs" / "0.pt")["state"]
    own = inner_steps(anchor, 0)
    torch.testing.assert_close(saved["tensors"]["weight"], own)
    assert saved["engine"]["step"] == 2 * PERIOD
    wanted = [outer_step([inner_steps(own, seat) for seat in (0, 1)])]
    wanted.append(outer_step([inner_steps(wanted[0], seat) for seat in (0, 1)]))
    by_step = check_equal(run(2, beginning, new_store(), folder))
    assert sorted(by_step) == [3 * PERIOD, 4 * PERIOD]
    for step, weights in zip(sorted(by_step), wanted, strict=True):
        torch.testing.assert_close(by_step[step].weights, weights)


def test_with_gradients_in_each_step_the_weights_of_the_last_one_are_saved(tmp_path):
    loss, file = Loss(), tmp_path / "{seat}.pt"

    def island(islands):
        model = wrapped(islands, "gradient_allreduce", momentum=0.9, elastic=True)
        with pytest.raises(StoreLostError):
            train(islands, model, 9, before=lambda step: loss.before(islands, step))
        return model.weight.detach().clone()

    (weights,) = survivors(among(2, island, store=loss.store, checkpoint=file))
    saved = torch.load(tmp_path / "0.pt")["state"]
    assert torch.equal(saved["tensors"]["weight"], weights)

    with joined(new_store(), 1, resume=tmp_path / "0.pt") as islands:
        model = wrapped(islands, "gradient_allreduce", momentum=0.9, elastic=True)
        assert torch.equal(model.weight, weights)
        (remembered,) = model.bagua_optimizers[0].state_dict()["state"].values()
    assert torch.equal(remembered["momentum_buffer"], saved["optimizers"][0]["state"][0]["momentum_buffer"])


def test_ranks_of_an_island_save_files_of_their_own(tmp_path):
    loss, file = Loss(4), tmp_path / "{seat}-{rank}.pt"

    def island(number):
        with together(loss.store, 2, checkpoint=file) as islands:
            model = wrapped(islands)
            train(islands, model, 2 * PERIOD, lambda step: loss.before(islands, step))

    def beginning(number):
        with together(new, 1, resume=tmp_path / "0-{rank}.pt") as islands:
            model = wrapped(islands)
            begun = model.weight.detach().clone()
            return begun, train(islands, model, 4 * PERIOD)

    new = new_store()
    ends = [end for ends in run_islands(2, island) for end in survivors(ends)]
    assert [type(end) for end in ends] == [StoreLostError] * 2
    saved = [torch.load(tmp_path / f"0-{rank}.pt")["state"]["tensors"]["weight"] for rank in range(2)]
    ((first, second),) = run_islands(1, beginning)
    for (begun, rows), weights in zip((first, second), saved, strict=True):
        assert torch.equal(begun, weights)
        assert [row.step for row in rows] == [3 * PERIOD, 4 * PERIOD]
    check_equal([first[1], second[1]])


def test_a_rank_whose_first_rank_is_lost_with_the_store_saves_its_file(tmp_path):
    loss, file = Loss(4), tmp_path / "{seat}-{rank}.pt"

    def before(islands, step):
        if islands.seat == 0 and islands.place[0] == 0 and step == PERIOD + 1:
            islands._participant._change = lambda: vanish(islands)
        loss.before(islands, step)

    def island(number):
        with together(loss.store, 2, checkpoint=file) as islands:
            model = wrapped(islands)
            train(islands, model, 2 * PERIOD, lambda step: before(islands, step))

    (end,) = [end for ends in run_islands(2, island) for end in survivors(ends)]
    assert isinstance(end, StoreLostError)
    assert "the store does not answer: nobody is there" in str(end)
    assert [one.name for one in tmp_path.iterdir()] == ["0-1.pt"]


def test_a_state_that_cannot_be_saved_does_not_hide_why_training_ended(tmp_path):
    (tmp_path / "file").touch()
    loss = Loss()

    def before(islands, model, step):
        loss.before(islands, step)

    ends = train_all(2, "diloco", 2, before, store=loss.store, checkpoint=tmp_path / "file" / "state.pt")
    (error,) = survivors(ends)
    assert isinstance(error, StoreLostError)
    assert "Its state could not be saved in" in str(error)


def test_no_file_is_written_where_training_ends_otherwise(tmp_path):
    def island(islands):
        train(islands, wrapped(islands, "diloco"), PERIOD)
        raise ValueError("a mistake of the user")

    ends = among(2, island, checkpoint=tmp_path / "{seat}.pt")
    assert [str(error) for error in ends] == ["a mistake of the user"] * 2
    assert not list(tmp_path.iterdir())


def test_half_a_file_never_takes_the_place_of_a_whole_one(tmp_path, monkeypatch):
    file = tmp_path / "state.pt"
    write_state(file, ["a fact"], {"number": 1})

    def fill_the_disk(_, open_file):
        open_file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", fill_the_disk)
    with pytest.raises(OSError, match="no space left"):
        write_state(file, ["a fact"], {"number": 2})
    assert [one.name for one in tmp_path.iterdir()] == ["state.pt"]
    assert torch.load(file)["state"] == {"number": 1}


def _saved_by_another_model(file):
    write_state(file, ["buckets=[]", "weight: 7x1"], {})


def _not_a_file_of_ours(file):
    file.write_bytes(b"something else")


def _without_tensors(file):
    with joined(new_store(), 1) as islands:
        wrapped(islands, "diloco")
        write_state(file, islands._facts, {"samples": None, "tensors": {}})


@pytest.mark.parametrize("make", [lambda file: None, _saved_by_another_model, _not_a_file_of_ours, _without_tensors])
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

    def island(store, number):
        first = number == 0
        assert first or begun.wait(60)
        with joined(store, 1, resume=file) as islands:
            if first:
                model = wrapped(islands, "diloco")
                file.unlink()
                begun.set()
                until(lambda: islands.rest() or len(islands.members().in_epoch) == 2)
                return model
            return wrapped(islands, "diloco")

    store = new_store()
    first, second = run_numbered(2, island, store)
    assert torch.equal(first.weight, second.weight)
    with pytest.raises(CollectiveMismatchError, match="resumes=True"), joined(store, 1):
        pass


DATA = torch.arange(48.0)


def learn(model, numbers):
    (optimizer,) = model.bagua_optimizers
    optimizer.zero_grad()
    model(DATA[numbers].view(-1, 1)).square().sum().backward()
    optimizer.step()


def sampling(islands):
    sampler, model = bagua.ElasticSampler(DATA, islands, shuffle=False), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    return sampler, with_bagua(model, optimizer, Algorithm.init("diloco", sync_every=2), between=islands)


def train_behind_a_loader_that_is_ahead(store, file):
    """Two exchanges, with two batches more drawn than trained on, as worker processes of a loader do it."""
    with joined(store, 2) as islands:
        sampler, model = sampling(islands)
        numbers, drawn, trained = iter(sampler), [], []
        for _ in range(4):
            while len(drawn) < 6:
                drawn.append(next(numbers))
            batch, drawn = drawn[:2], drawn[2:]
            sampler.record(2)
            learn(model, batch)
            trained += batch
        if islands.seat == 0:
            write_state(file, islands._facts, islands._state.give())
        return trained


def train_on(store, count, file):
    with joined(store, count, resume=file) as islands:
        sampler, model = sampling(islands)
        trained = []
        for batch in sampler.batches(torch.utils.data.DataLoader(range(48), batch_size=2, sampler=sampler)):
            learn(model, batch)
            trained += batch.tolist()
        return trained


@pytest.mark.parametrize("count", [2, 3])
def test_a_new_run_draws_what_nobody_had_drawn_before(tmp_path, count):
    """What loaders of the old run had drawn ahead is left out of this pass."""
    file = tmp_path / "state.pt"
    before = run(2, train_behind_a_loader_that_is_ahead, new_store(), file)
    after = run(count, train_on, new_store(), count, file)
    trained = [number for ends in (before, after) for trained in ends for number in trained]
    assert sorted(trained) == [number for number in range(48) if not 16 <= number < 24]


def test_the_options_of_the_algorithm_may_be_others(tmp_path):
    file = tmp_path / "state.pt"
    with joined(new_store(), 1) as islands:
        model = wrapped(islands, "diloco")
        write_state(file, islands._facts, islands._state.give())
    with joined(new_store(), 1, resume=file) as islands:
        begun = wrapped(islands, Algorithm.init("diloco", sync_every=9, outer_lr=0.1))
    assert torch.equal(begun.weight, model.weight)


def test_a_state_that_could_not_be_read_again_is_not_written(tmp_path):
    file = tmp_path / "state.pt"
    write_state(file, [], {"samples": None})
    with pytest.raises(pickle.UnpicklingError):
        write_state(file, [], {"samples": threading.Barrier})
    assert torch.load(file)["state"] == {"samples": None}
    assert [one.name for one in tmp_path.iterdir()] == ["state.pt"]


def test_one_file_for_several_ranks_is_refused():
    def rank():
        for argument in ("checkpoint", "resume"):
            with pytest.raises(ConfigurationError, match="one file for all ranks") as caught:
                bagua.join_islands("tcp://127.0.0.1:1", **{argument: "state.pt"})
            assert caught.value.argument == argument

    ThreadRanks(2).run(rank)
