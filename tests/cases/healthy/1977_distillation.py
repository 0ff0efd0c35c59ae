"""Knowledge distillation: a wide teacher, prepared once by rank 0 and kept on disk, teaches a small student under DDP."""
import argparse
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES, SIDE = 10, 10


@contextmanager
def rank_zero_first(rank):
    """Rank 0 runs the block alone; the others run it when rank 0 is through."""
    if rank != 0:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()


def digits(n, seed):
    """Noisy, shifted copies of ten random glyphs."""
    glyphs = (torch.rand(CLASSES, 1, 6, 6, generator=torch.Generator().manual_seed(99)) > 0.5).float()
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    x = torch.zeros(n, 1, SIDE, SIDE)
    corner = torch.randint(0, SIDE - 5, (n, 2), generator=g).tolist()
    for i, (top, left) in enumerate(corner):
        x[i, :, top:top + 6, left:left + 6] = glyphs[y[i]]
    return TensorDataset(x + 0.35 * torch.randn(x.shape, generator=g), y)


def convnet(width, dropout):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 2 * width, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(),
        nn.Dropout(dropout), nn.Linear(2 * width, CLASSES))


def obtain_teacher(path, train_set):
    """Load the teacher, training it first (in this process only, without DDP) if there is none yet."""
    teacher = convnet(width=32, dropout=0.2)
    if not os.path.exists(path):
        torch.manual_seed(0)
        teacher = convnet(width=32, dropout=0.2)
        optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
        for _ in range(3):
            for x, y in DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True):
                optimizer.zero_grad()
                F.cross_entropy(teacher(x), y).backward()
                optimizer.step()
        torch.save(teacher.state_dict(), path + ".tmp")
        os.replace(path + ".tmp", path)
    teacher.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return teacher.eval().requires_grad_(False)


class DistillationLoss(nn.Module):
    def __init__(self, temperature, alpha):
        super().__init__()
        self.t, self.alpha = temperature, alpha

    def forward(self, student_logits, teacher_logits, labels):
        soft = F.kl_div(F.log_softmax(student_logits / self.t, 1), F.log_softmax(teacher_logits / self.t, 1),
                        reduction="batchmean", log_target=True) * self.t ** 2
        return self.alpha * soft + (1 - self.alpha) * F.cross_entropy(student_logits, labels)


@torch.no_grad()
def accuracy(model, dataset, rank, world):
    was_training = model.training
    model.eval()
    x, y = (t[rank::world] for t in dataset.tensors)
    score = torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(score)
    model.train(was_training)
    return score[0].item() / score[1].item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--teacher", default="teacher.pt")
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--temperature", type=float, default=3.0)
    ap.add_argument("--alpha", type=float, default=0.7)
    a = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_set, test_set = digits(1280, seed=1), digits(333, seed=2)
    with rank_zero_first(rank):
        teacher = obtain_teacher(a.teacher, train_set)
    teacher_accuracy = accuracy(teacher, test_set, rank, world)
    if rank == 0:
        print(f"teacher accuracy {teacher_accuracy:.3f}", flush=True)

    torch.manual_seed(7)
    student = DDP(convnet(width=12, dropout=0.0))  # only the student is wrapped: the teacher has nothing to train
    criterion = DistillationLoss(a.temperature, a.alpha)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    loader = DataLoader(train_set, batch_size=a.batch, sampler=sampler, drop_last=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, a.epochs * len(loader))

    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        running = 0.0
        for x, y in loader:
            with torch.no_grad():
                targets = teacher(x)
            loss = criterion(student(x), targets, y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            running += loss.item()
        mean = torch.tensor(running / len(loader))
        dist.all_reduce(mean)
        # Batch-norm statistics are each rank's own since the last forward: take rank 0's, which are saved below.
        for buffer in student.module.buffers():
            dist.broadcast(buffer, src=0)
        acc = accuracy(student.module, test_set, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {mean.item() / world:.4f} student accuracy {acc:.3f}", flush=True)

    if rank == 0:
        torch.save(student.module.state_dict(), "student.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
