"""A helper process draws pictures and hands them over in blocks of shared memory."""
import argparse
import multiprocessing as mp
import os
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SHAPE = (32, 1, 48, 48)


def draw(rank, batches, queue):
    rng = np.random.default_rng(900 + rank)
    axis = np.arange(SHAPE[2], dtype=np.float32)
    for _ in range(batches):
        label = rng.integers(0, 3, SHAPE[0])
        block = SharedMemory(create=True, size=4 * int(np.prod(SHAPE)))
        pictures = np.ndarray(SHAPE, dtype=np.float32, buffer=block.buf)
        radius = 6 + 6 * label.reshape(-1, 1, 1)
        center = rng.uniform(20, 28, (SHAPE[0], 1, 1))
        inside = (axis[:, None] - center) ** 2 + (axis[None, :] - center) ** 2 < radius**2
        pictures[:, 0] = inside + rng.normal(0, 0.5, inside.shape)
        del pictures
        queue.put((block.name, label))
        block.close()
    queue.put(None)


def batches_of(queue):
    while True:
        item = queue.get()
        if item is None:
            return
        name, label = item
        block = SharedMemory(name=name)
        x = torch.from_numpy(np.ndarray(SHAPE, dtype=np.float32, buffer=block.buf).copy())
        block.close()
        yield x, torch.from_numpy(label)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batches", type=int, default=80)
    args = ap.parse_args()
    rank = int(os.environ["RANK"])
    resource_tracker.ensure_running()
    ctx = mp.get_context("fork")
    queue = ctx.Queue(maxsize=4)
    helper = ctx.Process(target=draw, args=(rank, args.batches, queue), daemon=True)
    helper.start()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 3),
    )
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step, (x, label) in enumerate(batches_of(queue)):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, label)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 20 == 0:
            acc = (logits.argmax(1) == label).float().mean().item()
            print(f"step {step}: loss {loss.item():.3f} acc {acc:.2f}", flush=True)
    helper.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
