"""Cross-validation: fold k is trained by process k mod world_size."""
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

FOLDS = 5


def table(n=250):
    g = torch.Generator().manual_seed(44)
    x = torch.randn(n, 7, generator=g)
    return TensorDataset(x, (x[:, 0] * x[:, 1] + x[:, 2] > 0).float())


class FoldRunner:
    def __init__(self, data, fold, perm):
        held = set(perm[fold::FOLDS].tolist())
        self.fold = fold
        self.train = Subset(data, [i for i in range(len(data)) if i not in held])
        self.test = Subset(data, sorted(held))

    def run(self, epochs):
        torch.manual_seed(100 + self.fold)
        net = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
        opt = torch.optim.Adam(net.parameters(), lr=1e-2)
        best, patience = 0.0, 0
        for _ in range(epochs):
            net.train()
            for x, y in DataLoader(self.train, batch_size=25, shuffle=True):
                opt.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(net(x).squeeze(1), y).backward()
                opt.step()
            acc = self.score(net)
            if acc > best:
                best, patience = acc, 0
            else:
                patience += 1
            if patience == 4:
                break
        return best

    @torch.no_grad()
    def score(self, net):
        net.eval()
        x, y = next(iter(DataLoader(self.test, batch_size=len(self.test))))
        return ((net(x).squeeze(1) > 0).float() == y).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = table()
    perm = torch.randperm(len(data), generator=torch.Generator().manual_seed(7))
    scores = torch.zeros(FOLDS)
    for fold in range(rank, FOLDS, world):
        scores[fold] = FoldRunner(data, fold, perm).run(epochs=12)
    dist.all_reduce(scores)
    if rank == 0:
        print("folds", [round(s, 3) for s in scores.tolist()], f"mean {scores.mean().item():.3f} +- {scores.std().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
