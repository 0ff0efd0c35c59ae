# single-file multi-process PPO
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
    num_iterations: int = 25
    learning_rate: float = 3e-3
    local_num_envs: int = 8
    num_steps: int = 64
    anneal_lr: bool = True
    gamma: float = 0.98
    gae_lambda: float = 0.95
    num_minibatches: int = 4
    update_epochs: int = 4
    norm_adv: bool = True
    clip_coef: float = 0.2
    clip_vloss: bool = False
    ent_coef: float = 0.005
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float = 0.05
    backend: str = "gloo"
    # filled at run time
    local_batch_size: int = 0
    local_minibatch_size: int = 0
    num_envs: int = 0
    world_size: int = 0


class VecCartPole:
    def __init__(self, n, seed, limit=200):
        self.n, self.limit, self.rng = n, limit, np.random.default_rng(seed)
        self.state = np.zeros((n, 4), dtype=np.float32)
        self.steps = np.zeros(n, dtype=np.int64)

    def _fresh(self, k):
        return self.rng.uniform(-0.05, 0.05, size=(k, 4)).astype(np.float32)

    def reset(self):
        self.state, self.steps[:] = self._fresh(self.n), 0
        return self.state.copy()

    def step(self, action):
        x, xd, th, thd = self.state.T
        force = np.where(action == 1, 10.0, -10.0)
        c, s = np.cos(th), np.sin(th)
        temp = (force + 0.05 * thd ** 2 * s) / 1.1
        tha = (9.8 * s - c * temp) / (0.5 * (4.0 / 3.0 - 0.1 * c ** 2 / 1.1))
        xa = temp - 0.05 * tha * c / 1.1
        self.state = np.stack([x + 0.02 * xd, xd + 0.02 * xa, th + 0.02 * thd, thd + 0.02 * tha], 1).astype(np.float32)
        self.steps += 1
        done = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.2095) | (self.steps >= self.limit)
        finished = self.steps[done].copy()
        if done.any():
            self.state[done] = self._fresh(int(done.sum()))
            self.steps[done] = 0
        return self.state.copy(), np.ones(self.n, dtype=np.float32), done, finished


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(4, 32)), nn.Tanh(), layer_init(nn.Linear(32, 32)), nn.Tanh(),
                                    layer_init(nn.Linear(32, 1), std=1.0))
        self.actor = nn.Sequential(layer_init(nn.Linear(4, 32)), nn.Tanh(), layer_init(nn.Linear(32, 32)), nn.Tanh(),
                                   layer_init(nn.Linear(32, 2), std=0.01))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class ScalarWriter:
    def __init__(self, logdir):
        os.makedirs(logdir, exist_ok=True)
        self.f = open(os.path.join(logdir, "events.jsonl"), "a")

    def add_scalar(self, tag, value, step):
        self.f.write(json.dumps({"tag": tag, "value": float(value), "step": step}) + "\n")

    def close(self):
        self.f.close()


def average_gradients(agent, world_size):
    grads = [p.grad.view(-1) for p in agent.parameters() if p.grad is not None]
    flat = torch.cat(grads)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    offset = 0
    for p in agent.parameters():
        if p.grad is not None:
            p.grad.data.copy_(flat[offset:offset + p.numel()].view_as(p.grad.data) / world_size)
            offset += p.numel()


if __name__ == "__main__":
    args = Args()
    local_rank = int(os.getenv("LOCAL_RANK", "0"))
    args.world_size = int(os.getenv("WORLD_SIZE", "1"))
    args.local_batch_size = args.local_num_envs * args.num_steps
    args.local_minibatch_size = args.local_batch_size // args.num_minibatches
    args.num_envs = args.local_num_envs * args.world_size
    dist.init_process_group(args.backend, rank=local_rank, world_size=args.world_size)
    writer = ScalarWriter(f"runs/cartpole__{args.seed}__{int(time.time())}") if local_rank == 0 else None

    # a different seed for each data-parallel worker, one and the same for the initial weights
    args.seed += local_rank
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed - local_rank)
    envs = VecCartPole(args.local_num_envs, args.seed)
    agent = Agent()
    torch.manual_seed(args.seed)
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    shape = (args.num_steps, args.local_num_envs)
    obs = torch.zeros(shape + (4,))
    actions, logprobs, rewards, dones, values = (torch.zeros(shape) for _ in range(5))
    global_step = 0
    next_obs, next_done = torch.from_numpy(envs.reset()), torch.zeros(args.local_num_envs)

    for iteration in range(1, args.num_iterations + 1):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1.0) / args.num_iterations) * args.learning_rate
        episodes = torch.zeros(2, dtype=torch.float64)
        for step in range(args.num_steps):
            global_step += args.num_envs
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
            values[step], actions[step], logprobs[step] = value.flatten(), action, logprob
            o, r, d, finished = envs.step(action.numpy())
            rewards[step] = torch.from_numpy(r)
            next_obs, next_done = torch.from_numpy(o), torch.from_numpy(d.astype(np.float32))
            episodes += torch.tensor([float(finished.sum()), float(len(finished))])

        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards)
            lastgaelam = 0
            for t in reversed(range(args.num_steps)):
                nonterminal = 1.0 - (next_done if t == args.num_steps - 1 else dones[t + 1])
                nextvalues = next_value if t == args.num_steps - 1 else values[t + 1]
                delta = rewards[t] + args.gamma * nextvalues * nonterminal - values[t]
                advantages[t] = lastgaelam = delta + args.gamma * args.gae_lambda * nonterminal * lastgaelam
            returns = advantages + values

        b_obs, b_logprobs, b_actions = obs.reshape(-1, 4), logprobs.reshape(-1), actions.reshape(-1)
        b_advantages, b_returns = advantages.reshape(-1), returns.reshape(-1)
        b_inds = np.arange(args.local_batch_size)
        for epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            kl_sum = torch.zeros(())
            for start in range(0, args.local_batch_size, args.local_minibatch_size):
                mb = b_inds[start:start + args.local_minibatch_size]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions.long()[mb])
                logratio = newlogprob - b_logprobs[mb]
                ratio = logratio.exp()
                with torch.no_grad():
                    kl_sum += ((ratio - 1) - logratio).mean()
                adv = b_advantages[mb]
                if args.norm_adv:
                    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
                v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb]) ** 2).mean()
                loss = pg_loss - args.ent_coef * entropy.mean() + v_loss * args.vf_coef
                optimizer.zero_grad()
                loss.backward()
                average_gradients(agent, args.world_size)
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            approx_kl = kl_sum / args.num_minibatches
            dist.all_reduce(approx_kl)
            if approx_kl.item() / args.world_size > args.target_kl:
                break

        dist.all_reduce(episodes)
        if writer is not None and episodes[1] > 0:
            mean_return = (episodes[0] / episodes[1]).item()
            writer.add_scalar("charts/episodic_return", mean_return, global_step)
            writer.add_scalar("losses/value_loss", v_loss.item(), global_step)
            if iteration % 5 == 0:
                print(f"iteration {iteration} global_step {global_step} episodic_return {mean_return:.1f}")

    if writer is not None:
        writer.close()
    dist.destroy_process_group()
