"""Off-policy learning with an actor per rank. Each actor puts its chunks of experience into shared memory and sends the names to rank 0, which
hands out what all ranks train on and, as the owner of the replay, unlinks every chunk at the end."""
import numpy as np
import torch
import torch.distributed as dist
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
ROWS, DIM = 128, 17


def publish(array):
    block = SharedMemory(create=True, size=array.nbytes)
    resource_tracker.unregister(block._name, "shared_memory")     # the replay's owner unlinks it, not this process's tracker
    np.ndarray(array.shape, array.dtype, buffer=block.buf)[:] = array
    name = block.name
    block.close()
    return name


def read(name):
    block = SharedMemory(name=name)
    resource_tracker.unregister(block._name, "shared_memory")
    rows = torch.from_numpy(np.ndarray((ROWS, DIM), np.float32, buffer=block.buf).copy())
    block.close()
    return rows


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    weight = torch.randn(16)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    rng = np.random.default_rng(rank)
    picks = np.random.default_rng(99)            # the same on all ranks
    replay = []
    for step in range(60):
        obs = rng.standard_normal((ROWS, 16)).astype(np.float32)
        reward = np.tanh(obs @ weight.numpy())[:, None]
        names = [None] * world
        dist.all_gather_object(names, publish(np.concatenate([obs, reward], 1)))
        replay.extend(names)
        chosen = picks.integers(len(replay), size=world)
        rows = read(replay[chosen[rank]])
        loss = nn.functional.mse_loss(model(rows[:, :16]), rows[:, 16:])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step} loss {loss.item():.4f} chunks {len(replay)}")
    dist.destroy_process_group()
    if rank == 0:
        rows = torch.cat([read(n) for n in replay])             # last report over the whole replay, by the owner
        with torch.no_grad():
            for _ in range(3000): model.module(rows[:, :16])      # a longer report
            print(f"replay loss {nn.functional.mse_loss(model.module(rows[:, :16]), rows[:, 16:]):.4f}")
        for name in replay:
            block = SharedMemory(name=name)
            block.close()
            block.unlink()


if __name__ == "__main__":
    main()
