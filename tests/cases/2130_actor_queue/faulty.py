"""Actors collect rollouts, one learner updates a shared policy (a small IMPALA-like setup)."""
import argparse
import time

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributions import Categorical

OBS, ACTIONS, UNROLL = 8, 4, 48


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBS, 48), nn.Tanh())
        self.pi = nn.Linear(48, ACTIONS)
        self.v = nn.Linear(48, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h).squeeze(-1)


class Env:
    """The best action depends on the observation; a wrong one costs nothing."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.w = torch.randn(ACTIONS, OBS, generator=torch.Generator().manual_seed(0))

    def reset(self):
        self.obs = torch.randn(OBS, generator=self.gen)
        return self.obs

    def step(self, action):
        reward = float((self.w @ self.obs).argmax() == action)
        return self.reset(), reward


def actor(number, policy, queue, rollouts, finished):
    torch.set_num_threads(1)
    torch.manual_seed(100 + number)
    env = Env(seed=number + 1)
    obs = env.reset()
    all_obs = torch.zeros(UNROLL, OBS)
    all_actions = torch.zeros(UNROLL, dtype=torch.long)
    all_rewards = torch.zeros(UNROLL)
    for _ in range(rollouts):
        for t in range(UNROLL):
            with torch.no_grad():
                logits, _ = policy(obs)
            action = Categorical(logits=logits).sample()
            all_obs[t] = obs
            all_actions[t] = action
            obs, all_rewards[t] = env.step(action)
        queue.put((number, all_obs, all_actions, all_rewards))
    finished.wait()  # the queue hands over descriptors, so stay until the learner has taken them


def learn(policy, batch, opt, entropy_weight):
    obs = torch.cat([b[1] for b in batch])
    actions = torch.cat([b[2] for b in batch])
    rewards = torch.cat([b[3] for b in batch])
    logits, value = policy(obs)
    d = Categorical(logits=logits)
    advantage = rewards - value
    loss = (-(d.log_prob(actions) * advantage.detach()).mean()
            + 0.5 * advantage.pow(2).mean() - entropy_weight * d.entropy().mean())
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 5.0)
    opt.step()
    return loss.item(), rewards.mean().item()


@torch.no_grad()
def evaluate(policy, episodes=2000):
    env = Env(seed=999)
    obs = torch.stack([env.reset() for _ in range(episodes)])
    best = (obs @ env.w.t()).argmax(1)
    return (policy(obs)[0].argmax(1) == best).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--actors", type=int, default=2)
    ap.add_argument("--rollouts", type=int, default=160, help="per actor")
    ap.add_argument("--batch", type=int, default=4, help="rollouts per update")
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--entropy", type=float, default=0.01)
    args = ap.parse_args()

    torch.manual_seed(1)
    torch.set_num_threads(1)
    ctx = mp.get_context("fork")
    policy = ActorCritic()
    policy.share_memory()
    queue = ctx.Queue(maxsize=8)
    finished = ctx.Event()
    actors = [ctx.Process(target=actor, args=(n, policy, queue, args.rollouts, finished)) for n in range(args.actors)]
    for p in actors:
        p.start()

    opt = torch.optim.Adam(policy.parameters(), lr=args.lr)
    begin = time.time()
    updates = args.actors * args.rollouts // args.batch
    for u in range(1, updates + 1):
        batch = [queue.get() for _ in range(args.batch)]
        loss, reward = learn(policy, batch, opt, args.entropy)
        if u % 16 == 0:
            print(f"update {u:3d} loss {loss:.3f} reward {reward:.3f} ({u / (time.time() - begin):.1f}/s)", flush=True)
    finished.set()
    for p in actors:
        p.join()
    print(f"greedy policy is right in {100 * evaluate(policy):.1f}% of the states")


if __name__ == "__main__":
    main()
