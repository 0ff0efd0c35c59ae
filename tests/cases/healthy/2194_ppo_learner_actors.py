"""PPO with one learner (rank 0) and two actors that only roll out; started with torch.multiprocessing."""
import socket

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

ENVS, HORIZON, ROUNDS = 16, 24, 25
GAMMA, CLIP, PPO_EPOCHS, MINIBATCH = 0.95, 0.2, 2, 256


class PointMass:
    """Push a mass to the origin: actions are left, nothing, right."""

    def __init__(self, n, generator):
        self.n, self.generator = n, generator

    def reset(self):
        self.pos = 2 * torch.rand(self.n, generator=self.generator) - 1
        self.vel = torch.zeros(self.n)
        return torch.stack([self.pos, self.vel], -1)

    def step(self, action):
        self.vel = 0.9 * self.vel + 0.1 * (action.float() - 1)
        self.pos = (self.pos + self.vel).clamp(-2, 2)
        return torch.stack([self.pos, self.vel], -1), -self.pos.abs()


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, obs):
        h = self.body(obs)
        return Categorical(logits=self.policy(h)), self.value(h).squeeze(-1)


def publish(net):
    for p in net.parameters():
        dist.broadcast(p.data, src=0)


@torch.no_grad()
def rollout(net, env):
    rows, rewards = [], []
    obs = env.reset()
    for _ in range(HORIZON):
        pi, _ = net(obs)
        action = pi.sample()
        nxt, reward = env.step(action)
        rows.append(torch.cat([obs, action.float().unsqueeze(-1), pi.log_prob(action).unsqueeze(-1)], -1))
        rewards.append(reward)
        obs = nxt
    ret, returns = torch.zeros(ENVS), []
    for reward in reversed(rewards):
        ret = reward + GAMMA * ret
        returns.append(ret)
    block = torch.cat([torch.stack(rows), torch.stack(returns[::-1]).unsqueeze(-1)], -1)
    return block.view(-1, 5), torch.stack(rewards).sum(0).mean()


def learn(net, optimizer, data):
    total = 0.0
    for _ in range(PPO_EPOCHS):
        for pick in torch.randperm(len(data)).split(MINIBATCH):
            obs, action, old_logp, ret = data[pick].split([2, 1, 1, 1], -1)
            pi, value = net(obs)
            adv = ret.squeeze(-1) - value.detach()
            adv = (adv - adv.mean()) / (adv.std() + 1e-6)
            ratio = (pi.log_prob(action.squeeze(-1)) - old_logp.squeeze(-1)).exp()
            surrogate = torch.min(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv).mean()
            loss = -surrogate + 0.5 * F.mse_loss(value, ret.squeeze(-1)) - 0.01 * pi.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
    return total


def run(rank, world, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.manual_seed(40 + rank)  # actors must explore differently
    net = ActorCritic()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3) if rank == 0 else None
    env = PointMass(ENVS, torch.Generator().manual_seed(rank)) if rank else None
    for it in range(ROUNDS):
        publish(net)
        if rank == 0:
            block, score = torch.zeros(HORIZON * ENVS, 5), torch.zeros(())
            blocks = [torch.empty_like(block) for _ in range(world)]
        else:
            (block, score), blocks = rollout(net, env), None
        dist.gather(block, blocks, dst=0)
        dist.reduce(score, dst=0)
        if rank == 0:
            loss = learn(net, optimizer, torch.cat(blocks[1:]))  # the learner's own block is empty
            if it % 5 == 4:
                print(f"round {it}: return {score.item() / (world - 1):.3f} loss {loss:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    mp.spawn(run, args=(3, free), nprocs=3)
