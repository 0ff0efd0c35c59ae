"""A GAN on two moons. Gradients of both networks are averaged by hand, in one message each."""
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.nn.utils import parameters_to_vector, vector_to_parameters


@dataclass(frozen=True)
class Setup:
    steps: int = 240
    critic_steps: int = 2
    batch: int = 64
    lr: float = 1e-3
    average: float = 0.98
    penalty: float = 0.2


def moons(n, gen):
    angle = math.pi * torch.rand(n, generator=gen)
    upper = torch.rand(n, generator=gen) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x, y], 1) + 0.05 * torch.randn(n, 2, generator=gen)


def mlp(cin, cout, width=96):
    return nn.Sequential(nn.Linear(cin, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, cout))


class Player:
    """A network with its optimizer."""

    def __init__(self, net, lr):
        self.net, self.opt = net, torch.optim.Adam(net.parameters(), lr=lr, betas=(0.5, 0.9))
        start = parameters_to_vector(net.parameters()).detach()
        dist.broadcast(start, 0)
        vector_to_parameters(start, net.parameters())

    def learn(self, loss):
        params = list(self.net.parameters())
        flat = parameters_to_vector(torch.autograd.grad(loss, params))
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, g in zip(params, flat.split([p.numel() for p in params])):
            p.grad = g.view_as(p).clone()
        self.opt.step()


def critic_loss(critic, real, fake, weight):
    real = real.requires_grad_()
    score = critic(real)
    (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    return softplus(-score).mean() + softplus(critic(fake)).mean() + weight * slope.pow(2).sum(1).mean()


@torch.no_grad()
def distance(points, truth):
    """Energy distance."""
    cross = torch.cdist(points, truth).mean()
    return (2 * cross - torch.cdist(points, points).mean() - torch.cdist(truth, truth).mean()).item()


def main():
    setup = Setup()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    gen = torch.Generator().manual_seed(1234 + rank)
    maker, critic = Player(mlp(4, 2), setup.lr), Player(mlp(2, 1), setup.lr)
    smooth = parameters_to_vector(maker.net.parameters()).detach().clone()

    for step in range(1, setup.steps + 1):
        for _ in range(setup.critic_steps):
            with torch.no_grad():
                fake = maker.net(torch.randn(setup.batch, 4, generator=gen))
            critic.learn(critic_loss(critic.net, moons(setup.batch, gen), fake, setup.penalty))
        maker_loss = softplus(-critic.net(maker.net(torch.randn(setup.batch, 4, generator=gen)))).mean()
        maker.learn(maker_loss)
        smooth.lerp_(parameters_to_vector(maker.net.parameters()).detach(), 1 - setup.average)
        if step % 40 == 0:
            shown = maker_loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                final = mlp(4, 2)
                vector_to_parameters(smooth.clone(), final.parameters())
                test = torch.Generator().manual_seed(5)
                gap = distance(final(torch.randn(400, 4, generator=test)).detach(), moons(400, test))
                print(f"step {step}: maker loss {shown.item() / world:.3f}, distance to the data {gap:.4f}", flush=True)
    if rank == 0:
        torch.save({"maker": maker.net.state_dict(), "smooth": smooth}, "moons.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
