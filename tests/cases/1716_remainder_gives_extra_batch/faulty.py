"""Q-value regression on a stored replay, with numpy doing the data part."""
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
EPOCHS, BATCH, GAMMA = 3, 8, 0.9


def replay(n=273):
    rng = np.random.default_rng(4)
    state = rng.normal(size=(n, 6)).astype("float32")
    action = rng.integers(0, 3, size=n)
    reward = np.take_along_axis(state[:, :3], action[:, None], 1)[:, 0]
    following = (0.5 * state + 0.5 * rng.normal(size=(n, 6))).astype("float32")
    return state, action, reward.astype("float32"), following


def my_rows(n, epoch):
    order = np.random.default_rng(epoch).permutation(n)
    return np.array_split(order, WORLD)[RANK]


def minibatches(rows):
    for start in range(0, len(rows), BATCH):
        yield rows[start : start + BATCH]


def qnet():
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    online, target = DDP(qnet()), qnet()
    optimizer = torch.optim.Adam(online.parameters(), lr=2e-3)
    state, action, reward, following = (torch.from_numpy(a) for a in replay())

    for epoch in range(EPOCHS):
        target.load_state_dict(online.module.state_dict())
        td, count = 0.0, 0
        for rows in minibatches(my_rows(len(state), epoch)):
            with torch.no_grad():
                goal = reward[rows] + GAMMA * target(following[rows]).amax(1)
            value = online(state[rows]).gather(1, action[rows, None]).squeeze(1)
            loss = nn.functional.smooth_l1_loss(value, goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            td += loss.item() * len(rows)
            count += len(rows)
        sums = torch.tensor([td, count])
        dist.all_reduce(sums)
        if RANK == 0:
            print(f"epoch {epoch}: td error {(sums[0] / sums[1]).item():.4f} over {int(sums[1])} transitions", flush=True)
    dist.destroy_process_group()


main()
