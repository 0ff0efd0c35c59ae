"""Actors play a little navigation game with the shared policy and send rollouts to a learner."""
import argparse

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributions import Categorical

MOVES = torch.tensor([[0.0, 0.2], [0.0, -0.2], [0.2, 0.0], [-0.2, 0.0]])


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 48), nn.Tanh())
        self.pi, self.v = nn.Linear(48, 4), nn.Linear(48, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h).squeeze(-1)


class Field:
    """N players at once walk towards their goals."""

    def __init__(self, n, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.n = n
        self.reset()

    def reset(self):
        self.pos = 2 * torch.rand(self.n, 2, generator=self.gen) - 1
        self.goal = 2 * torch.rand(self.n, 2, generator=self.gen) - 1

    def observe(self):
        return torch.cat([self.pos, self.goal], dim=1)

    def step(self, action):
        before = (self.pos - self.goal).norm(dim=1)
        self.pos = self.pos + MOVES[action]
        return 5 * (before - (self.pos - self.goal).norm(dim=1))


def actor(number, policy, rollouts, finished, args):
    torch.set_num_threads(1)
    torch.manual_seed(50 + number)
    field = Field(args.players, seed=70 + number)
    obs = torch.zeros(args.length, args.players, 4)
    actions = torch.zeros(args.length, args.players, dtype=torch.long)
    rewards = torch.zeros(args.length, args.players)
    for _ in range(args.updates // args.actors):
        field.reset()
        for t in range(args.length):
            obs[t] = field.observe()
            with torch.no_grad():
                actions[t] = Categorical(logits=policy(obs[t])[0]).sample()
            rewards[t] = field.step(actions[t])
        rollouts.put((obs.clone(), actions.clone(), rewards.clone()))
    finished.wait()


def returns(rewards, gamma):
    out, run = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        run = rewards[t] + gamma * run
        out[t] = run
    return out


def learn(policy, rollouts, args):
    opt = torch.optim.Adam(policy.parameters(), lr=args.lr)
    history = []
    for update in range(1, args.updates + 1):
        obs, actions, rewards = rollouts.get()
        target = returns(rewards, args.gamma)
        logits, value = policy(obs)
        pi = Categorical(logits=logits)
        advantage = (target - value).detach()
        loss = -(pi.log_prob(actions) * advantage).mean() + 0.5 * (target - value).square().mean()
        loss = loss - 0.01 * pi.entropy().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
        history.append(rewards.sum(0).mean().item())
        if update % 40 == 0:
            print(f"update {update}: return {sum(history[-40:]) / 40:.3f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--actors", type=int, default=2)
    ap.add_argument("--players", type=int, default=64)
    ap.add_argument("--length", type=int, default=8)
    ap.add_argument("--updates", type=int, default=320)
    ap.add_argument("--gamma", type=float, default=0.9)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ctx = mp.get_context("spawn")
    policy = ActorCritic().share_memory()
    rollouts, finished = ctx.Queue(maxsize=4), ctx.Event()
    crew = [ctx.Process(target=actor, args=(n, policy, rollouts, finished, args)) for n in range(args.actors)]
    for p in crew:
        p.start()
    learn(policy, rollouts, args)
    finished.set()
    for p in crew:
        p.join()
    torch.save(policy.state_dict(), "policy.pt")


if __name__ == "__main__":
    main()
