"""How a group begins: with a launcher, without, with a store; what is refused; how it ends."""

import os
import re
import socket
import textwrap
import threading
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import bagua.comm
from bagua import errors
from bagua.comm.startup import formation, initialization
from bagua.comm.store.asking import come_together
from bagua.comm.store.serving import connect_store, thread_store
from bagua.testing import ProcessRanks, ThreadRanks, this_rank
from tests.harness import in_threads, on_ranks
from tests.interpreters import interpreter
from tests.launching import ends, finished, free_port, launched

#: Ranks that do not initialize by themselves.
THREADS, PROCESSES = ThreadRanks(4, backend=None), ProcessRanks(3, backend=None)
threads, processes = pytest.fixture(lambda: THREADS), pytest.fixture(lambda: PROCESSES)
free = pytest.fixture(free_port)


def total():
    tensor = torch.tensor([bagua.comm.get_rank() + 1.0])
    bagua.comm.allreduce(tensor)
    return tensor.item()


def own_rank():
    return this_rank.get().rank


def init_thread(store, world_size, **options):
    usual = {"backend": "threads", "store": store, "rank": own_rank(), "world_size": world_size, "timeout": 10.0}
    bagua.comm.init_process_group(**(usual | options))
    return total()


@on_ranks(1, pool="processes")
def test_without_a_launcher_a_process_is_a_world_and_a_second_call_changes_nothing():
    assert (bagua.comm.get_rank(), bagua.comm.get_world_size()) == (0, 1)
    bagua.comm.init_process_group()
    assert dist.is_initialized()
    group = bagua.comm.get_default_group()
    with pytest.raises(errors.RepeatedInitializationError, match="destroy_process_group"):
        bagua.comm.init_process_group()
    assert bagua.comm.get_default_group() is group
    facts = [getattr(bagua.comm, f"get_{fact}")() for fact in ("rank", "world_size", "local_rank", "local_size")]
    assert (facts, total()) == ([0, 1, 0, 1], 1.0)
    bagua.comm.destroy_process_group()
    assert (bagua.comm.get_node_rank(), dist.is_initialized(), bagua.comm.is_initialized()) == (0, False, False)


def test_before_initialization_calls_say_what_to_do():
    for call in (bagua.comm.get_default_group, bagua.comm.barrier, bagua.comm.stats, bagua.comm.new_group):
        with pytest.raises(errors.NotInitializedError, match="init_process_group"):
            call()
    bagua.comm.destroy_process_group()  # nothing to do


def told(rank, port):
    """What a launcher tells a rank of two."""
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@on_ranks(2, pool="processes")
def test_initialization_does_not_change_what_the_launcher_said(free):
    """Two launchers on one host, each with one process: scripts choose devices by what these say."""
    os.environ.update(told(own_rank(), free), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(own_rank()))
    facts = (bagua.comm.get_local_rank, bagua.comm.get_local_size, bagua.comm.get_node_rank)
    before = [fact() for fact in facts]
    bagua.comm.init_process_group(backend="gloo", timeout=20)
    after, group = [fact() for fact in facts], bagua.comm.get_default_group()
    bagua.comm.destroy_process_group()
    assert before == after == [0, 1, own_rank()]
    assert (group.local_rank, group.local_size, group.node_rank) == (own_rank(), 2, 0)


@on_ranks(2, pool="processes")
def test_an_existing_group_of_torch_is_joined_and_not_destroyed(free):
    os.environ.update(told(own_rank(), free))
    dist.init_process_group("gloo")
    bagua.comm.init_process_group(timeout=20)
    assert total() == 3.0
    bagua.comm.destroy_process_group()
    assert dist.is_initialized(), "it was the user's"
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    assert tensor.item() == 2.0


def refusal(variables, port=None, backend=None):
    """The error of a rank that begins with the variables of its rank, and with the store at ``port`` if that is given.

    Nothing is initialized then.
    """
    os.environ.update(variables[own_rank()])
    options = {"timeout": 1.0}
    if port is not None:
        options = {"timeout": 10.0, "store": connect_store(port, 10.0), "rank": own_rank(), "world_size": 2}
    with pytest.raises(errors.BaguaError) as caught:
        bagua.comm.init_process_group(backend=backend, **options)
    assert not bagua.comm.is_initialized()
    assert not dist.is_initialized()
    return caught.value


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR.*baguarun --nproc 2"),
        ({"WORLD_SIZE": "2"}, "rank unset, world size 2.*torchrun --nproc_per_node 2"),
        ({**told(0, 29500), "RANK": "one"}, "RANK"),
        *((told(0, port), f"from 1 to 65535, seen .* MASTER_PORT {port}") for port in (0, 99999)),
    ],
)
def test_variables_of_a_launcher_that_cannot_work_show_what_to_do(variables, problem):
    (error,) = PROCESSES.run(refusal, [variables], size=1)
    assert isinstance(error, errors.ConfigurationError)
    assert re.search(problem, str(error))


