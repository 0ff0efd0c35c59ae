"""Graph regression/classification on random molecules; accuracy over all ranks."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CONFIG = {"epochs": 4, "batch_size": 14, "lr": 4e-3, "hidden": 32, "nodes": 7}


class Molecules(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        k = CONFIG["nodes"]
        a = (torch.rand(n, k, k, generator=g) < 0.35).float().triu(1)
        self.adj = a + a.transpose(1, 2)
        self.feat = torch.randn(n, k, 5, generator=g)
        self.label = (self.adj.sum((1, 2)) > 14).long()

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.adj[i], self.feat[i], self.label[i]


class GNN(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.l1, self.l2 = nn.Linear(6, hidden), nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, adj, feat):
        h = torch.cat([feat, adj.sum(2, keepdim=True)], 2)
        h = torch.relu(self.l1(h + adj @ h))
        h = torch.relu(self.l2(h + adj @ h))
        return self.out(h.mean(1))


def train(model, loader, opt):
    model.train()
    for adj, feat, label in loader:
        opt.zero_grad()
        nn.functional.cross_entropy(model(adj, feat), label).backward()
        opt.step()


@torch.no_grad()
def test(model, loader):
    model.eval()
    correct = torch.tensor(0)
    total = torch.tensor(0)
    for adj, feat, label in loader:
        correct += (model(adj, feat).argmax(1) == label).sum()
        total += label.numel()
    dist.all_reduce(correct)
    return correct.item() / total.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(GNN(CONFIG["hidden"]))
    opt = torch.optim.Adam(model.parameters(), lr=CONFIG["lr"])
    train_set, test_set = Molecules(280, 1), Molecules(84, 2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, CONFIG["batch_size"], sampler=sampler)
    test_loader = DataLoader(test_set, CONFIG["batch_size"], sampler=DistributedSampler(test_set, shuffle=False))
    for epoch in range(CONFIG["epochs"]):
        sampler.set_epoch(epoch)
        train(model, train_loader, opt)
        acc = test(model, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} test accuracy {100 * acc:.1f}%", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
