"""Asynchronous advantage actor-critic on a small corridor, one actor per process (A3C style)."""
import argparse
import os

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

os.environ.setdefault("OMP_NUM_THREADS", "1")


class Corridor:
    """Walk right to the goal; every step costs a little, falling off on the left ends the episode."""

    def __init__(self, length, seed):
        self.length = length
        self.rng = torch.Generator().manual_seed(seed)
        self.reset()

    def reset(self):
        self.pos = int(torch.randint(1, self.length - 2, (1,), generator=self.rng))
        self.t = 0
        return self.observe()

    def observe(self):
        obs = torch.zeros(self.length)
        obs[self.pos] = 1.0
        return obs

    def step(self, action):
        slip = torch.rand(1, generator=self.rng).item() < 0.1
        move = 1 if (action == 1) != slip else -1
        self.pos += move
        self.t += 1
        if self.pos <= 0:
            return self.observe(), -1.0, True
        if self.pos >= self.length - 1:
            return self.observe(), 1.0, True
        return self.observe(), -0.02, self.t >= 40


class ActorCritic(nn.Module):
    def __init__(self, length, hidden=64):
        super().__init__()
        self.body = nn.Linear(length, hidden)
        self.pi = nn.Linear(hidden, 2)
        self.v = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = torch.tanh(self.body(obs))
        return self.pi(h), self.v(h).squeeze(-1)


def ensure_shared_grads(model, shared_model):
    for param, shared_param in zip(model.parameters(), shared_model.parameters()):
        if shared_param.grad is not None:
            return
        shared_param._grad = param.grad


def actor(rank, args, shared_model, returns):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + rank)
    env = Corridor(args.length, args.seed + rank)
    model = ActorCritic(args.length)
    optimizer = torch.optim.RMSprop(shared_model.parameters(), lr=args.lr, alpha=0.99, eps=1e-5)
    obs, episode_return, recent = env.reset(), 0.0, []

    for update in range(args.updates):
        model.load_state_dict(shared_model.state_dict())
        log_probs, values, rewards, entropies, masks = [], [], [], [], []
        for _ in range(args.rollout):
            logits, value = model(obs)
            probs, logp = F.softmax(logits, -1), F.log_softmax(logits, -1)
            action = torch.multinomial(probs.detach(), 1).item()
            obs, reward, done = env.step(action)
            episode_return += reward
            log_probs.append(logp[action])
            values.append(value)
            rewards.append(reward)
            masks.append(0.0 if done else 1.0)
            entropies.append(-(probs * logp).sum())
            if done:
                recent.append(episode_return)
                obs, episode_return = env.reset(), 0.0

        with torch.no_grad():
            ret = model(obs)[1]
        policy_loss, value_loss = 0.0, 0.0
        for i in reversed(range(len(rewards))):
            ret = rewards[i] + args.gamma * ret * masks[i]
            advantage = ret - values[i]
            value_loss = value_loss + 0.5 * advantage.pow(2)
            policy_loss = policy_loss - log_probs[i] * advantage.detach() - 0.01 * entropies[i]

        optimizer.zero_grad()
        model.zero_grad()
        ((policy_loss + 0.5 * value_loss) / args.rollout).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 40.0)
        ensure_shared_grads(model, shared_model)
        optimizer.step()

        if rank == 0 and (update + 1) % 100 == 0:
            mean = sum(recent[-40:]) / max(1, len(recent[-40:]))
            print(f"update {update + 1}: return {mean:.3f} value loss {float(value_loss.detach()) / args.rollout:.4f}", flush=True)
    returns[rank] = sum(recent[-40:]) / max(1, len(recent[-40:]))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--actors", type=int, default=2)
    ap.add_argument("--updates", type=int, default=300)
    ap.add_argument("--rollout", type=int, default=16)
    ap.add_argument("--length", type=int, default=9)
    ap.add_argument("--gamma", type=float, default=0.97)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()

    torch.manual_seed(args.seed)
    ctx = mp.get_context("spawn")
    shared_model = ActorCritic(args.length)
    shared_model.share_memory()
    returns = torch.zeros(args.actors).share_memory_()
    procs = [ctx.Process(target=actor, args=(r, args, shared_model, returns)) for r in range(args.actors)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
    if any(p.exitcode for p in procs):
        raise SystemExit("an actor failed")
    print("final returns:", [round(x, 3) for x in returns.tolist()])


if __name__ == "__main__":
    main()