def test_a_host_of_the_store_that_does_not_answer_is_named():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # It accepts connections, and never says a word.
        for port in (free_port(), silent.getsockname()[1]):
            (error,) = PROCESSES.run(refusal, [told(1, port)], size=1)
            assert (type(error), error.peers) == (errors.CollectiveTimeoutError, (0,))
            assert str(port) in str(error)


def test_a_taken_port_is_an_error_of_the_one_who_wants_it():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (error,) = PROCESSES.run(refusal, [told(0, port)], size=1)
    assert (type(error), error.argument) == (errors.ConfigurationError, "MASTER_ADDR, MASTER_PORT")
    assert str(error).startswith(f"port {port} is taken")
    for part in (f"127.0.0.1:{port}", "choose another port"):
        assert part in str(error)


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 2, "world_size": 2}, {"rank": 0, "world_size": 0}, {"world_size": 2},
        {"local_world_size": 2, "rank": 0, "world_size": 1},
        {"timeout": 0}, {"timeout": "soon"}, {"backend": "threads"}, {"backend": 3},
    ],
    ids=str,
)  # fmt: skip
@on_ranks(1, pool="threads")
def test_arguments_that_cannot_work(options):
    with pytest.raises(errors.ConfigurationError, check=lambda error: error.argument):
        bagua.comm.init_process_group(**options)
    assert not bagua.comm.is_initialized()


#: A year: everything can wait for it.
ENDLESS_S = 365 * 24 * 3600.0


@pytest.mark.parametrize(
    ("variable", "explicit", "timeout_s"),
    [("", None, 1800.0), ("77", None, 77.0), ("77", 5, 5.0), ("inf", None, ENDLESS_S), ("", float("inf"), ENDLESS_S)],
)
def test_an_explicit_timeout_beats_the_environment(monkeypatch, variable, explicit, timeout_s):
    monkeypatch.setenv("BAGUA_TIMEOUT_S", variable)
    bagua.comm.init_process_group(timeout=explicit)
    assert bagua.comm.get_default_group().timeout_s == timeout_s
    bagua.comm.destroy_process_group()


def test_a_rank_that_tries_again_meets_those_who_try_for_the_first_time():
    """What it had said in its first attempt was taken for its presence, and ranks waited at different places."""
    store, gave_up = thread_store(), threading.Event()

    def ask():
        if own_rank() == 0:
            with pytest.raises(errors.CollectiveTimeoutError, match="did not come", check=lambda e: e.peers == (1,)):
                init_thread(store, 2, timeout=0.2)
            assert not bagua.comm.is_initialized()
            gave_up.set()
        assert gave_up.wait(60)
        return init_thread(store, 2, timeout=60)

    assert THREADS.run(ask, size=2) == [3.0] * 2


def test_a_rank_that_was_started_anew_is_followed_by_those_who_wait_for_it():
    store = thread_store()
    store.add("bagua/generation/1", 3)  # It has died three times before it could meet anybody.
    assert THREADS.run(lambda: init_thread(store, 2, timeout=60), size=2) == [3.0] * 2


def test_a_world_grows_and_shrinks_on_one_store():
    store, barrier = thread_store(), threading.Barrier(3)

    def ask():
        found = []
        for size in (2, 3, 1, 3):
            if own_rank() < size:
                found.append(init_thread(store, size, timeout=60))
                bagua.comm.destroy_process_group()
            barrier.wait(60)
        return found

    assert THREADS.run(ask, size=3) == [[3.0, 6.0, 1.0, 6.0], [3.0, 6.0, 6.0], [6.0, 6.0]]


def test_who_gives_up_when_all_have_come_meets_them():
    """The last one has said so already, and waits for this one."""
    store = thread_store()
    store.set("bagua/1/outcome", "2")
    assert come_together(store, "subject", 0, (0, 1), -1.0) == 1


