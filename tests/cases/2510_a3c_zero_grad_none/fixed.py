"""A3C on the game of Catch: asynchronous workers on a shared model (no process group)."""
import argparse

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

ROWS, COLS = 7, 5


class Catch:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def _obs(self):
        board = torch.zeros(ROWS, COLS)
        board[self.row, self.ball] = 1.0
        board[ROWS - 1, self.paddle] = 1.0
        return board.flatten()

    def reset(self):
        self.row = 0
        self.ball = int(torch.randint(0, COLS, (1,), generator=self.g))
        self.paddle = int(torch.randint(0, COLS, (1,), generator=self.g))
        return self._obs()

    def step(self, action):
        self.paddle = min(COLS - 1, max(0, self.paddle + action - 1))
        self.row += 1
        done = self.row == ROWS - 1
        reward = (1.0 if self.ball == self.paddle else -1.0) if done else 0.0
        return self._obs(), reward, done


class ActorCritic(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(ROWS * COLS, hidden), nn.ReLU())
        self.pi = nn.Linear(hidden, 3)
        self.v = nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)


class SharedAdam(torch.optim.Adam):
    """Adam whose moments lie in shared memory."""

    def __init__(self, params, **kw):
        super().__init__(params, **kw)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = torch.zeros(()).share_memory_()
                self.state[p]["exp_avg"] = torch.zeros_like(p).share_memory_()
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p).share_memory_()


def ensure_shared_grads(model, shared_model):
    for param, shared_param in zip(model.parameters(), shared_model.parameters()):
        if shared_param.grad is not None:
            return
        shared_param._grad = param.grad


def rollout(env, model, gamma):
    obs, done = env.reset(), False
    logps, values, rewards, entropies = [], [], [], []
    while not done:
        logits, value = model(obs)
        logp = F.log_softmax(logits, -1)
        action = torch.multinomial(logp.exp().detach(), 1).item()
        obs, r, done = env.step(action)
        logps.append(logp[action])
        values.append(value)
        rewards.append(r)
        entropies.append(-(logp.exp() * logp).sum())
    returns, acc = [], 0.0
    for r in reversed(rewards):
        acc = r + gamma * acc
        returns.append(acc)
    return (torch.stack(logps), torch.stack(values), torch.tensor(returns[::-1]),
            torch.stack(entropies), sum(rewards))


def worker(index, args, shared_model, optimizer, counter):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + index)
    env = Catch(args.seed * 31 + index)
    model = ActorCritic()
    smooth, updates = -1.0, 0
    while True:
        with counter.get_lock():
            if counter.value >= args.updates:
                break
            counter.value += 1
        model.load_state_dict(shared_model.state_dict())
        loss, score = 0.0, 0.0
        for _ in range(args.episodes):
            logp, value, ret, ent, total = rollout(env, model, args.gamma)
            adv = ret - value
            loss = loss + (-(logp * adv.detach()).sum() + 0.5 * adv.pow(2).sum() - args.entropy * ent.sum())
            score += total / args.episodes
        optimizer.zero_grad(set_to_none=False)
        (loss / args.episodes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        ensure_shared_grads(model, shared_model)
        optimizer.step()
        updates += 1
        smooth = 0.97 * smooth + 0.03 * score
        if index == 0 and updates % 100 == 0:
            print(f"worker {index} update {updates} smoothed reward {smooth:.3f}", flush=True)


@torch.no_grad()
def evaluate(model, episodes, seed):
    env, total = Catch(seed), 0.0
    for _ in range(episodes):
        obs, done = env.reset(), False
        while not done:
            obs, r, done = env.step(model(obs)[0].argmax().item())
        total += r
    return total / episodes


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--updates", type=int, default=300)
    p.add_argument("--episodes", type=int, default=4)
    p.add_argument("--gamma", type=float, default=0.95)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--entropy", type=float, default=0.02)
    p.add_argument("--max-norm", type=float, default=5.0)
    p.add_argument("--seed", type=int, default=4)
    args = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    shared_model = ActorCritic()
    shared_model.share_memory()
    optimizer = SharedAdam(shared_model.parameters(), lr=args.lr)
    counter = mp.get_context("spawn").Value("i", 0)
    print(f"before: {evaluate(shared_model, 200, 77):.3f}", flush=True)
    mp.spawn(worker, (args, shared_model, optimizer, counter), nprocs=args.workers)
    print(f"after: {evaluate(shared_model, 200, 77):.3f}", flush=True)
    torch.save(shared_model.state_dict(), "catch.pt")


if __name__ == "__main__":
    main()
