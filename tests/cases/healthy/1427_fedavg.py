"""Federated averaging over clients with unequal, non-iid shards."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Client:
    def __init__(self, uid, classes, n):
        g = torch.Generator().manual_seed(uid)
        y = torch.tensor(classes)[torch.randint(0, len(classes), (n,), generator=g)]
        x = nn.functional.one_hot(y, 6).float() @ torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
        self.n = n
        self.loader = DataLoader(TensorDataset(x + 0.7 * torch.randn(n, 12, generator=g), y), batch_size=16, shuffle=True,
                                 generator=torch.Generator().manual_seed(uid))

    def local_update(self, model, epochs=1, lr=0.1):
        opt = torch.optim.SGD(model.parameters(), lr=lr)
        for _ in range(epochs):
            for x, y in self.loader:
                opt.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                opt.step()
        return model.state_dict()


class Server:
    def __init__(self, model):
        self.global_model = model
        self.worker = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 6))

    def round(self, clients):
        total = {k: torch.zeros_like(v) for k, v in self.global_model.state_dict().items()}
        weight = torch.zeros(1)
        for c in clients:
            self.worker.load_state_dict(self.global_model.state_dict())
            for k, v in c.local_update(self.worker).items():
                total[k] += c.n * v
            weight += c.n
        dist.all_reduce(weight)
        for v in total.values():
            dist.all_reduce(v)
        self.global_model.load_state_dict({k: v / weight for k, v in total.items()})


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    server = Server(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 6)))
    clients = [Client(uid, [uid % 6, (uid + 1) % 6], 48 + 40 * uid) for uid in range(rank, 6, world)]
    for r in range(10):
        server.round(clients)
        right = torch.zeros(2)
        with torch.no_grad():
            for c in clients:
                for x, y in c.loader:
                    right += torch.tensor([(server.global_model(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(right)
        if rank == 0:
            print(f"round {r}: accuracy {right[0].item() / right[1].item():.3f} over {int(right[1])} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
