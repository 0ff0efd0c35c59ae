# Momentum contrast after facebookresearch/moco: query encoder under DDP, key encoder and queue kept equal by construction.
import argparse
import torch
import torch.nn as nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class MoCo(nn.Module):
    def __init__(self, base_encoder, dim=16, K=128, m=0.99, T=0.2):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q = base_encoder(dim)
        self.encoder_k = base_encoder(dim)
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data.copy_(q.data)
            k.requires_grad = False  # not updated by gradient
        self.register_buffer("queue", nn.functional.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        keys = concat_all_gather(keys)
        n = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.K % n == 0
        self.queue[:, ptr:ptr + n] = keys.T
        self.queue_ptr[0] = (ptr + n) % self.K

    def forward(self, im_q, im_k):
        q = nn.functional.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = nn.functional.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._dequeue_and_enqueue(k)
        return logits, labels


@torch.no_grad()
def concat_all_gather(tensor):
    out = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(out, tensor, async_op=False)
    return torch.cat(out, dim=0)


def encoder(dim):
    return nn.Sequential(nn.Conv1d(1, 8, 5, stride=2), nn.GELU(), nn.Conv1d(8, 16, 5, stride=2), nn.GELU(),
                         nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(64, dim))


class Waves(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        f = 1 + i % 9
        def crop():
            t = torch.linspace(0, 3, 48) + torch.rand(1) * 3
            return (torch.sin(f * t) + 0.1 * torch.randn(48)).unsqueeze(0)
        return crop(), crop()


def adjust_learning_rate(optimizer, epoch, args):
    lr = args.lr
    for milestone in args.schedule:
        lr *= 0.1 if epoch >= milestone else 1.0
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("--schedule", default=[2, 3], nargs="*", type=int)
    parser.add_argument("--lr", default=0.06, type=float)
    parser.add_argument("--batch-size", default=16, type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(31)
    model = DistributedDataParallel(MoCo(encoder))
    torch.manual_seed(1000 + rank)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], args.lr, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()
    data = Waves()
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        adjust_learning_rate(optimizer, epoch, args)
        meter = torch.zeros(3)
        for im_q, im_k in loader:
            output, target = model(im_q, im_k)
            loss = criterion(output, target)
            meter += torch.tensor([loss.item() * len(target), (output.argmax(1) == target).sum().item(), len(target)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.all_reduce(meter)
        if rank == 0:
            print(f"Epoch {epoch}: loss {meter[0] / meter[2]:.3f}, contrast acc@1 {100 * meter[1] / meter[2]:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
