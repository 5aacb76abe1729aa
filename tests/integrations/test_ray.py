"""Ray Train with workers that bagua connects, on a local Ray."""

from __future__ import annotations

import sys

import pytest

from bagua.integrations.ray import torch_config


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train.torch", None)
    with pytest.raises(ImportError, match=r"bagua\[ray\]"):
        torch_config()


@pytest.mark.slow
@pytest.mark.timeout(110)
@pytest.mark.filterwarnings("ignore")
def test_workers_train_together(tmp_path):
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    train = pytest.importorskip("ray.train", reason="needs the extra ray")
    from ray.train.torch import TorchTrainer

    def on_each_worker() -> None:
        import torch

        import bagua.torch_api as bagua

        layer = torch.nn.Linear(1, 1, bias=False)
        model = layer.with_bagua([torch.optim.SGD(layer.parameters(), lr=0.1)], "gradient_allreduce")
        model(torch.full((1, 1), float(bagua.get_rank()))).sum().backward()
        # Newer versions of Ray Train keep metrics only together with a checkpoint.
        (tmp_path / f"{bagua.get_rank()}.txt").write_text(f"{layer.weight.grad.item()} {bagua.get_world_size()}")

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        TorchTrainer(
            on_each_worker,
            torch_config=torch_config(timeout_s=60),
            scaling_config=train.ScalingConfig(num_workers=2),
            run_config=train.RunConfig(storage_path=str(tmp_path)),
        ).fit()
    finally:
        ray.shutdown()
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["0.5 2", "0.5 2"]
