import os
import random
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
    total_timesteps: int = 40000
    learning_rate: float = 2e-3
    local_num_envs: int = 8
    num_steps: int = 64
    anneal_lr: bool = True
    gamma: float = 0.98
    gae_lambda: float = 0.95
    num_minibatches: int = 4
    update_epochs: int = 4
    clip_coef: float = 0.2
    ent_coef: float = 0.005
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float = 0.03


class VecPole:
    """Vectorised cart-pole with the usual constants."""

    def __init__(self, n, seed):
        self.n, self.rng = n, np.random.default_rng(seed)
        self.s, self.t = np.zeros((n, 4)), np.zeros(n, int)

    def _fresh(self, m):
        self.s[m] = self.rng.uniform(-0.05, 0.05, (int(m.sum()), 4))
        self.t[m] = 0

    def reset(self):
        self._fresh(np.ones(self.n, bool))
        return self.s.astype(np.float32)

    def step(self, a):
        x, v, th, w = self.s.T
        f = np.where(a == 1, 10.0, -10.0)
        tmp = (f + 0.05 * w ** 2 * np.sin(th)) / 1.1
        acc = (9.8 * np.sin(th) - np.cos(th) * tmp) / (0.5 * (4 / 3 - 0.1 * np.cos(th) ** 2 / 1.1))
        xa = tmp - 0.05 * acc * np.cos(th) / 1.1
        self.s = np.stack([x + 0.02 * v, v + 0.02 * xa, th + 0.02 * w, w + 0.02 * acc], 1)
        self.t += 1
        done = (abs(self.s[:, 0]) > 2.4) | (abs(self.s[:, 2]) > 0.21) | (self.t >= 200)
        lengths = self.t[done].copy()
        self._fresh(done)
        return self.s.astype(np.float32), np.ones(self.n, np.float32), done, lengths


def layer_init(layer, std=np.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, 0.0)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(4, 64)), nn.Tanh(), layer_init(nn.Linear(64, 1), 1.0))
        self.actor = nn.Sequential(layer_init(nn.Linear(4, 64)), nn.Tanh(), layer_init(nn.Linear(64, 2), 0.01))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


if __name__ == "__main__":
    args = Args()
    local_rank = int(os.getenv("LOCAL_RANK", "0"))
    world_size = int(os.getenv("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo", rank=local_rank, world_size=world_size)
    batch = args.local_num_envs * args.num_steps
    minibatch = batch // args.num_minibatches
    num_iterations = args.total_timesteps // (batch * world_size)

    args.seed += local_rank
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed - local_rank)
    agent = Agent()
    torch.manual_seed(args.seed)
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    envs = VecPole(args.local_num_envs, args.seed)

    T, N = args.num_steps, args.local_num_envs
    obs, actions = torch.zeros(T, N, 4), torch.zeros(T, N)
    logprobs, rewards, dones, values = (torch.zeros(T, N) for _ in range(4))
    next_obs, next_done = torch.tensor(envs.reset()), torch.zeros(N)
    global_step = 0
    for iteration in range(1, num_iterations + 1):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1.0) / num_iterations) * args.learning_rate
        ep = torch.zeros(2)
        for step in range(T):
            global_step += N * world_size
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step], logprobs[step] = action, logprob
            o, r, d, lengths = envs.step(action.numpy())
            rewards[step] = torch.tensor(r)
            next_obs, next_done = torch.tensor(o), torch.tensor(d, dtype=torch.float32)
            ep += torch.tensor([float(lengths.sum()), float(len(lengths))])
        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(-1)
            advantages, last = torch.zeros_like(rewards), 0
            for t in reversed(range(T)):
                nonterm = 1.0 - (next_done if t == T - 1 else dones[t + 1])
                nv = next_value if t == T - 1 else values[t + 1]
                delta = rewards[t] + args.gamma * nv * nonterm - values[t]
                advantages[t] = last = delta + args.gamma * args.gae_lambda * nonterm * last
            returns = advantages + values
        b_obs, b_logp, b_act = obs.reshape(-1, 4), logprobs.reshape(-1), actions.reshape(-1)
        b_adv, b_ret = advantages.reshape(-1), returns.reshape(-1)
        b_inds = np.arange(batch)
        stop = False
        for epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            kl_sum = torch.zeros(1)
            for start in range(0, batch, minibatch):
                mb = b_inds[start:start + minibatch]
                _, newlogp, entropy, newv = agent.get_action_and_value(b_obs[mb], b_act.long()[mb])
                logratio = newlogp - b_logp[mb]
                ratio = logratio.exp()
                kl_sum += ((ratio - 1) - logratio).mean().detach()
                adv = b_adv[mb]
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                pg = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)).mean()
                v_loss = 0.5 * ((newv.view(-1) - b_ret[mb]) ** 2).mean()
                loss = pg - args.ent_coef * entropy.mean() + v_loss * args.vf_coef
                optimizer.zero_grad()
                loss.backward()
                if world_size > 1:
                    grads = [p.grad.view(-1) for p in agent.parameters() if p.grad is not None]
                    flat = torch.cat(grads)
                    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
                    offset = 0
                    for p in agent.parameters():
                        if p.grad is not None:
                            p.grad.data.copy_(flat[offset:offset + p.numel()].view_as(p.grad.data) / world_size)
                            offset += p.numel()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            if world_size > 1:
                dist.all_reduce(kl_sum)
            if kl_sum.item() / (world_size * args.num_minibatches) > args.target_kl:
                break
        if world_size > 1:
            dist.all_reduce(ep)
        if local_rank == 0 and iteration % 5 == 0:
            print(f"global_step={global_step} episodic_length={(ep[0] / ep[1].clamp(min=1)).item():.1f} epochs={epoch + 1}")
    if world_size > 1:
        dist.destroy_process_group()