@pytest.mark.parametrize("comes", [False, True])
def test_what_torch_raises_when_it_is_set_up_is_translated(monkeypatch, comes):
    """A rank that dies after the plan was made never comes to torch, which says so with errors of its store."""
    store, kind, peers = thread_store(), errors.CollectiveTimeoutError, (1,)
    if comes:
        store.set("came_to_torch/1", "")
        kind, peers = errors.TransportUnavailableError, ()
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=dist.DistStoreError("wait timeout")))
    with pytest.raises(kind, match=r"could not be set up: wait timeout \(in init_process_group, on rank 0") as caught:
        initialization._init_torch(store, 0, (0, 1), "gloo", 5.0)
    assert caught.value.peers == peers


@pytest.mark.parametrize(
    ("fact", "usual", "other"), [("world_size", 2, 3), ("backend", "threads", "gloo"), ("local_world_size", 2, 1)]
)
def test_ranks_that_were_started_differently_all_hear_of_it(fact, usual, other):
    store = thread_store()

    def ask():
        with pytest.raises((errors.CollectiveMismatchError, errors.CollectiveTimeoutError)) as caught:
            init_thread(store, **{"world_size": 2, fact: other if own_rank() else usual, "timeout": 1.0})
        return type(caught.value) is errors.CollectiveMismatchError and fact in str(caught.value)

    first, second = THREADS.run(ask, size=2)
    assert first
    assert second or fact == "world_size"


def test_checks_on_one_rank_only_are_refused_on_all(port):
    found = PROCESSES.run(refusal, [{"BAGUA_DEBUG": "0"}, {"BAGUA_DEBUG": "1"}], port, size=2)
    assert [error.peers for error in found] == [(1,), (0,)]
    for error in found:
        assert type(error) is errors.CollectiveMismatchError
        assert "different values of BAGUA_DEBUG" in str(error)


@pytest.mark.parametrize("backend", ["nosuchthing", "threads", "nccl"])
def test_a_backend_that_cannot_run_here_is_refused_on_all_ranks(backend, port):
    if backend == "nccl" and torch.cuda.is_available():
        pytest.skip("NCCL can run here")
    for error in PROCESSES.run(refusal, [{}, {}], port, backend, size=2):
        assert isinstance(error, (errors.TransportUnavailableError, errors.ConfigurationError))
        assert backend in str(error)


def test_a_host_that_nobody_else_reaches_is_refused_on_all_ranks(monkeypatch):
    """The name of many a machine stands for 127.0.1.1: one rank would fail to connect, and the other one wait."""
    store = thread_store()
    monkeypatch.setattr(formation, "host_identity", lambda: f"host of rank {own_rank()}")
    monkeypatch.setattr(formation, "own_address", lambda: "10.0.0.1" if own_rank() else "127.0.1.1")

    def start():
        with pytest.raises(errors.TransportUnavailableError) as caught:
            init_thread(store, 2)
        return str(caught.value)

    own, told = THREADS.run(start, size=2)
    assert own.startswith("Gloo would tell other hosts the address 127.0.1.1, which none of them reaches")
    assert "Set GLOO_SOCKET_IFNAME" in own
    assert told.startswith("rank 0 refused: Gloo would tell other hosts the address 127.0.1.1")
    monkeypatch.setattr(formation, "own_address", lambda: "10.0.0.1")
    reached = thread_store()
    assert THREADS.run(lambda: init_thread(reached, 2), size=2) == [3.0] * 2


@pytest.mark.parametrize(("agreed", "tried"), [((0, 1), ["hybrid", "gloo"]), ((), ["hybrid"]), ((0,), ["hybrid"])])
def test_ranks_go_on_to_the_next_backend_together_or_not_at_all(monkeypatch, agreed, tried):
    seen = []

    def refuse(store, rank, ranks, nodes, backend, *_):
        seen.append(backend)
        error = errors.TransportUnavailableError(f"no {backend}")
        error.agreed = agreed
        raise error

    monkeypatch.setattr(formation, "ProcessGroup", refuse)
    planned = formation.StartupPlan((0, 0), [("hybrid", "hosts"), ("gloo", "all can")], "job")
    with pytest.raises(errors.TransportUnavailableError, match=f"no {tried[-1]}"):
        formation.connect_first(thread_store(), 0, (0, 1), planned, 1.0)
    assert seen == tried


