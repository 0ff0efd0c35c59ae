"""Exponential moving average of the weights, kept and evaluated by rank 0 alone while the others wait."""
import copy
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANK = int(os.environ["RANK"])
logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO if RANK == 0 else logging.WARNING)
log = logging.getLogger("ema")


class ModelEma:
    def __init__(self, model, decay=0.95):
        self.module = copy.deepcopy(model).eval()
        for p in self.module.parameters():
            p.requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values()):
            if e.dtype.is_floating_point:
                e.lerp_(m, 1 - self.decay)
            else:
                e.copy_(m)


def xor_of_signs(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, ((x[:, 0] > 0) ^ (x[:, 1] > 0)).float().unsqueeze(1))


@torch.no_grad()
def evaluate(net, data):
    was_training = net.training
    net.eval()
    hits = sum(((net(x) > 0) == (y > 0.5)).sum().item() for x, y in DataLoader(data, 50))
    net.train(was_training)
    return hits / len(data)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(6, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    ddp = DDP(net)
    ema = ModelEma(net) if RANK == 0 else None
    opt = torch.optim.AdamW(ddp.parameters(), lr=2e-2)
    train, test = xor_of_signs(512, 1), xor_of_signs(101, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=17)
    loader = DataLoader(train, 32, sampler=sampler)
    bce = nn.BCEWithLogitsLoss()
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = bce(ddp(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            if ema is not None:
                ema.update(net)
        if RANK == 0:  # the undivided test set, plain modules, no collective inside
            log.info("epoch %d raw %.3f ema %.3f", epoch, evaluate(net, test), evaluate(ema.module, test))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
