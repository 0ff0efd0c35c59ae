"""Stochastic weight averaging with BatchNorm; the statistics of the average are recomputed on rank 0."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def build():
    return nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    right = seen = 0
    for x, y in loader:
        right += (net(x).argmax(1) == y).sum().item()
        seen += len(y)
    net.train()
    return right / seen


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(55)
    x = torch.randn(800, 10, generator=g)
    y = (torch.tanh(x @ torch.randn(10, 20, generator=g)) @ torch.randn(20, 3, generator=g)).argmax(1)
    train, valid = random_split(TensorDataset(x, y), [640, 160], generator=torch.Generator().manual_seed(1))
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, 32, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model = DDP(build())
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4)
    swa_model, swa_lr = AveragedModel(model.module), SWALR(opt, swa_lr=0.03, anneal_epochs=2)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(xb), yb).backward()
            opt.step()
        if epoch >= 4:
            swa_model.update_parameters(model.module)
            swa_lr.step()
        else:
            cosine.step()
        if rank == 0:
            print(f"epoch {epoch}: valid {accuracy(model.module, DataLoader(valid, 160)):.3f} lr {opt.param_groups[0]['lr']:.4f}")

    if rank == 0:
        update_bn(DataLoader(train, 64, shuffle=True), swa_model)
        print(f"averaged: valid {accuracy(swa_model, DataLoader(valid, 160)):.3f}")
        torch.save(swa_model.module.state_dict(), "swa.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