def test_a_backend_that_is_nearly_right_is_answered_with_the_right_one():
    said = str(bagua.comm.backend_refusal("glo"))
    assert said.startswith("there is no backend 'glo' here. Did you mean 'gloo'? There are shm, hybrid, gloo, nccl")


def test_one_rank_needs_no_backend_but_a_name_that_there_is(request):
    assert bagua.comm.backend_refusal("cpu:gloo,cuda:nccl", ranks=1) is None
    problem = r"no backend 'carrier pigeon' here\. There are .*nccl.*bucket"
    with pytest.raises(errors.TransportUnavailableError, match=problem):
        bagua.comm.init_process_group(backend="carrier pigeon")
    assert not bagua.comm.is_initialized()
    bagua.comm.init_process_group()
    request.addfinalizer(bagua.comm.destroy_process_group)
    with pytest.raises(errors.TransportUnavailableError, match="no backend 'pigeon'"):
        bagua.comm.new_group([0], backend="pigeon")


def test_an_argument_without_a_name_is_answered_with_the_names():
    with pytest.raises(errors.InvalidTypeError, match=r"need their names .*seen 'gloo'\)\. .*backend='gloo'"):
        bagua.comm.init_process_group("gloo")
    assert not bagua.comm.is_initialized()


@pytest.mark.parametrize(
    ("options", "hosts"), [({"local_world_size": 2}, [(0, 1), (2, 3)]), ({"_nodes": (0, 1, 0, 1)}, [(0, 2), (1, 3)])]
)
def test_ranks_can_be_said_to_be_on_hosts(options, hosts):
    """In blocks of neighbours, or in any way."""
    store = thread_store()

    def ask():
        init_thread(store, 4, **options)
        group = bagua.comm.get_default_group()
        inter = group.inter_node_communicator
        return group.node_rank, group.local_rank, group.intra_node_communicator.ranks, inter.ranks if inter else None

    leaders = tuple(host[0] for host in hosts)
    for rank, found in enumerate(THREADS.run(ask, size=4)):
        node = next(number for number, host in enumerate(hosts) if rank in host)
        local = hosts[node].index(rank)
        assert found == (node, local, hosts[node], None if local else leaders)


FORGETFUL = """
    import sys, torch, bagua.comm
    bagua.comm.init_process_group({arguments})
    tensor = torch.ones(3)
    bagua.comm.allreduce(tensor)
    work = bagua.comm.allreduce(tensor, async_op=True)
    {ending}
    print(tensor.tolist(), flush=True)
"""


@pytest.mark.gloo
def test_processes_that_forget_to_destroy_end_well():
    ending = "work.wait(); group = bagua.comm.new_group([0, 1])"
    script = textwrap.dedent(FORGETFUL.format(arguments="backend='gloo', timeout=20", ending=ending))
    with launched(2, "-c", script, port=free_port()) as ranks:
        assert ends(ranks) == [(0, "[4.0, 4.0, 4.0]\n")] * 2


@pytest.mark.solo
def test_a_single_process_that_forgets_to_destroy_ends_well():
    script = textwrap.dedent(FORGETFUL.format(arguments="", ending="work.wait()"))
    done = finished(*interpreter(), "-c", script)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[1.0, 1.0, 1.0]", "")


@pytest.mark.parametrize("visible", [("", ""), ("0", "1")], ids=str)
def test_nccl_connects_no_ranks_that_share_a_gpu(visible: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of one GPU and two ranks; or two ranks with a GPU each."""
    store, answers = dist.HashStore(), threading.local()
    monkeypatch.setattr(formation, "backend_refusal", lambda *_: None)
    monkeypatch.setattr(formation, "abilities", lambda _: answers.abilities)

    def choice(rank: int, backend: str | None) -> str:
        """The first one, or why there is none."""
        able = {"gpus": 1, "visible": visible[rank], "may_share_gpus": False, "no_shared_memory": ""}
        answers.abilities = able
        try:
            return formation.plan(dist.PrefixStore(str(backend), store), rank, [0, 1], backend, 20.0).choices[0][0]
        except errors.TransportUnavailableError as error:
            return error.problem

    alone = visible == ("0", "1")
    found = in_threads(2, lambda rank: choice(rank, None))
    assert found == ["cpu:gloo,cuda:nccl" if alone else "gloo"] * 2
    for said in in_threads(2, lambda rank: choice(rank, "nccl")):
        assert ("ranks 0, 1 of a host are more than its GPUs (1)" in said) is not alone
