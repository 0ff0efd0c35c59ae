"""Q-learning with spawned workers on one shared network, a shared Adam and a shared step counter."""
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

CELLS, ACTIONS, GAMMA = 12, 2, 0.9


class SharedAdam(torch.optim.Adam):
    """Adam whose moments exist from the start and lie in shared memory."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr, foreach=False)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "step": torch.zeros(()).share_memory_(),
                    "exp_avg": torch.zeros_like(p.data).share_memory_(),
                    "exp_avg_sq": torch.zeros_like(p.data).share_memory_(),
                }


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(CELLS, 64), nn.ReLU(), nn.Linear(64, ACTIONS))

    def forward(self, cell):
        return self.net(F.one_hot(cell, CELLS).float())


def walk(cell, action, gen):
    """Right end pays 1, left end 0.2; one move in ten slips."""
    slip = torch.rand(cell.shape, generator=gen) < 0.1
    move = torch.where(slip, 1 - action, action) * 2 - 1
    after = (cell + move).clamp(0, CELLS - 1)
    reward = (after == CELLS - 1).float() + 0.2 * (after == 0).float()
    return after, reward, reward > 0


def worker(number, net, target, optimizer, counter, limit, lines):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(500 + number)
    cell = torch.randint(1, CELLS - 1, (32,), generator=gen)
    recent = 0.0
    while True:
        with counter.get_lock():
            if counter.value >= limit:
                break
            counter.value += 1
            step = counter.value
        with torch.no_grad():
            greedy = net(cell).argmax(1)
        explore = torch.rand(32, generator=gen) < max(0.1, 1 - step / limit)
        action = torch.where(explore, torch.randint(ACTIONS, (32,), generator=gen), greedy)
        after, reward, done = walk(cell, action, gen)
        with torch.no_grad():
            goal = reward + GAMMA * (~done) * target(after).max(1).values
        loss = F.smooth_l1_loss(net(cell).gather(1, action[:, None]).squeeze(1), goal)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        cell = torch.where(done, torch.randint(1, CELLS - 1, (32,), generator=gen), after)
        recent = 0.95 * recent + 0.05 * reward.mean().item()
        if step % 50 == 0:
            target.load_state_dict(net.state_dict())
        if step % 300 == 0:
            lines.put(f"step {step} (worker {number}): loss {loss.item():.4f} reward a move {recent:.3f}")
    lines.put(None)


def main(workers=2, limit=1200):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net, target = QNet(), QNet()
    target.load_state_dict(net.state_dict())
    target.requires_grad_(False)
    net.share_memory(), target.share_memory()
    optimizer = SharedAdam(net.parameters(), lr=2e-3)
    start = [p.detach().clone() for p in net.parameters()]

    context = mp.get_context("spawn")
    counter, lines = context.Value("l", 0), context.Queue()
    processes = [
        context.Process(target=worker, args=(n, net, target, optimizer, counter, limit, lines)) for n in range(workers)
    ]
    for process in processes:
        process.start()
    open_ends = workers
    while open_ends:
        line = lines.get()
        if line is None:
            open_ends -= 1
        else:
            print(line, flush=True)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert all(not torch.equal(a, b) for a, b in zip(start, net.parameters()))
    with torch.no_grad():
        print("values", [round(v, 2) for v in net(torch.arange(1, CELLS - 1)).max(1).values.tolist()])
    torch.save(net.state_dict(), "q.pt")


if __name__ == "__main__":
    main()
