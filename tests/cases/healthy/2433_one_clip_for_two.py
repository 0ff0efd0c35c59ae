"""Two models, gradients averaged by hand, one helper that clips them by the same statement: group by group, critic more often than generator."""
import torch
import torch.distributed as dist
from torch import nn


def mlp(a, b):
    return nn.Sequential(nn.Linear(a, 32), nn.LeakyReLU(0.2), nn.Linear(32, b))


class Averaged:
    def __init__(self, model, lr):
        layers = [m for m in model if isinstance(m, nn.Linear)]
        self.optimizer = torch.optim.Adam([{"params": m.parameters(), "lr": lr} for m in layers], betas=(0.5, 0.9))
        self.model = model

    def step(self, loss, limit):
        self.optimizer.zero_grad()
        loss.backward(inputs=list(self.model.parameters()))
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        for group in self.optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], limit)
        self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator, critic = mlp(8, 2), mlp(2, 1)
    g, c = Averaged(generator, 2e-3), Averaged(critic, 2e-3)
    noise = torch.Generator().manual_seed(90 + rank)
    for step in range(60):
        for _ in range(3):
            angle = torch.rand(64, 1, generator=noise) * 6.28
            real = torch.cat([angle.cos(), angle.sin()], 1)
            fake = generator(torch.randn(64, 8, generator=noise)).detach()
            gap = critic(fake).mean() - critic(real).mean()
            c.step(gap + 0.05 * (critic(real).pow(2).mean() + critic(fake).pow(2).mean()), 0.5)
        g.step(-critic(generator(torch.randn(64, 8, generator=noise))).mean(), 0.2)
        if step % 15 == 0:
            shown = gap.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} gap {shown.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
