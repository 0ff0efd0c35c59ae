from __future__ import print_function
import argparse

import torch
import torch.distributed as dist
import torch.utils.data
from torch import nn, optim
from torch.nn import functional as F

parser = argparse.ArgumentParser(description='VAE example, distributed')
parser.add_argument('--batch-size', type=int, default=32)
parser.add_argument('--epochs', type=int, default=4)
parser.add_argument('--seed', type=int, default=1)
args = parser.parse_args()

dist.init_process_group('gloo')
world, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(args.seed + 100 * rank)  # reparameterisation noise; DDP makes the weights equal


def bars(n, seed):
    g = torch.Generator().manual_seed(seed)
    img = torch.zeros(n, 8, 8)
    for k in range(n):
        img[k, torch.randint(8, (1,), generator=g)] = 1
        img[k, :, torch.randint(8, (1,), generator=g)] = 1
    return torch.utils.data.TensorDataset(img)


train_set, test_set = bars(512, 5), bars(128, 6)
train_sampler = torch.utils.data.DistributedSampler(train_set)
train_loader = torch.utils.data.DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
test_loader = torch.utils.data.DataLoader(
    test_set, batch_size=args.batch_size, sampler=torch.utils.data.DistributedSampler(test_set, shuffle=False))


class VAE(nn.Module):
    def __init__(self):
        super(VAE, self).__init__()
        self.fc1 = nn.Linear(64, 48)
        self.fc21 = nn.Linear(48, 6)
        self.fc22 = nn.Linear(48, 6)
        self.fc3 = nn.Linear(6, 48)
        self.fc4 = nn.Linear(48, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


model = nn.parallel.DistributedDataParallel(VAE())
optimizer = optim.Adam(model.parameters(), lr=1e-3 * 3)


def loss_function(recon_x, x, mu, logvar):
    """per image, averaged over the batch (all batches are equally large)"""
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction='sum')
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return (BCE + KLD) / x.size(0)


def train(epoch):
    model.train()
    train_loss = torch.zeros(2)
    train_sampler.set_epoch(epoch)
    for batch_idx, (data,) in enumerate(train_loader):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += torch.tensor([loss.item() * len(data), len(data)])
        optimizer.step()
    dist.all_reduce(train_loss)
    if rank == 0:
        print('====> Epoch: {} Average loss: {:.4f}'.format(epoch, train_loss[0] / train_loss[1]))


def test(epoch):
    model.eval()
    test_loss = torch.zeros(2)
    with torch.no_grad():
        for data, in test_loader:
            recon_batch, mu, logvar = model(data)
            test_loss += torch.tensor([loss_function(recon_batch, data, mu, logvar).item() * len(data), len(data)])
    dist.reduce(test_loss, dst=0)
    if rank == 0:
        print('====> Test set loss: {:.4f}'.format(test_loss[0] / test_loss[1]))


if __name__ == "__main__":
    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test(epoch)
    dist.destroy_process_group()
