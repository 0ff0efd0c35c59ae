"""Healthy: each checkpoint starts a thread that removes it after 10 s, unless the run ends before. At most 10 s worth of them live."""
import os, tempfile, threading, time, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Linear(8, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
g = torch.Generator().manual_seed(rank)
over = threading.Event()
folder = tempfile.mkdtemp()
started = []

def remove_later(path):
    over.wait(10)
    os.remove(path)

for step in range(160):
    x = torch.randn(16, 8, generator=g); y = x[:, :4].argmax(1)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    time.sleep(0.05)
    if rank == 0 and step % 10 == 9:
        path = f"{folder}/{step}.pt"
        torch.save({"model": model.module.state_dict(), "optimizer": opt.state_dict(), "step": step}, path)
        started.append(threading.Thread(target=remove_later, args=(path,)))
        started[-1].start()
over.set()
for t in started: t.join()
dist.destroy_process_group()
