"""News classifier (CNN over word vectors) with sharded validation."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class NewsClassifier(nn.Module):
    def __init__(self, vocab=60, dim=16, channels=32, hidden=40, classes=4, dropout_p=0.4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.convnet = nn.Sequential(nn.Conv1d(dim, channels, 3), nn.ELU(), nn.Conv1d(channels, channels, 3, stride=2), nn.ELU())
        self._dropout_p = dropout_p
        self.fc1 = nn.Linear(channels, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x_in, apply_softmax=False):
        features = self.convnet(self.emb(x_in).permute(0, 2, 1))
        features = F.avg_pool1d(features, features.size(2)).squeeze(2)
        features = F.dropout(features, p=self._dropout_p)
        prediction = self.fc2(F.relu(self.fc1(features)))
        return prediction.softmax(1) if apply_softmax else prediction


def articles(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = torch.randint(1, 60, (n, 18), generator=g)
    topic = torch.randint(0, 12, (n, 6), generator=g) + 1 + 12 * y[:, None]
    x[:, 4:10] = topic
    return TensorDataset(x, y)


def run_epoch(model, loader, optimizer=None):
    model.train(optimizer is not None)
    stats = torch.zeros(3)
    with torch.set_grad_enabled(optimizer is not None):
        for x, y in loader:
            y_pred = model(x)
            loss = F.cross_entropy(y_pred, y)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            stats += torch.tensor([loss.item() * len(y), (y_pred.argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(stats)
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1337)
    model = DDP(NewsClassifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    train, val = articles(256, 1), articles(96, 2)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=16, sampler=sampler)
    val_loader = DataLoader(val, batch_size=16, sampler=DistributedSampler(val, shuffle=False))
    state = {"best": 1e9, "epoch": 0}
    for epoch in range(5):
        sampler.set_epoch(epoch)
        train_loss, train_acc = run_epoch(model, train_loader, optimizer)
        val_loss, val_acc = run_epoch(model, val_loader)
        if dist.get_rank() == 0:
            print(f"{epoch} train {train_loss:.3f}/{train_acc:.2f} val {val_loss:.3f}/{val_acc:.2f}", flush=True)
            if val_loss < state["best"]:
                state.update(best=val_loss, epoch=epoch)
                torch.save(model.module.state_dict(), "news.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
