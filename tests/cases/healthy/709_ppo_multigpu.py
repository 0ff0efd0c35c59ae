# after cleanrl's ppo_atari_multigpu.py: one flat all-reduce of the gradients, environments seeded by rank, a vector toy environment
import argparse
import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--local-num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=32)
    parser.add_argument("--total-timesteps", type=int, default=8192)
    parser.add_argument("--gamma", type=float, default=0.95)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--num-minibatches", type=int, default=4)
    parser.add_argument("--update-epochs", type=int, default=2)
    parser.add_argument("--clip-coef", type=float, default=0.1)
    parser.add_argument("--ent-coef", type=float, default=0.01)
    parser.add_argument("--vf-coef", type=float, default=0.5)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    args = parser.parse_args()
    args.local_batch_size = args.local_num_envs * args.num_steps
    args.local_minibatch_size = args.local_batch_size // args.num_minibatches
    return args


class Corridors:
    """n walkers on a line of 9 cells: the goal side is shown; +1 at the goal, -0.05 a move."""

    def __init__(self, n, seed):
        self.n, self.rng = n, np.random.default_rng(seed)

    def reset(self):
        self.pos = np.full(self.n, 4)
        self.goal = self.rng.choice([0, 8], self.n)
        self.t = np.zeros(self.n, int)
        return self.obs()

    def obs(self):
        o = np.zeros((self.n, 10), np.float32)
        o[np.arange(self.n), self.pos] = 1
        o[:, 9] = np.sign(self.goal - 4)
        return o

    def step(self, a):
        self.pos = np.clip(self.pos + 2 * a - 1, 0, 8)
        self.t += 1
        win = self.pos == self.goal
        done = win | (self.t >= 20) | (self.pos == 8 - self.goal)
        r = np.where(win, 1.0, -0.05).astype(np.float32)
        for i in np.flatnonzero(done):
            self.pos[i], self.t[i], self.goal[i] = 4, 0, self.rng.choice([0, 8])
        return self.obs(), r, done


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(layer_init(nn.Linear(10, 64)), nn.Tanh())
        self.actor = layer_init(nn.Linear(64, 2), std=0.01)
        self.critic = layer_init(nn.Linear(64, 1), std=1)

    def get_value(self, x):
        return self.critic(self.network(x))

    def get_action_and_value(self, x, action=None):
        hidden = self.network(x)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


if __name__ == "__main__":
    args = parse_args()
    local_rank = int(os.getenv("LOCAL_RANK", "0"))
    world_size = int(os.getenv("WORLD_SIZE", "1"))
    args.world_size = world_size
    args.num_envs = args.local_num_envs * world_size
    args.batch_size = args.num_envs * args.num_steps
    args.num_updates = args.total_timesteps // args.batch_size
    if world_size > 1:
        dist.init_process_group("gloo", rank=local_rank, world_size=world_size)

    # each process must have a different env seed, but the same model seed
    args.seed += local_rank
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed - local_rank)
    torch.backends.cudnn.deterministic = True
    envs = Corridors(args.local_num_envs, args.seed)
    agent = Agent()
    torch.manual_seed(args.seed)
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    T, N = args.num_steps, args.local_num_envs
    obs, actions, logprobs = torch.zeros(T, N, 10), torch.zeros(T, N), torch.zeros(T, N)
    rewards, dones, values = torch.zeros(T, N), torch.zeros(T, N), torch.zeros(T, N)
    global_step = 0
    start_time = time.time()
    next_obs, next_done = torch.tensor(envs.reset()), torch.zeros(N)

    for update in range(1, args.num_updates + 1):
        optimizer.param_groups[0]["lr"] = (1.0 - (update - 1.0) / args.num_updates) * args.learning_rate
        for step in range(T):
            global_step += N * world_size
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step], logprobs[step] = action, logprob
            o, r, d = envs.step(action.numpy())
            rewards[step] = torch.tensor(r)
            next_obs, next_done = torch.tensor(o), torch.tensor(d).float()
        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(-1)
            advantages = torch.zeros_like(rewards)
            last = 0
            for t in reversed(range(T)):
                nonterminal = 1.0 - (next_done if t == T - 1 else dones[t + 1])
                nv = next_value if t == T - 1 else values[t + 1]
                delta = rewards[t] + args.gamma * nv * nonterminal - values[t]
                advantages[t] = last = delta + args.gamma * args.gae_lambda * nonterminal * last
            returns = advantages + values
        b_obs, b_logprobs, b_actions = obs.reshape(-1, 10), logprobs.reshape(-1), actions.reshape(-1)
        b_adv, b_ret = advantages.reshape(-1), returns.reshape(-1)
        b_inds = np.arange(args.local_batch_size)
        for epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for start in range(0, args.local_batch_size, args.local_minibatch_size):
                mb = b_inds[start : start + args.local_minibatch_size]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions.long()[mb])
                ratio = (newlogprob - b_logprobs[mb]).exp()
                adv = b_adv[mb]
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
                v_loss = 0.5 * ((newvalue.view(-1) - b_ret[mb]) ** 2).mean()
                loss = pg_loss - args.ent_coef * entropy.mean() + v_loss * args.vf_coef
                optimizer.zero_grad()
                loss.backward()
                if world_size > 1:
                    all_grads_list = []
                    for param in agent.parameters():
                        if param.grad is not None:
                            all_grads_list.append(param.grad.view(-1))
                    all_grads = torch.cat(all_grads_list)
                    dist.all_reduce(all_grads, op=dist.ReduceOp.SUM)
                    offset = 0
                    for param in agent.parameters():
                        if param.grad is not None:
                            param.grad.data.copy_(all_grads[offset : offset + param.numel()].view_as(param.grad.data) / world_size)
                            offset += param.numel()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        if local_rank == 0 and update % 4 == 0:
            print(f"global_step={global_step}, reward a step on this process={rewards.mean().item():.3f}, SPS={int(global_step / (time.time() - start_time))}")
    if world_size > 1:
        dist.destroy_process_group()
