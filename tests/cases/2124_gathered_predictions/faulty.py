"""Topic classification with a small trainer and callbacks."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TOPICS = 5


class Articles(Dataset):
    """Bags of word ids; the topic decides which part of the vocabulary is preferred."""

    def __init__(self, count, seed, vocab=500, length=30):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(TOPICS, (count,), generator=g)
        common = torch.randint(vocab, (count, length), generator=g)
        own = self.labels[:, None] * (vocab // TOPICS) + torch.randint(vocab // TOPICS, (count, length), generator=g)
        self.words = torch.where(torch.rand(count, length, generator=g) < 0.35, own, common)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.words[i], self.labels[i]


class TopicNet(nn.Module):
    def __init__(self, vocab=500, dim=32):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, TOPICS))

    def forward(self, words):
        return self.mlp(self.bag(words))


class Callback:
    def on_epoch_end(self, trainer, epoch):
        pass


class PrintLoss(Callback):
    def on_epoch_end(self, trainer, epoch):
        mean = torch.tensor([trainer.loss_sum / trainer.steps])
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: train loss {mean.item() / dist.get_world_size():.4f}", flush=True)


class Evaluate(Callback):
    def __init__(self, dataset, batch_size):
        self.dataset = dataset
        sampler = DistributedSampler(dataset, shuffle=False)
        self.loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)

    @torch.no_grad()
    def predict(self, model):
        model.eval()
        local = torch.cat([model(words).argmax(dim=1) for words, _ in self.loader])
        model.train()
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local)
        return torch.cat(parts)[: len(self.dataset)]

    def on_epoch_end(self, trainer, epoch):
        predicted = self.predict(trainer.model)
        accuracy = (predicted == self.dataset.labels).float().mean().item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: validation accuracy {100 * accuracy:.1f}%", flush=True)


class Trainer:
    def __init__(self, model, train_set, args, callbacks):
        self.model = DDP(model)
        self.sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
        self.loader = DataLoader(train_set, batch_size=args.batch, sampler=self.sampler)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        warm, total = 10, args.epochs * len(self.loader)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: min(1, (s + 1) / warm) * 0.5 * (1 + math.cos(math.pi * s / total)))
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
        self.callbacks = callbacks
        self.epochs = args.epochs

    def train(self):
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            self.loss_sum, self.steps = 0.0, 0
            for words, labels in self.loader:
                loss = self.criterion(self.model(words), labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.schedule.step()
                self.loss_sum += loss.item()
                self.steps += 1
            for cb in self.callbacks:
                cb.on_epoch_end(self, epoch)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=5)
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed + dist.get_rank())
    train_set, val_set = Articles(2048, seed=1), Articles(515, seed=2)
    trainer = Trainer(TopicNet(), train_set, args, [PrintLoss(), Evaluate(val_set, args.batch)])
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
