"""REINFORCE on a contextual bandit; several actors in parallel, gradients averaged parameter by parameter."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical

CONTEXT, ARMS = 8, 5


class Bandit:
    """Reward is 1 for the arm whose weight vector fits the context best, else a small random amount."""

    def __init__(self, seed):
        self.arms = torch.randn(ARMS, CONTEXT, generator=torch.Generator().manual_seed(0))
        self.gen = torch.Generator().manual_seed(seed)

    def contexts(self, n):
        return torch.randn(n, CONTEXT, generator=self.gen)

    def reward(self, ctx, arm):
        best = (ctx @ self.arms.t()).argmax(1)
        return (arm == best).float() + 0.2 * torch.rand(len(arm), generator=self.gen)


class Agent:
    def __init__(self, lr, max_norm):
        self.world = dist.get_world_size()
        self.policy = nn.Sequential(nn.Linear(CONTEXT, 32), nn.Tanh(), nn.Linear(32, ARMS))
        for p in self.policy.parameters():
            dist.broadcast(p.data, 0)
        self.opt = torch.optim.RMSprop(self.policy.parameters(), lr=lr)
        self.baseline = 0.0
        self.max_norm = max_norm

    def play(self, env, n):
        ctx = env.contexts(n)
        dist_ = Categorical(logits=self.policy(ctx))
        arm = dist_.sample()
        return dist_.log_prob(arm), dist_.entropy(), env.reward(ctx, arm)

    def average_gradients(self):
        for p in self.policy.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(self.world)

    def learn(self, log_prob, entropy, reward):
        loss = -(log_prob * (reward - self.baseline)).mean() - 0.01 * entropy.mean()
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_norm)
        self.average_gradients()
        self.opt.step()
        mean = reward.mean()
        dist.all_reduce(mean)
        mean = mean.item() / self.world
        self.baseline = 0.9 * self.baseline + 0.1 * mean
        return mean


def main(iterations=200, batch=32):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1000 + rank)  # actions and contexts are the actor's own; weights come from rank 0
    agent = Agent(lr=5e-3, max_norm=0.1)
    env = Bandit(seed=77 + rank)
    window = []
    for it in range(1, iterations + 1):
        window.append(agent.learn(*agent.play(env, batch)))
        if it % 40 == 0:
            if rank == 0:
                print(f"iteration {it}: mean reward {sum(window) / len(window):.3f}")
            window.clear()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
