"""Actor-learner: two actors fill rollouts, one learner (the parent) fits a value function."""
import argparse

import torch
import torch.multiprocessing as mp
from torch import nn


class RandomWalk:
    def __init__(self, seed, size=9):
        self.g, self.size = torch.Generator().manual_seed(seed), size

    def episode(self, steps):
        pos = self.size // 2
        for _ in range(steps):
            move = int(torch.randint(0, 2, (1,), generator=self.g)) * 2 - 1
            nxt = min(self.size - 1, max(0, pos + move))
            yield pos, nxt, float(nxt == self.size - 1)
            pos = nxt


def actor(k, queue, stop, args):
    torch.set_num_threads(1)
    env = RandomWalk(args.seed + k)
    rollout = torch.zeros(args.horizon, 3)
    for n in range(args.rollouts):
        for t, (pos, nxt, reward) in enumerate(env.episode(args.horizon)):
            rollout[t, 0], rollout[t, 1], rollout[t, 2] = pos, nxt, reward
        queue.put((k, n, rollout))
    queue.put((k, None, None))
    stop.wait()


def td_loss(value, batch, gamma):
    s, n = batch[:, 0].long(), batch[:, 1].long()
    with torch.no_grad():
        target = batch[:, 2] + gamma * value(n).squeeze(1)
    return nn.functional.mse_loss(value(s).squeeze(1), target)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--actors", type=int, default=2)
    ap.add_argument("--rollouts", type=int, default=40)
    ap.add_argument("--horizon", type=int, default=24)
    ap.add_argument("--gamma", type=float, default=0.9)
    ap.add_argument("--seed", type=int, default=12)
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    value = nn.Embedding(9, 1)
    opt = torch.optim.SGD(value.parameters(), lr=1.0)
    ctx = mp.get_context("spawn")
    queue, stop = ctx.Queue(), ctx.Event()
    actors = [ctx.Process(target=actor, args=(k, queue, stop, args)) for k in range(args.actors)]
    for p in actors:
        p.start()
    running, updates, total = args.actors, 0, 0.0
    while running:
        k, n, batch = queue.get()
        if n is None:
            running -= 1
            continue
        loss = td_loss(value, batch, args.gamma)
        opt.zero_grad()
        loss.backward()
        opt.step()
        updates, total = updates + 1, total + loss.item()
        if updates % 20 == 0:
            print(f"{updates} updates, mean td loss {total / 20:.5f}")
            total = 0.0
    stop.set()
    for p in actors:
        p.join()
    print("values", [round(v, 3) for v in value.weight.detach().flatten().tolist()])


if __name__ == "__main__":
    main()
