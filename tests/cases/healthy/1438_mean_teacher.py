"""Mean teacher: supervised loss on few labels, consistency with an EMA teacher on the rest."""
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EMA:
    def __init__(self, model, decay):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        d = min(self.decay, 1 - 1 / (self.updates + 1))
        for t, s in zip(self.model.state_dict().values(), model.state_dict().values()):
            t.mul_(d).add_(s, alpha=1 - d)


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    r = torch.rand(n, generator=g) * 3
    a = r * 2 + y * torch.pi
    return torch.stack([r * a.cos(), r * a.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g), y


def loader_for(data, batch):
    sampler = DistributedSampler(data, drop_last=True)
    return sampler, DataLoader(data, batch, sampler=sampler, drop_last=True)


def cycle(sampler, loader):
    k = 0
    while True:
        sampler.set_epoch(k)
        yield from loader
        k += 1


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    student = DDP(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))
    teacher = EMA(student.module, 0.98)
    opt = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    lab_s, lab_l = loader_for(TensorDataset(*spirals(128, 1)), 16)
    unl_s, unl_l = loader_for(TensorDataset(spirals(768, 2)[0]), 32)
    labelled = cycle(lab_s, lab_l)
    test_x, test_y = spirals(400, 3)
    torch.manual_seed(50 + rank)
    for epoch in range(5):
        unl_s.set_epoch(epoch)
        ramp = min(1.0, (epoch + 1) / 3)
        student.train()
        for (u,) in unl_l:
            x, y = next(labelled)
            weak, strong = u + 0.02 * torch.randn_like(u), u + 0.1 * torch.randn_like(u)
            with torch.no_grad():
                target = teacher.model(weak).softmax(1)
            logits = student(torch.cat([x, strong]))
            loss = F.cross_entropy(logits[:len(x)], y) + ramp * F.mse_loss(logits[len(x):].softmax(1), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            teacher.update(student.module)
        if rank == 0:
            with torch.no_grad():
                print(f"epoch {epoch}: teacher accuracy {(teacher.model(test_x).argmax(1) == test_y).float().mean().item():.3f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
