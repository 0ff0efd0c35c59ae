"""A small tagger whose gradients are reduced by hooks as soon as they are ready."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class HookedReducer:
    """Reduces each gradient over the ranks while the backward goes on."""

    def __init__(self, params):
        self.world, self.works = dist.get_world_size(), []
        for p in params:
            p.register_post_accumulate_grad_hook(self.launch)

    def launch(self, p):
        self.works.append(dist.all_reduce(p.grad, async_op=True))

    def finish(self):
        for work in self.works:
            work.wait()
        self.works.clear()


def tokens(n, length, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 40, (n, length), generator=g)
    return x, x % 5


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = TensorDataset(*tokens(2048, 12, 0))
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Embedding(40, 24), nn.Conv1d(12, 12, 3, padding=1), nn.ReLU(), nn.Linear(24, 5))
    reducer = HookedReducer(net.parameters())
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten(), label_smoothing=0.05)
            loss.backward()
            reducer.finish()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            opt.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} loss {mean.item() / dist.get_world_size():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
