import contextlib, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

class SAM:
    def __init__(self, params, base, rho=0.05): self.params = list(params); self.base = base; self.rho = rho; self.e = {}
    @torch.no_grad()
    def perturb(self):
        norm = torch.norm(torch.stack([p.grad.norm() for p in self.params]))
        for p in self.params:
            e = p.grad * (self.rho / (norm + 1e-12)); p.add_(e); self.e[p] = e
    @torch.no_grad()
    def restore(self):
        for p in self.params: p.sub_(self.e[p])

def main():
    dist.init_process_group("gloo"); torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)); model = DDP(net)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9); sam = SAM(model.parameters(), base)
    g = torch.Generator().manual_seed(5); x = torch.randn(512, 16, generator=g); y = x[:, :4].argmax(1)
    ds = TensorDataset(x, y); s = DistributedSampler(ds); dl = DataLoader(ds, 16, sampler=s)
    for epoch in range(4):
        s.set_epoch(epoch)
        for a, b in dl:
            base.zero_grad()
            with model.no_sync():
                nn.functional.cross_entropy(model(a), b).backward()
            sam.perturb(); base.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            sam.restore(); base.step()
    dist.destroy_process_group()
main()
