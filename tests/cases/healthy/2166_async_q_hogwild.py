"""Asynchronous one-step Q-learning (Mnih et al. 2016) on a grid world: shared parameters, no locks around the update."""
import random
import time

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

SIZE, GAMMA, WORKERS, TOTAL_FRAMES = 5, 0.95, 2, 9000
MOVES = [(0, 1), (1, 0), (0, -1), (-1, 0)]


class Maze:
    def __init__(self, rng):
        self.rng = rng

    def reset(self):
        self.pos, self.t = (self.rng.randrange(SIZE), self.rng.randrange(SIZE)), 0
        if self.pos == (SIZE - 1, SIZE - 1):
            self.pos = (0, 0)
        return self.observe()

    def observe(self):
        o = torch.zeros(2 * SIZE)
        o[self.pos[0]] = 1
        o[SIZE + self.pos[1]] = 1
        return o

    def step(self, a):
        self.t += 1
        r, c = self.pos[0] + MOVES[a][0], self.pos[1] + MOVES[a][1]
        self.pos = (min(max(r, 0), SIZE - 1), min(max(c, 0), SIZE - 1))
        goal = self.pos == (SIZE - 1, SIZE - 1)
        return self.observe(), 1.0 if goal else -0.02, goal, goal or self.t >= 40


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * SIZE, 48), nn.ReLU(), nn.Linear(48, 4))

    def forward(self, x):
        return self.net(x)


class SharedRMSprop(torch.optim.Optimizer):
    """RMSprop whose second moments live in shared memory, so that all workers normalise alike."""

    def __init__(self, params, squares, lr=2e-3, alpha=0.99, eps=1e-3):
        super().__init__(params, dict(lr=lr, alpha=alpha, eps=eps))
        for p, s in zip(self.param_groups[0]["params"], squares):
            self.state[p]["square_avg"] = s

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]["square_avg"]
                s.mul_(group["alpha"]).addcmul_(p.grad, p.grad, value=1 - group["alpha"])
                p.addcdiv_(p.grad, s.sqrt().add_(group["eps"]), value=-group["lr"])


def worker(index, shared, target, squares, frames, log):
    torch.set_num_threads(1)
    rng = random.Random(1000 + index)
    torch.manual_seed(1000 + index)
    env, local = Maze(rng), QNet()
    optimizer = SharedRMSprop(shared.parameters(), squares)
    floor = [0.5, 0.1][index % 2]              # each actor explores at its own rate
    obs, batch = env.reset(), []
    while True:
        with frames.get_lock():
            frames.value += 1
            now = frames.value
            if now % 600 == 0:                 # exactly one worker crosses each mark
                target.load_state_dict(shared.state_dict())
        if now > TOTAL_FRAMES:
            break
        epsilon = max(floor, 1 - now / 3000)
        if rng.random() < epsilon:
            action = rng.randrange(4)
        else:
            with torch.no_grad():
                action = int(shared(obs).argmax())
        nxt, reward, terminal, over = env.step(action)
        batch.append((obs, action, reward, nxt, float(terminal)))
        obs = env.reset() if over else nxt
        if len(batch) == 8:
            o, a, r, n, d = zip(*batch)
            batch = []
            local.load_state_dict(shared.state_dict())
            with torch.no_grad():
                goal = torch.tensor(r) + GAMMA * (1 - torch.tensor(d)) * target(torch.stack(n)).max(1).values
            q = local(torch.stack(o)).gather(1, torch.tensor(a)[:, None]).squeeze(1)
            loss = F.smooth_l1_loss(q, goal)
            local.zero_grad()
            loss.backward()
            for sp, lp in zip(shared.parameters(), local.parameters()):
                sp.grad = lp.grad
            optimizer.step()
            if now % 1000 < 10:
                log.put((now, index, loss.item()))
    log.put(None)


@torch.no_grad()
def success_rate(net, episodes=40):
    env, wins, steps = Maze(random.Random(5)), 0, 0
    for _ in range(episodes):
        obs, over = env.reset(), False
        while not over:
            obs, _, goal, over = env.step(int(net(obs).argmax()))
        wins, steps = wins + goal, steps + env.t
    return wins / episodes, steps / episodes


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ctx = mp.get_context("spawn")
    shared, target = QNet().share_memory(), QNet().share_memory()
    target.load_state_dict(shared.state_dict())
    squares = [torch.zeros_like(p).detach().share_memory_() for p in shared.parameters()]
    frames, log = ctx.Value("l", 0), ctx.Queue()
    print("before", success_rate(shared))
    t0 = time.time()
    procs = [ctx.Process(target=worker, args=(i, shared, target, squares, frames, log)) for i in range(WORKERS)]
    for p in procs:
        p.start()
    open_workers = WORKERS
    while open_workers:
        item = log.get()
        if item is None:
            open_workers -= 1
        else:
            print("frame {} worker {} td-loss {:.4f}".format(*item), flush=True)
    for p in procs:
        p.join()
        assert p.exitcode == 0
    print("after", success_rate(shared), f"{time.time() - t0:.1f}s")
    torch.save(shared.state_dict(), "qnet.pt")


if __name__ == "__main__":
    main()
