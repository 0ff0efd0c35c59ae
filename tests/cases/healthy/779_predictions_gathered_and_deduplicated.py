"""Evaluation with a padding DistributedSampler: predictions travel with their sample index, rank 0 drops the duplicates before it computes AUC."""
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Fraud(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 9, generator=g)
        logit = self.x[:, 0] * 2 - self.x[:, 1] - 1.5
        self.y = (torch.rand(n, generator=g) < logit.sigmoid()).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i], self.y[i]


def auc(score, label):
    order = score.argsort()
    rank = torch.empty_like(order, dtype=torch.float)
    rank[order] = torch.arange(1, len(score) + 1, dtype=torch.float)
    pos = label.sum()
    return ((rank[label > 0].sum() - pos * (pos + 1) / 2) / (pos * (len(label) - pos))).item()


@torch.no_grad()
def evaluate(net, loader, n):
    net.eval()
    rows = []
    for i, x, y in loader:
        rows += list(zip(i.tolist(), net(x).squeeze(1).tolist(), y.tolist()))
    box = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(rows, box, dst=0)
    if dist.get_rank() == 0:
        unique = {i: (s, y) for part in box for i, s, y in part}
        assert len(unique) == n
        s, y = (torch.tensor(t) for t in zip(*unique.values()))
        return auc(s, y)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    net = DDP(nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)))
    opt = torch.optim.Adam(net.parameters(), 3e-3)
    tr, te = Fraud(512, 0), Fraud(151, 1)                        # 151: one sample is padded
    smp = DistributedSampler(tr)
    dl = DataLoader(tr, 16, sampler=smp)
    tl = DataLoader(te, 16, sampler=DistributedSampler(te, shuffle=False))
    pw = torch.tensor([3.0])
    for ep in range(4):
        smp.set_epoch(ep)
        net.train()
        for _, x, y in dl:
            opt.zero_grad()
            F.binary_cross_entropy_with_logits(net(x).squeeze(1), y, pos_weight=pw).backward()
            opt.step()
        a = evaluate(net, tl, len(te))
        if a is not None:
            print(f"epoch {ep} auc {a:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
