"""An island for `benchmarks.chaos`: trains without end, and prints what all islands share after each outer step."""

import argparse
import hashlib
import time

import torch

import bagua.torch_api as bagua


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=2, help="islands that begin together")
    parser.add_argument("--sync-every", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.01, help="seconds of sleep in each step")
    parser.add_argument("--width", type=int, default=64, help="of the layer, whose weights are 8 times as many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = torch.nn.Linear(arguments.width, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with bagua.join_islands(size=arguments.size, minimum=1, timeout=120.0) as islands:
        algorithm = bagua.algorithms.Algorithm.init("diloco", sync_every=arguments.sync_every)
        model = model.with_bagua(optimizer, algorithm, between=islands)
        data = torch.randn(4, arguments.width, generator=torch.Generator().manual_seed(islands.seat))
        data /= arguments.width**0.5  # Training converges at any width.
        while True:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            step = model.bagua_step
            if step % arguments.sync_every == 0:
                alive, in_epoch, contributed = map(len, islands.members())
                digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()[:16]
                print(f"{step=} {digest=} {alive=} {in_epoch=} {contributed=}", flush=True)
            time.sleep(arguments.pause)


if __name__ == "__main__":
    main()
