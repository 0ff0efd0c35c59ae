"""Contextual actor-critic with two optimizers of different rhythm; gradients are exchanged by hand, asynchronously."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

CONF = dict(procs=2, states=6, actions=4, batch=48, iterations=150, actor_every=3, actor_lr=5e-3, critic_lr=1e-2, seed=73)


def mlp(inp, out):
    return nn.Sequential(nn.Linear(inp, 48), nn.Tanh(), nn.Linear(48, out))


class Exchange:
    """Averages gradients: divides first, starts all sums, then waits for every one of them."""

    def __init__(self, module):
        self.params = [p for p in module.parameters() if p.requires_grad]
        for p in self.params:
            dist.broadcast(p.data, src=0)

    def __call__(self):
        works = []
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            p.grad.div_(dist.get_world_size())
            works.append(dist.all_reduce(p.grad, async_op=True))
        for w in works:
            w.wait()


class Bandit:
    """The reward depends on state and action; each process plays its own instance."""

    def __init__(self, conf, rank):
        self.best = torch.randn(conf["states"], conf["actions"], generator=torch.Generator().manual_seed(3))
        self.rng = torch.Generator().manual_seed(500 + rank)
        self.conf = conf

    def observe(self):
        return torch.randn(self.conf["batch"], self.conf["states"], generator=self.rng)

    def play(self, state, action):
        mean = (state @ self.best).gather(1, action.unsqueeze(1)).squeeze(1)
        return mean + 0.1 * torch.randn(len(mean), generator=self.rng)


def worker(rank, conf, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=conf["procs"])
    torch.manual_seed(conf["seed"])
    actor, critic = mlp(conf["states"], conf["actions"]), mlp(conf["states"], 1)
    sync_actor, sync_critic = Exchange(actor), Exchange(critic)
    opt_actor = torch.optim.Adam(actor.parameters(), lr=conf["actor_lr"])
    opt_critic = torch.optim.Adam(critic.parameters(), lr=conf["critic_lr"])
    bandit = Bandit(conf, rank)
    torch.manual_seed(conf["seed"] + 10 * (rank + 1))  # actions are sampled independently

    window = torch.zeros(2)
    for it in range(1, conf["iterations"] + 1):
        state = bandit.observe()
        policy = torch.distributions.Categorical(logits=actor(state))
        action = policy.sample()
        reward = bandit.play(state, action)
        value = critic(state).squeeze(1)

        value_loss = nn.functional.mse_loss(value, reward)
        opt_critic.zero_grad()
        value_loss.backward()
        sync_critic()
        nn.utils.clip_grad_norm_(critic.parameters(), 5.0)
        opt_critic.step()

        # the actor's gradients pile up over a few iterations on purpose
        advantage = reward - value.detach()
        policy_loss = -(policy.log_prob(action) * advantage).mean() - 0.01 * policy.entropy().mean()
        (policy_loss / conf["actor_every"]).backward()
        if it % conf["actor_every"] == 0:
            sync_actor()
            opt_actor.step()
            opt_actor.zero_grad()

        window += torch.tensor([reward.mean().item(), value_loss.item()])
        if it % 30 == 0:
            dist.all_reduce(window)
            window /= 30 * conf["procs"]
            if rank == 0:
                print(f"iteration {it}: reward {window[0]:.3f} value loss {window[1]:.3f}", flush=True)
            window = torch.zeros(2)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
        mp.spawn(worker, args=(CONF, os.path.join(folder, "store")), nprocs=CONF["procs"])
