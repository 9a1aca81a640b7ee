"""Train a model that Meshwright splits. Start it with torchrun, one process per device:

    torchrun --nproc-per-node 4 examples/train.py                    plan here, then train
    torchrun --nproc-per-node 4 examples/train.py --plan plan.json   train by a plan made elsewhere

Put your model in the place of `build` and your data in the place of `batch`; the rest stays.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import meshwright as mw
from meshwright.specs import load_spec


def build() -> tuple[nn.Module, tuple, dict]:
    """The model with its weights, and inputs of the whole (global) batch: the same on every rank."""
    return load_spec("llama-tiny").build()


def batch(step: int) -> tuple[torch.Tensor, ...]:
    """The whole batch of a step, the same on every rank; each rank takes its own piece of it."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(256, (8, 33), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def main() -> None:
    """Plan or load a plan, apply it, train, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", help="a plan file; without it the model is planned for the running ranks")
    parser.add_argument("--mesh", help="e.g. 2x2; without it and without --plan: one axis")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--checkpoint", help="a folder to save to at the end")
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    whole, args, kwargs = build()
    plan = None if options.plan is None else mw.Plan.load(options.plan)
    model: Any = mw.autoparallelize(whole, args, kwargs, plan=plan, mesh=options.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after autoparallelize: its parameters are DTensors

    for step in range(options.steps):
        loss = model.step(*batch(step))  # forward and backward; by micro-batches where the plan has a pipeline
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}  gradient norm {norm.item():.4f}", flush=True)

    if options.checkpoint is not None:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)  # ranks of a pipeline hold parameters of their own
        weights, moments = get_state_dict(model, optimizer, options=flat)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=options.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
