"""Hogwild: workers update one model in shared memory and report through a queue."""
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(15, 40), nn.Linear(40, 3)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def blobs(seed, n=400):
    centre = 2 * torch.randn(3, 15, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    return centre[y] + torch.randn(n, 15, generator=g), y


def worker(uid, shared, steps_done, results):
    torch.set_num_threads(1)
    torch.manual_seed(uid)
    x, y = blobs(10 + uid)
    opt = torch.optim.SGD(shared.parameters(), lr=0.02)
    for epoch in range(5):
        total = 0.0
        for idx in torch.randperm(len(x)).split(20):
            opt.zero_grad()
            loss = F.cross_entropy(shared(x[idx]), y[idx])
            loss.backward()
            opt.step()
            total += loss.item()
            with steps_done.get_lock():
                steps_done.value += 1
        results.put((uid, epoch, total / 20))
    results.put(None)


def main():
    mp.set_start_method("spawn")
    torch.manual_seed(1)
    model = Net()
    model.share_memory()
    counter, results = mp.Value("i", 0), mp.Queue()
    crew = [mp.Process(target=worker, args=(i, model, counter, results)) for i in range(2)]
    for p in crew:
        p.start()
    open_workers = len(crew)
    while open_workers:
        item = results.get()
        if item is None:
            open_workers -= 1
        else:
            print("worker %d epoch %d loss %.4f" % item)
    for p in crew:
        p.join()
    x, y = blobs(999)
    with torch.no_grad():
        acc = (model(x).argmax(1) == y).float().mean().item()
    print(f"{counter.value} updates, accuracy {acc:.3f}")


if __name__ == "__main__":
    main()
