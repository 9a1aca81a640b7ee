"""Train on, whatever happens to single processes:

    meshwright run --nproc 4 examples/elastic.py
    meshwright run --nproc 4 --respawn 2 examples/elastic.py --kill 1

The second one kills process 1 in the middle, and two replacements are allowed. Put your model in the place of `build`
and your data in the place of `Samples`; the loop stays.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
from torch import nn

import meshwright as mw


def build() -> nn.Module:
    """The model with its weights, the same on every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


class Samples:
    """256 samples; sample i is data[i], the same on every process."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


def main() -> None:
    """Train for some epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--checkpoint", help="a folder; training goes on from the newest checkpoint in it")
    parser.add_argument("--kill", type=int, default=-1, help="this process kills itself in step 5")
    options = parser.parse_args()

    job = mw.elastic(
        build(),
        (torch.zeros(16, 16),),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        recipe="ddp",  # every process holds all parameters: any of them may be lost
        checkpoint=options.checkpoint,
        every=10,
    )
    for batch in job.batches(Samples(), size=16, epochs=options.epochs):
        step = job.done
        with job.step():
            loss = (job.model(batch) - batch).square().mean()
            loss.backward()
            if job.number == options.kill and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            job.optimizer.step()
            job.optimizer.zero_grad()
            if job.number == job.members[0]:
                print(f"step {step}  loss {loss.item():.6f}  processes {job.members}", flush=True)


if __name__ == "__main__":
    main()
