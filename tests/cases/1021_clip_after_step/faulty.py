"""Node classification by neighbour sampling with a trainer class (GraphStorm-like)."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Sage(nn.Module):
    def __init__(self, dim=10, hidden=32, classes=4):
        super().__init__()
        self.own, self.nb = nn.Linear(dim, hidden), nn.Linear(dim, hidden)
        self.cls = nn.Linear(hidden, classes)

    def forward(self, x, neigh):
        return self.cls(F.relu(self.own(x) + self.nb(neigh.mean(1))))


class NodeData:
    def __init__(self, nodes=240, fanout=5):
        g = torch.Generator().manual_seed(1366)
        self.label = torch.arange(nodes) % 4
        centre = 3.0 * torch.randn(4, 10, generator=g)
        self.feat = centre[self.label] + 4.0 * torch.randn(nodes, 10, generator=g)
        same = torch.stack([torch.nonzero(self.label == c).flatten() for c in range(4)])
        pick = torch.randint(0, same.shape[1], (nodes, fanout), generator=g)
        self.neigh = same[self.label].gather(1, pick)
        self.ids = TensorDataset(torch.arange(nodes))

    def batch(self, ids):
        return self.feat[ids], self.feat[self.neigh[ids]], self.label[ids]


class NodePredictionTrainer:
    def __init__(self, model, data, lr, max_grad_norm=None, grad_norm_type=2.0):
        self.model = DistributedDataParallel(model)
        self.data = data
        self.max_grad_norm, self.grad_norm_type = max_grad_norm, grad_norm_type
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def fit(self, num_epochs, batch_size):
        sampler = DistributedSampler(self.data.ids)
        loader = DataLoader(self.data.ids, batch_size=batch_size, sampler=sampler)
        for epoch in range(num_epochs):
            sampler.set_epoch(epoch)
            total = torch.zeros(2)
            for (ids,) in loader:
                x, neigh, label = self.data.batch(ids)
                loss = F.cross_entropy(self.model(x, neigh), label)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                if self.max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm, self.grad_norm_type)
                total += torch.tensor([loss.item() * len(ids), len(ids)])
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"Epoch {epoch}: loss {(total[0] / total[1]).item():.4f}", flush=True)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    trainer = NodePredictionTrainer(Sage(), NodeData(), lr=0.05, max_grad_norm=0.5)
    trainer.fit(num_epochs=4, batch_size=15)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
