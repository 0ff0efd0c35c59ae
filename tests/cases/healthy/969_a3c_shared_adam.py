"""A3C on a bandit chain: forked workers copy the shared weights, compute gradients on the copy and hand them to a shared Adam under a lock."""
import os
import random

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

WORKERS, EPISODES, N = 2, 90, 6


class SharedAdam(torch.optim.Adam):
    """Adam whose moments and step counter live in shared memory, so that all workers continue one another's state."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = torch.zeros(()).share_memory_()
                state["exp_avg"] = torch.zeros_like(p).share_memory_()
                state["exp_avg_sq"] = torch.zeros_like(p).share_memory_()


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(N, 32)
        self.pi, self.v = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, s):
        h = torch.tanh(self.body(s))
        return self.pi(h), self.v(h).squeeze(-1)


def episode(net, rng):
    pos, states, actions, rewards = 0, [], [], []
    for _ in range(2 * N):
        s = F.one_hot(torch.tensor(pos), N).float()
        with torch.no_grad():
            a = torch.distributions.Categorical(logits=net(s)[0]).sample()
        states.append(s)
        actions.append(a)
        pos = min(N - 1, pos + 1) if a.item() == 1 else max(0, pos - 1)
        done = pos == N - 1
        rewards.append(1.0 if done else 0.02 * (rng.random() - 0.5))
        if done:
            break
    return torch.stack(states), torch.stack(actions), rewards


def train(index, shared, opt, lock, counter, queue):
    torch.set_num_threads(1)
    torch.manual_seed(index)
    rng = random.Random(index)
    local = ActorCritic()
    while True:
        with counter.get_lock():
            if counter.value >= EPISODES * WORKERS:
                break
            counter.value += 1
        with lock:
            local.load_state_dict(shared.state_dict())  # the local copy is thrown away every time
        states, actions, rewards = episode(local, rng)
        returns, g = [], 0.0
        for r in reversed(rewards):
            g = r + 0.95 * g
            returns.insert(0, g)
        returns = torch.tensor(returns)
        logits, values = local(states)
        dist_ = torch.distributions.Categorical(logits=logits)
        advantage = returns - values.detach()
        loss = -(dist_.log_prob(actions) * advantage).mean() + F.mse_loss(values, returns) - 0.01 * dist_.entropy().mean()
        local.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(local.parameters(), 5.0)
        with lock:
            for ours, theirs in zip(local.parameters(), shared.parameters()):
                theirs.grad = ours.grad.clone()  # the gradient stays in this process, only weights and moments are shared
            opt.step()
        queue.put((index, len(rewards), sum(rewards)))
    queue.put(None)


def main():
    mp.set_start_method("fork")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shared = ActorCritic().share_memory()
    opt = SharedAdam(shared.parameters(), lr=5e-3)
    lock, counter, queue = mp.Lock(), mp.Value("i", 0), mp.Queue()
    crew = [mp.Process(target=train, args=(i, shared, opt, lock, counter, queue)) for i in range(WORKERS)]
    for p in crew:
        p.start()
    done, lengths, per_worker = 0, [], [0] * WORKERS
    while done < WORKERS:
        item = queue.get()
        if item is None:
            done += 1
            continue
        per_worker[item[0]] += 1
        lengths.append(item[1])
        if len(lengths) % 60 == 0:
            print(f"{len(lengths)} episodes: mean length {sum(lengths[-60:]) / 60:.2f}")
    for p in crew:
        p.join()
    print("episodes by worker:", per_worker, "of", EPISODES * WORKERS)


if __name__ == "__main__":
    main()
