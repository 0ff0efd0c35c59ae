# quick hack for the rebuttal, TODO clean up!!  (speech commands surrogate: random "spectrograms")
import os,sys,time,json,random,argparse,warnings
warnings.filterwarnings('ignore')
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.utils.data import *
from torch.utils.data.distributed import DistributedSampler
from torch.nn.parallel import DistributedDataParallel as DDP

parser=argparse.ArgumentParser()
parser.add_argument('--seed',type=int,default=3407)
parser.add_argument('--bs',type=int,default=24)
parser.add_argument('--ep',type=int,default=4)
parser.add_argument('--mix',type=float,default=0.3)
parser.add_argument('--tag',default='rebuttal')
args,_=parser.parse_known_args()

RANK=int(os.environ.get('RANK',0)); WS=int(os.environ.get('WORLD_SIZE',1)); LR_=int(os.environ.get('LOCAL_RANK',0))
DDP_ON = WS>1
if DDP_ON: dist.init_process_group('nccl' if torch.cuda.is_available() else 'gloo')
dev = f'cuda:{LR_}' if torch.cuda.is_available() else 'cpu'
if dev!='cpu': torch.cuda.set_device(LR_)
_print=print
def print(*a,**k):
    if RANK==0: _print(*a,**k,flush=True)
def seed_all(s): random.seed(s); np.random.seed(s); torch.manual_seed(s)
seed_all(args.seed)            # same on all -> same init (DDP would broadcast anyway)

class DS(Dataset):
    def __init__(s,n,split):
        rs=np.random.RandomState(0 if split=='train' else 1); s.split=split
        tmpl=np.random.RandomState(9).randn(7,16,20)
        s.lab=rs.randint(0,7,n); s.d=(tmpl[s.lab]+1.5*rs.randn(n,16,20)).astype('f')
    def __len__(s): return len(s.lab)
    def __getitem__(s,i):
        x=s.d[i]
        if s.split=='train':
            k=np.random.randint(0,5)
            x=x.copy(); x[:,k:k+3]=0          # specaug-ish
        return torch.from_numpy(x), int(s.lab[i])

class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.c1=nn.Conv1d(16,32,3,padding=1); s.n1=nn.GroupNorm(4,32); s.g=nn.GRU(32,32,batch_first=True); s.att=nn.Linear(32,1); s.o=nn.Linear(32,7)
    def forward(s,x):
        h,_=s.g(F.relu(s.n1(s.c1(x))).transpose(1,2)); w=s.att(h).softmax(1)
        return s.o((w*h).sum(1))

m=M().to(dev)
if DDP_ON: m=DDP(m, device_ids=[LR_] if dev!='cpu' else None)
net=m.module if DDP_ON else m
decay=[p for n,p in net.named_parameters() if p.ndim>1]; nodecay=[p for n,p in net.named_parameters() if p.ndim<=1]
opt=torch.optim.AdamW([{'params':decay,'weight_decay':1e-2},{'params':nodecay,'weight_decay':0}],lr=3e-3)
seed_all(args.seed+RANK*1000)  # from here on augmentations differ by rank
tr,te=DS(504,'train'),DS(140,'test')
sp=DistributedSampler(tr,WS,RANK,shuffle=True,seed=args.seed) if DDP_ON else RandomSampler(tr)
tl=DataLoader(tr,args.bs//WS,sampler=sp,num_workers=0,drop_last=True)
sched=torch.optim.lr_scheduler.OneCycleLR(opt,6e-3,steps_per_epoch=len(tl),epochs=args.ep)
hist=[]; best=-1
for ep in range(args.ep):
    if DDP_ON: sp.set_epoch(ep)
    m.train(); t0=time.time(); L=[]
    for it,(x,y) in enumerate(tl):
        x,y=x.to(dev),torch.as_tensor(y).to(dev)
        if random.random()<args.mix:
            lam=np.random.beta(.4,.4); p=torch.randperm(len(x))
            o=m(lam*x+(1-lam)*x[p]); loss=lam*F.cross_entropy(o,y)+(1-lam)*F.cross_entropy(o,y[p])
        else: loss=F.cross_entropy(m(x),y,label_smoothing=.05)
        opt.zero_grad(); loss.backward()
        gn=nn.utils.clip_grad_norm_(m.parameters(),2.)
        opt.step(); sched.step(); L.append(loss.item())
    # eval: every rank its own slice
    m.eval(); ok=torch.zeros(2)
    with torch.inference_mode():
        for i in range(RANK*20,len(te),WS*20):
            xs=torch.stack([te[j][0] for j in range(i,min(i+20,len(te)))]).to(dev); ys=torch.tensor([te[j][1] for j in range(i,min(i+20,len(te)))])
            ok+=torch.tensor([(net(xs).argmax(1).cpu()==ys).sum().item(),len(ys)])
    tl_=torch.tensor([np.mean(L)],dtype=torch.float)
    if DDP_ON: dist.all_reduce(ok); dist.all_reduce(tl_); tl_/=WS
    acc=(ok[0]/ok[1]).item(); assert ok[1]==len(te)
    hist.append(dict(ep=ep,loss=round(tl_.item(),4),acc=round(acc,4)))
    if acc>best:
        best=acc
        if RANK==0: torch.save(net.state_dict(),f'/tmp/{args.tag}_790.pt')
    print(f'[{args.tag}] ep{ep} loss {tl_.item():.3f} acc {acc:.3f} best {best:.3f} lr {sched.get_last_lr()[0]:.2e} {time.time()-t0:.1f}s')
if RANK==0:
    with open(f'/tmp/{args.tag}_790.json','w') as f: json.dump(hist,f)
if DDP_ON: dist.barrier(); dist.destroy_process_group()
