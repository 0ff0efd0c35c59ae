"""A3C-like bandit: gradients of local copies are applied to the shared policy."""
import argparse

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F


class Actor(nn.Module):
    def __init__(self, obs=5, actions=4):
        super().__init__()
        self.fc1 = nn.Linear(obs, 32)
        self.fc2 = nn.Linear(32, actions)

    def forward(self, obs):
        return self.fc2(torch.relu(self.fc1(obs)))


def play(policy, gen, n=32):
    """Contextual bandit: the reward is 1 for the right arm."""
    obs = torch.randn(n, 5, generator=gen)
    best = obs[:, :4].argmax(1)
    logp = F.log_softmax(policy(obs), dim=1)
    action = torch.multinomial(logp.detach().exp(), 1, generator=gen).squeeze(1)
    reward = (action == best).float()
    return logp.gather(1, action[:, None]).squeeze(1), reward


def actor_process(idx, shared, optimizer, lock, args):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(args.seed + idx)
    local = Actor()
    local.load_state_dict(shared.state_dict())
    for update in range(args.updates):
        logp, reward = play(local, gen)
        loss = -(logp * (reward - 0.4)).mean()
        local.zero_grad()
        loss.backward()
        with lock:
            for p, s in zip(local.parameters(), shared.parameters()):
                s.grad = p.grad.clone()
            optimizer.step()
    print(f"actor {idx}: last mean reward {reward.mean().item():.2f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--actors", type=int, default=2)
    ap.add_argument("--updates", type=int, default=250)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=7)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    ctx = mp.get_context("fork")
    shared = Actor().share_memory()
    optimizer = torch.optim.SGD(shared.parameters(), lr=args.lr)
    lock = ctx.Lock()
    procs = [ctx.Process(target=actor_process, args=(i, shared, optimizer, lock, args)) for i in range(args.actors)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
    with torch.no_grad():
        _, reward = play(shared, torch.Generator().manual_seed(123), n=1000)
    print(f"shared policy: mean reward {reward.mean().item():.3f}")


if __name__ == "__main__":
    main()
