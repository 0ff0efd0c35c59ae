import json
import os
import random
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical


@dataclass
class Args:
    seed: int = 1
    total_timesteps: int = 40960
    learning_rate: float = 2.5e-3
    local_num_envs: int = 8
    num_steps: int = 64
    anneal_lr: bool = True
    gamma: float = 0.97
    gae_lambda: float = 0.95
    num_minibatches: int = 4
    update_epochs: int = 3
    norm_adv: bool = True
    clip_coef: float = 0.2
    clip_vloss: bool = True
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float = None


class VecCorridor:
    """Walk to a goal cell on a line; auto-resets."""

    def __init__(self, n, size=9, limit=30):
        self.n, self.size, self.limit = n, size, limit

    def reset(self, seed):
        self.rng = np.random.default_rng(seed)
        self.pos = self.rng.integers(0, self.size, self.n)
        self.goal = self.rng.integers(0, self.size, self.n)
        self.t = np.zeros(self.n, dtype=int)
        self.ret = np.zeros(self.n)
        return self.obs()

    def obs(self):
        return np.stack([self.pos / self.size, self.goal / self.size, (self.goal - self.pos) / self.size], 1).astype(np.float32)

    def step(self, a):
        self.pos = np.clip(self.pos + (a - 1), 0, self.size - 1)
        self.t += 1
        hit = self.pos == self.goal
        reward = np.where(hit, 1.0, -0.05)
        self.ret += reward
        done = hit | (self.t >= self.limit)
        finished = self.ret[done].tolist()
        k = int(done.sum())
        if k:
            self.pos[done] = self.rng.integers(0, self.size, k)
            self.goal[done] = self.rng.integers(0, self.size, k)
            self.t[done] = 0
            self.ret[done] = 0
        return self.obs(), reward, done, finished


def layer_init(layer, std=np.sqrt(2), bias=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(layer_init(nn.Linear(3, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh())
        self.actor = layer_init(nn.Linear(64, 3), std=0.01)
        self.critic = layer_init(nn.Linear(64, 1), std=1)

    def get_value(self, x):
        return self.critic(self.network(x))

    def get_action_and_value(self, x, action=None):
        h = self.network(x)
        probs = Categorical(logits=self.actor(h))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(h)


if __name__ == "__main__":
    local_rank = int(os.getenv("LOCAL_RANK", "0"))
    world_size = int(os.getenv("WORLD_SIZE", "1"))
    args = Args()
    batch = args.local_num_envs * args.num_steps
    mb = batch // args.num_minibatches
    num_envs = args.local_num_envs * world_size
    num_iterations = args.total_timesteps // (batch * world_size)
    if world_size > 1:
        dist.init_process_group("gloo", rank=local_rank, world_size=world_size)
    writer = open("scalars.jsonl", "w") if local_rank == 0 else None

    # a different seed for each worker, but the same weights everywhere
    args.seed += local_rank
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed - local_rank)
    envs = VecCorridor(args.local_num_envs)
    agent = Agent()
    torch.manual_seed(args.seed)
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    obs = torch.zeros((args.num_steps, args.local_num_envs, 3))
    actions = torch.zeros((args.num_steps, args.local_num_envs))
    logprobs, rewards, dones, values = (torch.zeros_like(actions) for _ in range(4))
    global_step = 0
    next_obs = torch.from_numpy(envs.reset(seed=args.seed))
    next_done = torch.zeros(args.local_num_envs)

    for iteration in range(1, num_iterations + 1):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1.0) / num_iterations) * args.learning_rate
        returns_seen = []
        for step in range(args.num_steps):
            global_step += num_envs
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
            values[step], actions[step], logprobs[step] = value.flatten(), action, logprob
            o, r, d, fin = envs.step(action.numpy())
            rewards[step] = torch.from_numpy(r).float()
            next_obs, next_done = torch.from_numpy(o), torch.from_numpy(d).float()
            returns_seen += fin
        print(f"local_rank: {local_rank}, action.sum(): {action.sum()}, iteration: {iteration}, "
              f"agent.actor.weight.sum(): {agent.actor.weight.sum()}")
        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards)
            last = 0
            for t in reversed(range(args.num_steps)):
                nonterm = 1.0 - (next_done if t == args.num_steps - 1 else dones[t + 1])
                nextv = next_value if t == args.num_steps - 1 else values[t + 1]
                delta = rewards[t] + args.gamma * nextv * nonterm - values[t]
                advantages[t] = last = delta + args.gamma * args.gae_lambda * nonterm * last
            returns = advantages + values
        b_obs, b_logprobs, b_actions = obs.reshape(-1, 3), logprobs.reshape(-1), actions.reshape(-1)
        b_adv, b_ret, b_val = advantages.reshape(-1), returns.reshape(-1), values.reshape(-1)

        b_inds = np.arange(batch)
        for epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for start in range(0, batch, mb):
                ix = b_inds[start:start + mb]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[ix], b_actions.long()[ix])
                logratio = newlogprob - b_logprobs[ix]
                ratio = logratio.exp()
                with torch.no_grad():
                    approx_kl = ((ratio - 1) - logratio).mean()
                adv = b_adv[ix]
                if args.norm_adv:
                    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                pg_loss = torch.max(-adv * ratio,
                                    -adv * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)).mean()
                newvalue = newvalue.view(-1)
                v_clip = b_val[ix] + torch.clamp(newvalue - b_val[ix], -args.clip_coef, args.clip_coef)
                v_loss = 0.5 * torch.max((newvalue - b_ret[ix]) ** 2, (v_clip - b_ret[ix]) ** 2).mean()
                loss = pg_loss - args.ent_coef * entropy.mean() + v_loss * args.vf_coef
                optimizer.zero_grad()
                loss.backward()
                if world_size > 1:
                    all_grads = torch.cat([p.grad.view(-1) for p in agent.parameters() if p.grad is not None])
                    dist.all_reduce(all_grads, op=dist.ReduceOp.SUM)
                    offset = 0
                    for p in agent.parameters():
                        if p.grad is not None:
                            p.grad.data.copy_(all_grads[offset:offset + p.numel()].view_as(p.grad.data) / world_size)
                            offset += p.numel()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break
        if local_rank == 0:
            row = {"step": global_step, "return_rank0": float(np.mean(returns_seen)) if returns_seen else None,
                   "v_loss": v_loss.item(), "pg_loss": pg_loss.item(), "kl": approx_kl.item()}
            writer.write(json.dumps(row) + "\n")
            if iteration % 10 == 0:
                print(row, flush=True)
    if local_rank == 0:
        writer.close()
        torch.save(agent.state_dict(), "agent.pt")
    if world_size > 1:
        dist.destroy_process_group()
