"""ULMFiT-like gradual unfreezing that is right: parameter groups are added when they thaw, DDP is made with everything trainable and find_unused off."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TextNet(nn.Module):
    def __init__(self, vocab=60, d=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.rnn = nn.GRU(d, 32, batch_first=True)
        self.head = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, x):
        return self.head(self.rnn(self.emb(x))[1][0])


def reviews(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    strong = torch.rand(n, 10, generator=g) < 0.3
    return TensorDataset(torch.where(strong, 20 * y[:, None] + torch.randint(0, 20, (n, 10), generator=g), torch.randint(0, 60, (n, 10), generator=g)), y)


def main(lr=5e-3):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    net = TextNet()
    model = DDP(net)
    stages = [("head", net.head, 1.0), ("rnn", net.rnn, 0.5), ("emb", net.emb, 0.25)]
    optimizer = torch.optim.Adam(stages[0][1].parameters(), lr=lr)
    data, valid = reviews(480, 1), reviews(96, 2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=24, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=24, sampler=DistributedSampler(valid, shuffle=False))
    for epoch in range(6):
        if epoch and epoch % 2 == 0:
            name, part, factor = stages[epoch // 2]
            optimizer.add_param_group({"params": part.parameters(), "lr": lr * factor})
            if rank == 0:
                print(f"thawed {name}")
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            model.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        hits = torch.zeros(())
        with torch.no_grad():
            for x, y in valid_loader:
                hits += (model(x).argmax(1) == y).sum()
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {hits.item() / len(valid):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
