"""Whole programs that meet where torch would."""

import pytest

from tests.launching import ends, launched

#: The store is there already.
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


WHOLE_PROGRAM = """
    import sys
    import torch
    import bagua.distributed as dist

    rank, meeting = int(sys.argv[1].split()[0]), sys.argv[1].split()[1]
    dist.init_process_group("gloo", init_method=None if meeting == "env" else meeting,
                            **({} if meeting == "env" else {"rank": rank, "world_size": 2}))
    tensor = torch.ones(2) * dist.get_rank()
    dist.all_reduce(tensor)
    pair = dist.new_group([1])
    dist.all_reduce(tensor, group=pair)
    print(dist.get_backend(), dist.get_rank(pair), tensor.tolist(), dist.get_node_local_rank())
    dist.barrier()
    dist.destroy_process_group()
    assert not dist.is_initialized()
"""


@pytest.mark.gloo
@pytest.mark.parametrize("meeting", ["env", "file", "tcp"])
def test_a_whole_program_meets_where_torch_would(meeting, tmp_path, port):
    place = {"env": "env", "file": f"file://{tmp_path}/meeting", "tcp": f"tcp://127.0.0.1:{port}"}[meeting]
    text = "\n".join(line[4:] for line in WHOLE_PROGRAM.splitlines())
    with launched(2, "-c", text, each=[f"{rank} {place}" for rank in range(2)], port=port, **AGENT) as ranks:
        assert ends(ranks) == [(0, "gloo -1 [1.0, 1.0] 0\n"), (0, "gloo 0 [1.0, 1.0] 1\n")]
