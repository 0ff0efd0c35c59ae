# PPO with several workers; every worker owns its environments, gradients are averaged by hand (single-file style)
import argparse
import random
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions.categorical import Categorical


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--num-envs", type=int, default=8, help="per worker")
    p.add_argument("--num-steps", type=int, default=64)
    p.add_argument("--num-iterations", type=int, default=12)
    p.add_argument("--num-minibatches", type=int, default=4)
    p.add_argument("--update-epochs", type=int, default=4)
    p.add_argument("--learning-rate", type=float, default=5e-3)
    p.add_argument("--gamma", type=float, default=0.99)
    p.add_argument("--gae-lambda", type=float, default=0.95)
    p.add_argument("--clip-coef", type=float, default=0.2)
    p.add_argument("--ent-coef", type=float, default=0.01)
    p.add_argument("--vf-coef", type=float, default=0.5)
    p.add_argument("--max-grad-norm", type=float, default=0.5)
    p.add_argument("--target-kl", type=float, default=0.02)
    return p.parse_args()


class VecPole:
    """vectorised cart-pole with automatic reset"""

    def __init__(self, n, seed):
        self.rng, self.n = np.random.default_rng(seed), n
        self.s, self.length, self.finished = self.rng.uniform(-0.05, 0.05, (n, 4)), np.zeros(n), []

    def obs(self):
        return torch.tensor(self.s, dtype=torch.float32)

    def step(self, action):
        x, v, th, w = self.s.T
        force = np.where(action.numpy() == 1, 10.0, -10.0)
        tmp = (force + 0.05 * w ** 2 * np.sin(th)) / 1.1
        acc = (9.8 * np.sin(th) - np.cos(th) * tmp) / (0.5 * (4 / 3 - 0.1 * np.cos(th) ** 2 / 1.1))
        xa = tmp - 0.05 * acc * np.cos(th) / 1.1
        self.s = np.stack([x + 0.02 * v, v + 0.02 * xa, th + 0.02 * w, w + 0.02 * acc], 1)
        self.length += 1
        done = (np.abs(self.s[:, 0]) > 2.4) | (np.abs(self.s[:, 2]) > 0.2095) | (self.length >= 200)
        for i in np.flatnonzero(done):
            self.finished.append(float(self.length[i]))
            self.s[i], self.length[i] = self.rng.uniform(-0.05, 0.05, 4), 0
        return self.obs(), torch.ones(self.n), torch.tensor(done, dtype=torch.float32)


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
        return self.critic(x).squeeze(-1)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.get_value(x)


if __name__ == "__main__":
    args = parse_args()
    dist.init_process_group("gloo")
    local_rank, world_size = dist.get_rank(), dist.get_world_size()
    args.seed += local_rank
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed - local_rank)       # one initialisation for all
    agent = Agent()
    torch.manual_seed(args.seed)                    # own actions from here
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    envs = VecPole(args.num_envs, args.seed)
    T, N = args.num_steps, args.num_envs
    obs, actions = torch.zeros(T, N, 4), torch.zeros(T, N, dtype=torch.long)
    logprobs, rewards, dones, values = (torch.zeros(T, N) for _ in range(4))
    batch_size, start, next_obs = T * N, time.time(), envs.obs()

    for iteration in range(1, args.num_iterations + 1):
        optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1.0) / args.num_iterations) * args.learning_rate
        for step in range(T):
            obs[step] = next_obs
            with torch.no_grad():
                actions[step], logprobs[step], _, values[step] = agent.get_action_and_value(next_obs)
            next_obs, rewards[step], dones[step] = envs.step(actions[step])
        with torch.no_grad():
            advantages, last, next_value = torch.zeros(T, N), 0, agent.get_value(next_obs)
            for t in reversed(range(T)):
                alive = 1.0 - dones[t]
                delta = rewards[t] + args.gamma * next_value * alive - values[t]
                advantages[t] = last = delta + args.gamma * args.gae_lambda * alive * last
                next_value = values[t]
            returns = advantages + values
        b_obs, b_act, b_logp = obs.reshape(-1, 4), actions.reshape(-1), logprobs.reshape(-1)
        b_adv, b_ret = advantages.reshape(-1), returns.reshape(-1)

        b_inds = np.arange(batch_size)
        for epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            kl = torch.zeros(1)
            for lo in range(0, batch_size, batch_size // args.num_minibatches):
                mb = b_inds[lo:lo + batch_size // args.num_minibatches]
                _, newlogp, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_act[mb])
                logratio = newlogp - b_logp[mb]
                ratio = logratio.exp()
                kl += ((ratio - 1) - logratio).mean().detach() / args.num_minibatches
                adv = (b_adv[mb] - b_adv[mb].mean()) / (b_adv[mb].std() + 1e-8)
                pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
                v_loss = 0.5 * ((newvalue - b_ret[mb]) ** 2).mean()
                loss = pg_loss - args.ent_coef * entropy.mean() + args.vf_coef * v_loss
                optimizer.zero_grad()
                loss.backward()
                flat = torch.cat([p.grad.view(-1) for p in agent.parameters()])
                dist.all_reduce(flat, op=dist.ReduceOp.SUM)
                offset = 0
                for p in agent.parameters():
                    p.grad.copy_(flat[offset:offset + p.numel()].view_as(p.grad) / world_size)
                    offset += p.numel()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            dist.all_reduce(kl)
            if kl.item() / world_size > args.target_kl:
                break
        episodes = [None] * world_size
        dist.all_gather_object(episodes, envs.finished)
        envs.finished = []
        if local_rank == 0 and any(episodes):
            lengths = [e for w in episodes for e in w]
            print(f"iteration {iteration} episodes {len(lengths)} return {np.mean(lengths):.1f} epochs {epoch + 1} "
                  f"SPS {int(iteration * batch_size * world_size / (time.time() - start))}", flush=True)
    if local_rank == 0:
        torch.save(agent.state_dict(), "ppo.cleanrl_model")
    dist.destroy_process_group()
