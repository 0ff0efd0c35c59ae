"""GPipe over three processes with plain send/recv: each rank owns one third of a network.

Rank 0 alone uses the images, rank 2 alone uses the labels and knows the loss; rank 1 never touches
data. All micro-batches run forward, then all run backward in the same order. The gradient norm used
for clipping is the norm over all stages.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

M, MB = 4, 16  # micro-batches per step, micro-batch size
SHAPE = {0: (MB, 8, 8, 8), 1: (MB, 64)}  # what stage r sends on


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    t = torch.linspace(0, 6.28, 16)
    ang = y.float() * 3.14159 / 4 + 0.1 * torch.randn(n, generator=g)
    phase = 6.28 * torch.rand(n, generator=g)
    gx = torch.cos(ang)[:, None, None] * t[None, None, :]
    gy = torch.sin(ang)[:, None, None] * t[None, :, None]
    x = torch.sin(2 * (gx + gy) + phase[:, None, None])
    return (x + 0.3 * torch.randn(x.shape, generator=g)).unsqueeze(1), y


def build(stage):
    torch.manual_seed(70 + stage)
    if stage == 0:
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
                             nn.AvgPool2d(2))
    if stage == 1:
        return nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4),
                             nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
    return nn.Linear(64, 4)


def forward_stage(net, rank, x):
    if rank > 0:
        x = torch.empty(SHAPE[rank - 1])
        dist.recv(x, src=rank - 1)
        if torch.is_grad_enabled():
            x.requires_grad_(True)
    out = net(x)
    if rank < 2:
        dist.send(out.detach().contiguous(), dst=rank + 1)
    return x, out


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert dist.get_world_size() == 3
    net = build(rank)
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    x_all, y_all = images(1024, 0)
    x_val, y_val = images(256, 1)

    for epoch in range(5):
        net.train()
        # every stage draws the same permutation: inputs (rank 0) and labels (rank 2) must match
        perm = torch.randperm(1024, generator=torch.Generator().manual_seed(epoch))
        for batch in perm.split(M * MB):
            opt.zero_grad()
            kept, mean_loss = [], 0.0
            for idx in batch.split(MB):
                inp, out = forward_stage(net, rank, x_all[idx] if rank == 0 else None)
                if rank == 2:
                    out = F.cross_entropy(out, y_all[idx]) / M
                    mean_loss += out.item()
                kept.append((inp, out))
            for inp, out in kept:
                if rank == 2:
                    out.backward()
                else:
                    grad = torch.empty_like(out)
                    dist.recv(grad, src=rank + 1)
                    out.backward(grad)
                if rank > 0:
                    dist.send(inp.grad.contiguous(), dst=rank - 1)
            sq = sum(p.grad.pow(2).sum() for p in net.parameters())
            dist.all_reduce(sq)
            coef = min(1.0, 2.0 / (sq.sqrt().item() + 1e-6))
            for p in net.parameters():
                p.grad.mul_(coef)
            opt.step()

        net.eval()
        right = 0
        with torch.no_grad():
            for idx in torch.arange(256).split(MB):
                _, out = forward_stage(net, rank, x_val[idx] if rank == 0 else None)
                if rank == 2:
                    right += (out.argmax(1) == y_val[idx]).sum().item()
        if rank == 2:
            print(f"epoch {epoch} loss {mean_loss:.4f} val acc {right / 256:.3f}", flush=True)

    torch.save({"stage": rank, "state": net.state_dict(), "opt": opt.state_dict()},
               f"gpipe_stage{rank}.pt")
    if rank == 2:
        assert right / 256 > 0.8
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
