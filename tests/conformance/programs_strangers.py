"""Programs as strangers write them: adversarial, contrastive, graph, recurrent, recommendation and
meta-learning scripts with optimizers of their own. Same rules as :mod:`programs`, which registers
them."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from programs import program
from torch import nn


@program
def stylegan_r1(device):
    """Mapping network, modulated convolutions, a gradient penalty, an average by hand."""

    class ModConv(nn.Module):
        def __init__(self, i, o, up=False):
            super().__init__()
            self.w = nn.Parameter(torch.randn(o, i, 3, 3))
            self.a = nn.Linear(64, i)
            self.up = up
            self.b = nn.Parameter(torch.zeros(o))
            self.ns = nn.Parameter(torch.zeros(1))

        def forward(self, x, w):
            batch, channels, height, width = x.shape
            st = self.a(w) + 1
            k = self.w[None] * st[:, None, :, None, None]
            k = k * torch.rsqrt(k.pow(2).sum((2, 3, 4), keepdim=True) + 1e-08)
            if self.up:
                x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
                height, width = (2 * height, 2 * width)
            x = F.conv2d(
                x.reshape(1, batch * channels, height, width),
                k.reshape(-1, channels, 3, 3),
                padding=1,
                groups=batch,
            ).reshape(batch, -1, height, width)
            return F.leaky_relu_(
                x
                + self.ns * torch.randn(batch, 1, height, width, device=x.device)
                + self.b[:, None, None],
                0.2,
            )

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = nn.Sequential(
                *[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.LeakyReLU(0.2))]
            )
            self.c = nn.Parameter(torch.randn(1, 64, 4, 4))
            self.l = nn.ModuleList(
                [
                    ModConv(64, 64),
                    ModConv(64, 64, True),
                    ModConv(64, 32, True),
                    ModConv(32, 32, True),
                ]
            )
            self.o = nn.Conv2d(32, 3, 1)

        def forward(self, z):
            w = self.m(F.normalize(z, dim=1))
            x = self.c.expand(z.shape[0], -1, -1, -1)
            for layer in self.l:
                x = layer(x, w)
            return (self.o(x), w)

    critic = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 64, 3, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(64 * 64, 1),
    ).to(device)
    g = Generator().to(device)
    ema = copy.deepcopy(g).eval()
    og = torch.optim.Adam(g.parameters(), 0.001, betas=(0.0, 0.99))
    od = torch.optim.Adam(critic.parameters(), 0.001, betas=(0.0, 0.99))

    def step():
        real = torch.randn(8, 3, 32, 32, device=device, requires_grad=True)
        critic.requires_grad_(True)
        od.zero_grad()
        fake, _ = g(torch.randn(8, 64, device=device))
        pr = critic(real)
        loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-pr).mean()
        (gr,) = torch.autograd.grad(pr.sum(), real, create_graph=True)
        (loss + 5 * gr.square().sum((1, 2, 3)).mean()).backward()
        od.step()
        critic.requires_grad_(False)
        og.zero_grad()
        fake, _ = g(torch.randn(8, 64, device=device))
        F.softplus(-critic(fake)).mean().backward()
        og.step()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), g.parameters(), strict=True):
                a.copy_(b.lerp(a, 0.999))

    return step


@program
def adjoint_ode(device):
    """A function of its own integrates backward with vector-Jacobian products."""
    f = nn.Sequential(nn.Linear(64, 128), nn.Softplus(), nn.Linear(128, 64)).to(device)
    ps = tuple(f.parameters())

    class Adj(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, *p):
            with torch.no_grad():
                for _ in range(8):
                    y = y + 0.1 * f(y)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, g):
            (y,) = ctx.saved_tensors
            gp = [torch.zeros_like(p) for p in ps]
            for _ in range(8):
                with torch.enable_grad():
                    y = y.detach().requires_grad_(True)
                    v = f(y)
                    gs = torch.autograd.grad(v, (y, *ps), g, allow_unused=True)
                y = y - 0.1 * v
                g = g + 0.1 * gs[0]
                gp = [a + 0.1 * b for a, b in zip(gp, gs[1:], strict=True)]
            return (g, *gp)

    o = torch.optim.SGD(ps, 0.01)

    def step():
        o.zero_grad()
        Adj.apply(torch.randn(128, 64, device=device), *ps).square().mean().backward()
        o.step()

    return step


@program
def dqn_replay(device):
    q = nn.Sequential(
        nn.Conv2d(4, 16, 8, 4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 81, 256),
        nn.ReLU(),
        nn.Linear(256, 6),
    ).to(device)
    tq = copy.deepcopy(q)
    tq.load_state_dict(q.state_dict())
    o = torch.optim.RMSprop(q.parameters(), 0.00025, alpha=0.95, eps=0.01)
    mem = torch.zeros(64, 4, 84, 84, dtype=torch.uint8, device=device)
    n = [0]

    def step():
        i = torch.randint(0, 63, (32,))
        s = mem[i.to(device)].float() / 255
        s2 = mem[(i + 1).to(device)].float().div_(255)
        a = torch.randint(0, 6, (32, 1)).to(device)
        r = torch.randn(32, 1, device=device)
        with torch.no_grad():
            y = r + 0.99 * tq(s2).gather(1, q(s2).argmax(1, keepdim=True))
        loss = F.smooth_l1_loss(q(s).gather(1, a), y)
        o.zero_grad()
        loss.backward()
        for p in q.parameters():
            p.grad.data.clamp_(-1, 1)
        o.step()
        n[0] += 1
        if n[0] % 2 == 0:
            tq.load_state_dict(q.state_dict())

    return step


@program
def moco_queue(device):

    def enc():
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 128),
        ).to(device)

    q, k = (enc(), enc())
    queue = F.normalize(torch.randn(128, 4096, device=device), dim=0)
    ptr = [0]
    for a, b in zip(q.parameters(), k.parameters(), strict=True):
        b.data.copy_(a.data)
        b.requires_grad = False
    o = torch.optim.SGD(q.parameters(), 0.03, momentum=0.9)

    def step():
        a, b = (
            torch.randn(64, 3, 32, 32, device=device),
            torch.randn(64, 3, 32, 32, device=device),
        )
        zq = F.normalize(q(a), dim=1)
        with torch.no_grad():
            for x, y in zip(q.parameters(), k.parameters(), strict=True):
                y.data = y.data * 0.999 + x.data * 0.001
            perm = torch.randperm(64, device=device)
            zk = F.normalize(k(b[perm]), dim=1)[torch.argsort(perm)]
        pos = torch.einsum("nc,nc->n", [zq, zk]).unsqueeze(-1)
        neg = torch.einsum("nc,ck->nk", [zq, queue.clone().detach()])
        loss = F.cross_entropy(
            torch.cat([pos, neg], 1) / 0.07, torch.zeros(64, dtype=torch.long, device=device)
        )
        o.zero_grad()
        loss.backward()
        o.step()
        queue[:, ptr[0] : ptr[0] + 64] = zk.T
        ptr[0] = (ptr[0] + 64) % 4096

    return step


@program
def byol_barlow(device):
    f = nn.Sequential(
        nn.Linear(128, 512), nn.BatchNorm1d(512), nn.ReLU(inplace=True), nn.Linear(512, 256)
    ).to(device)
    o = torch.optim.Rprop(f.parameters(), 0.001)

    def step():
        a, b = (f(torch.randn(128, 128, device=device)), f(torch.randn(128, 128, device=device)))
        a = (a - a.mean(0)) / a.std(0)
        b = (b - b.mean(0)) / b.std(0)
        c = a.T @ b / 128
        on = torch.diagonal(c).add_(-1).pow_(2).sum()
        n = 256
        off = c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten().pow_(2).sum()
        o.zero_grad()
        (on + 0.005 * off).backward()
        o.step()

    return step


@program
def muon(device):
    """Momentum made orthogonal by Newton-Schulz for matrices, AdamW for the rest."""

    def ns(gradient, steps=5):
        x = gradient.bfloat16()
        if gradient.size(0) > gradient.size(1):
            x = x.T
        x = x / (x.norm() + 1e-07)
        for _ in range(steps):
            a = x @ x.T
            b = -4.775 * a + 2.0315 * a @ a
            x = 3.4445 * x + b @ x
        return (x.T if gradient.size(0) > gradient.size(1) else x).to(gradient.dtype)

    class Muon(torch.optim.Optimizer):
        def __init__(self, p, lr=0.02):
            super().__init__(p, dict(lr=lr, m=0.95))

        @torch.no_grad()
        def step(self):
            for g in self.param_groups:
                for p in g["params"]:
                    if p.grad is None:
                        continue
                    b = self.state[p].setdefault("b", torch.zeros_like(p))
                    b.mul_(g["m"]).add_(p.grad)
                    u = p.grad.add(b, alpha=g["m"])
                    p.add_(ns(u), alpha=-g["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)

    m = nn.Sequential(
        nn.Embedding(4000, 256),
        nn.Linear(256, 1024, bias=False),
        nn.GELU(),
        nn.Linear(1024, 256, bias=False),
        nn.LayerNorm(256),
        nn.Linear(256, 4000),
    ).to(device)
    mats = [m[1].weight, m[3].weight]
    oth = [p for p in m.parameters() if all(p is not q for q in mats)]
    a, b = (Muon(mats), torch.optim.AdamW(oth, fused=True))

    def step():
        t = torch.randint(0, 4000, (8, 128), device=device)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(m(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())
        loss.backward()
        a.step()
        b.step()
        a.zero_grad()
        b.zero_grad()

    return step


@program
def adam8bit_like(device):
    """Optimizer states in uint8, with a scale for each block of 256."""
    code = torch.linspace(-1, 1, 256, device=device)

    def qz(x):
        b = x.flatten().view(-1, 256)
        a = b.abs().amax(1, keepdim=True).clamp_min(1e-12)
        return (torch.bucketize(b / a, code).clamp_(max=255).to(torch.uint8), a)

    def dq(q, a, shape):
        return (code[q.int()] * a).view(shape)

    m = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device)
    st = {}

    @torch.no_grad()
    def opt():
        for p in m.parameters():
            s = st.get(p)
            if s is None:
                s = st[p] = [qz(torch.zeros_like(p)), qz(torch.zeros_like(p))]
            e = dq(*s[0], p.shape).mul_(0.9).add_(p.grad, alpha=0.1)
            v = dq(*s[1], p.shape).mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
            p.addcdiv_(e, v.abs().sqrt().add_(1e-08), value=-0.001)
            st[p] = [qz(e), qz(v)]
            p.grad = None

    def step():
        m(torch.randn(128, 256, device=device)).square().mean().backward()
        opt()

    return step


@program
def sam_optimizer(device):
    """Sharpness-aware minimisation: two passes, the old weights kept by hand."""
    m = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
    o = torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)
    old = {}

    def step():
        x, y = (torch.randn(128, 128, device=device), torch.randint(0, 10, (128,), device=device))
        F.cross_entropy(m(x), y).backward()
        with torch.no_grad():
            n = torch.norm(torch.stack([p.grad.norm(p=2) for p in m.parameters()]), p=2)
            s = 0.05 / (n + 1e-12)
            for p in m.parameters():
                old[p] = p.data.clone()
                p.add_(p.grad * s.to(p))
        o.zero_grad()
        F.cross_entropy(m(x), y).backward()
        for p in m.parameters():
            p.data = old[p]
        o.step()
        o.zero_grad()

    return step


@program
def spectral_weight_norm(device):
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    m = nn.Sequential(
        spectral_norm(nn.Conv2d(3, 32, 3, 2, 1)),
        nn.LeakyReLU(0.1, inplace=True),
        weight_norm(nn.Conv2d(32, 64, 3, 2, 1)),
        nn.LeakyReLU(0.1),
        nn.Flatten(),
        spectral_norm(nn.Linear(64 * 64, 64)),
        nn.Linear(64, 1),
    ).to(device)
    o = torch.optim.Adam(m.parameters(), 0.0001)

    def step():
        o.zero_grad()
        F.relu(1 - m(torch.randn(16, 3, 32, 32, device=device))).mean().backward()
        o.step()

    return step


@program
def transducer(device):
    """The lattice of an RNN transducer, one logsumexp a node."""
    enc, dec = (
        nn.LSTM(40, 64, batch_first=True).to(device),
        nn.LSTM(32, 64, batch_first=True).to(device),
    )
    emb = nn.Embedding(30, 32).to(device)
    j = nn.Linear(64, 30).to(device)
    ps = [*enc.parameters(), *dec.parameters(), *emb.parameters(), *j.parameters()]
    o = torch.optim.Adam(ps, 0.001)

    def step():
        x = torch.randn(4, 20, 40, device=device)
        y = torch.randint(1, 30, (4, 6), device=device)
        f, _ = enc(x)
        g, _ = dec(emb(F.pad(y, (1, 0))))
        lp = j(torch.tanh(f[:, :, None] + g[:, None])).log_softmax(-1)
        blank = lp[..., 0]
        emit = lp[:, :, :-1].gather(3, y[:, None, :, None].expand(-1, 20, -1, 1)).squeeze(3)
        a = [[None] * 7 for _ in range(20)]
        for t in range(20):
            for u in range(7):
                if t == 0 and u == 0:
                    a[0][0] = blank.new_zeros(4)
                    continue
                c = []
                if t:
                    c.append(a[t - 1][u] + blank[:, t - 1, u])
                if u:
                    c.append(a[t][u - 1] + emit[:, t, u - 1])
                a[t][u] = torch.logsumexp(torch.stack(c), 0) if len(c) > 1 else c[0]
        loss = -(a[19][6] + blank[:, 19, 6]).mean()
        o.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(ps, 5.0)
        o.step()

    return step


@program
def bahdanau_decoder(device):
    e = nn.Embedding(1000, 64).to(device)
    enc = nn.GRU(64, 64, 2, bidirectional=True, dropout=0.1).to(device)
    cell = nn.GRUCell(64 + 128, 64).to(device)
    query, key, v = (
        nn.Linear(64, 64).to(device),
        nn.Linear(128, 64).to(device),
        nn.Linear(64, 1).to(device),
    )
    out = nn.Linear(64 + 128, 1000).to(device)
    ps = [p for m in (e, enc, cell, query, key, v, out) for p in m.parameters()]
    o = torch.optim.ASGD(ps, 0.01)

    def step():
        src, tgt = (
            torch.randint(0, 1000, (15, 16)).to(device),
            torch.randint(0, 1000, (10, 16)).to(device),
        )
        h, _ = enc(e(src))
        s = torch.zeros(16, 64, device=device)
        loss = 0
        keys = key(h)
        for t in range(9):
            a = v(torch.tanh(query(s)[None] + keys)).softmax(0)
            c = (a * h).sum(0)
            s = cell(torch.cat([e(tgt[t]), c], 1), s)
            loss = loss + F.cross_entropy(out(torch.cat([s, c], 1)), tgt[t + 1])
        o.zero_grad()
        (loss / 9).backward()
        nn.utils.clip_grad_norm_(ps, 1.0)
        o.step()

    return step


@program
def lstm_cells_packed_ln(device):
    cell = nn.LSTMCell(64, 128).to(device)
    ln = nn.LayerNorm(128).to(device)
    head = nn.Linear(128, 5).to(device)
    rnn = nn.RNN(64, 64, batch_first=True, nonlinearity="relu").to(device)
    ps = [*cell.parameters(), *ln.parameters(), *head.parameters(), *rnn.parameters()]
    o = torch.optim.NAdam(ps, 0.001)

    def step():
        x = torch.randn(32, 20, 64, device=device)
        pk = nn.utils.rnn.pack_padded_sequence(
            x, torch.randint(1, 21, (32,)).sort(descending=True)[0].clamp(min=20), batch_first=True
        )
        y, _ = rnn(pk)
        y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
        h = c = torch.zeros(32, 128, device=device)
        hs = []
        for t in range(20):
            h, c = cell(y[:, t], (h, c))
            hs.append(ln(h))
        o.zero_grad()
        F.multi_margin_loss(
            head(torch.stack(hs, 1).mean(1)), torch.randint(0, 5, (32,), device=device)
        ).backward()
        o.step()

    return step


@program
def dcn_v2_deepfm(device):
    emb = nn.ModuleList(nn.Embedding(n, 16) for n in (1000, 5000, 200, 50)).to(device)
    lin = nn.ModuleList(nn.Embedding(n, 1) for n in (1000, 5000, 200, 50)).to(device)
    cross = nn.ModuleList(nn.Linear(64 + 13, 64 + 13) for _ in range(3)).to(device)
    deep = nn.Sequential(
        nn.Linear(77, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 1)
    ).to(device)
    fin = nn.Linear(77, 1).to(device)
    ps = [p for m in (emb, lin, cross, deep, fin) for p in m.parameters()]
    o = torch.optim.Adagrad(ps, 0.01, initial_accumulator_value=0.1)
    ev = []

    def step():
        cat = torch.stack([torch.randint(0, n, (512,)) for n in (1000, 5000, 200, 50)], 1).to(
            device
        )
        den = torch.log1p(torch.rand(512, 13)).to(device)
        y = torch.randint(0, 2, (512,)).float().to(device)
        embedded = torch.stack([m(cat[:, i]) for i, m in enumerate(emb)], 1)
        fm = 0.5 * (embedded.sum(1).pow(2) - embedded.pow(2).sum(1)).sum(1)
        x0 = torch.cat([embedded.flatten(1), den], 1)
        x = x0
        for c in cross:
            x = x0 * c(x) + x
        lg = (
            fm
            + sum((m(cat[:, i]).squeeze(1) for i, m in enumerate(lin)))
            + fin(x).squeeze(1)
            + deep(x0).squeeze(1)
        )
        loss = F.binary_cross_entropy_with_logits(
            lg, y, pos_weight=torch.tensor(3.0, device=device)
        )
        o.zero_grad()
        loss.backward()
        o.step()
        ev.append(loss.item())

    return step


@program
def gnn_gin_edgeconv(device):

    class GIN(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.m = nn.Sequential(
                nn.Linear(i, o), nn.BatchNorm1d(o), nn.ReLU(inplace=True), nn.Linear(o, o)
            )
            self.eps = nn.Parameter(torch.zeros(()))

        def forward(self, x, e):
            a = torch.zeros_like(x)
            a.index_add_(0, e[1], x.index_select(0, e[0]))
            return self.m((1 + self.eps) * x + a)

    class Edge(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.m = nn.Linear(2 * i, o)

        def forward(self, x, k):
            d = torch.cdist(x, x)
            idx = d.topk(k, largest=False)[1]
            nb = x[idx]
            c = x.unsqueeze(1).expand_as(nb)
            return self.m(torch.cat([c, nb - c], -1)).relu().max(1)[0]

    a, b, h = (GIN(32, 64).to(device), Edge(64, 64).to(device), nn.Linear(64, 7).to(device))
    ps = [*a.parameters(), *b.parameters(), *h.parameters()]
    o = torch.optim.AdamW(ps, 0.01)

    def step():
        x = torch.randn(400, 32, device=device)
        e = torch.randint(0, 400, (2, 3000), device=device)
        batch = torch.arange(400, device=device) // 40
        z = b(a(x, e), 8)
        g = torch.zeros(10, 64, device=device).index_reduce(0, batch, z, "mean", include_self=False)
        gm = (
            torch.segment_reduce(z, "max", lengths=torch.full((10,), 40, device=device))
            if False
            else g
        )
        o.zero_grad()
        F.cross_entropy(
            h(g + gm), torch.randint(0, 7, (10,), device=device), label_smoothing=0.1
        ).backward()
        o.step()

    return step


@program
def ld_unet_cross_attention(device):
    """Latent diffusion: cross attention, checkpointing, accumulation, a foreach average."""
    from torch.utils.checkpoint import checkpoint

    class XA(nn.Module):
        def __init__(self, c, t):
            super().__init__()
            self.n = nn.GroupNorm(8, c)
            self.q = nn.Linear(c, c)
            self.kv = nn.Linear(t, 2 * c)
            self.o = nn.Linear(c, c)
            self.ff = nn.Sequential(nn.LayerNorm(c), nn.Linear(c, 8 * c))
            self.f2 = nn.Linear(4 * c, c)

        def forward(self, x, t):
            b, c, h, w = x.shape
            y = self.n(x).flatten(2).transpose(1, 2)
            q = self.q(y).view(b, -1, 4, c // 4).transpose(1, 2)
            k, v = (z.view(b, -1, 4, c // 4).transpose(1, 2) for z in self.kv(t).chunk(2, -1))
            a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, -1, c)
            y = y + self.o(a)
            u, g = self.ff(y).chunk(2, -1)
            y = y + self.f2(u * F.gelu(g))
            return x + y.transpose(1, 2).reshape(b, c, h, w)

    class R(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.a = nn.Sequential(
                nn.GroupNorm(8, i), nn.SiLU(inplace=True), nn.Conv2d(i, o, 3, padding=1)
            )
            self.e = nn.Linear(128, o)
            self.b = nn.Sequential(nn.GroupNorm(8, o), nn.SiLU(), nn.Conv2d(o, o, 3, padding=1))
            self.s = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

        def forward(self, x, e):
            return self.s(x) + self.b(self.a(x) + self.e(e)[..., None, None])

    class U(nn.Module):
        def __init__(self):
            super().__init__()
            self.i = nn.Conv2d(4, 64, 3, padding=1)
            self.r1, self.x1, self.d, self.r2, self.x2, self.r3, self.o = (
                R(64, 64),
                XA(64, 96),
                nn.Conv2d(64, 128, 3, 2, 1),
                R(128, 128),
                XA(128, 96),
                R(192, 64),
                nn.Conv2d(64, 4, 3, padding=1),
            )

        def forward(self, x, e, t):
            h = self.i(x)
            h1 = checkpoint(self.r1, h, e, use_reentrant=False)
            h1 = checkpoint(self.x1, h1, t, use_reentrant=False)
            h = self.x2(self.r2(self.d(h1), e), t)
            h = F.interpolate(h, scale_factor=2.0, mode="nearest")
            return self.o(self.r3(torch.cat([h, h1], 1), e))

    m = U().to(device)
    tm = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128)).to(device)
    ema = [p.detach().clone() for p in m.parameters()]
    o = torch.optim.AdamW([*m.parameters(), *tm.parameters()], 0.0001)
    sc = torch.amp.GradScaler("cuda")
    ab = torch.linspace(1, 0.01, 1000, device=device)

    def step():
        for _ in range(2):
            x = torch.randn(4, 4, 32, 32, device=device)
            t = torch.randint(0, 1000, (4,), device=device)
            n = torch.randn_like(x)
            a = ab[t].sqrt().view(-1, 1, 1, 1)
            s_ = (1 - ab[t]).sqrt().view(-1, 1, 1, 1)
            txt = torch.randn(4, 20, 96, device=device)
            f = torch.exp(torch.arange(32, device=device) * -0.3)[None] * t[:, None]
            with torch.autocast("cuda", torch.float16):
                loss = (
                    F.mse_loss(
                        m(a * x + s_ * n, tm(torch.cat([f.sin(), f.cos()], 1)), txt).float(),
                        a * n - s_ * x,
                    )
                    / 2
                )
            sc.scale(loss).backward()
        sc.unscale_(o)
        nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=True)
        sc.step(o)
        sc.update()
        o.zero_grad()
        torch._foreach_lerp_(ema, [p.detach() for p in m.parameters()], 0.01)

    return step


@program
def func_ensemble(device):
    from torch.func import functional_call, stack_module_state, vmap

    ms = [
        nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).to(device)
        for _ in range(5)
    ]
    ps, bs = stack_module_state(ms)
    base = copy.deepcopy(ms[0]).to("meta")
    o = torch.optim.Adam(ps.values(), 0.001)

    def fm(p, b, x):
        return functional_call(base, (p, b), (x,))

    def step():
        x = torch.randn(64, 64, device=device)
        y = vmap(fm, in_dims=(0, 0, None))(ps, bs, x)
        o.zero_grad()
        F.cross_entropy(y.flatten(0, 1), torch.randint(0, 10, (320,), device=device)).backward()
        o.step()

    return step


@program
def reptile_anil(device):
    m = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32, track_running_stats=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 14 * 14, 5),
    ).to(device)
    mo = torch.optim.SGD(m.parameters(), 1.0)

    def step():
        f = copy.deepcopy(m)
        io = torch.optim.Adam(f.parameters(), 0.001, betas=(0.0, 0.999))
        for _ in range(3):
            io.zero_grad()
            F.cross_entropy(
                f(torch.randn(10, 1, 28, 28, device=device)),
                torch.randint(0, 5, (10,), device=device),
            ).backward()
            io.step()
        mo.zero_grad()
        for p, q in zip(m.parameters(), f.parameters(), strict=True):
            if p.grad is None:
                p.grad = torch.zeros(p.size(), device=device)
            p.grad.data.add_(p.data - q.data)
        mo.step()

    return step


@program
def nerf_hash(device):
    tb = nn.ParameterList(nn.Parameter(torch.rand(4096, 2) * 0.0001) for _ in range(4)).to(device)
    m = nn.Sequential(nn.Linear(8 + 24, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    o = torch.optim.Adam([*tb, *m.parameters()], 0.01, eps=1e-15)

    def step():
        ro, rd = (
            torch.rand(256, 3, device=device),
            F.normalize(torch.randn(256, 3, device=device), dim=-1),
        )
        z, _ = torch.sort(torch.rand(256, 32, device=device), -1)
        p = ro[:, None] + rd[:, None] * z[..., None]
        f = []
        for i, t in enumerate(tb):
            g = (p * (16 * 2**i)).floor().long()
            h = (g[..., 0] * 1 ^ g[..., 1] * 2654435761 ^ g[..., 2] * 805459861) % 4096
            f.append(t[h])
        e = torch.cat([fn(p * 2**k) for k in range(4) for fn in (torch.sin, torch.cos)], -1)
        out = m(torch.cat([*f, e], -1))
        sg = F.relu(out[..., 3])
        dl = torch.cat(
            [z[:, 1:] - z[:, :-1], torch.full((256, 1), 10000000000.0, device=device)], 1
        )
        al = 1 - torch.exp(-sg * dl)
        w = (
            al
            * torch.cumprod(torch.cat([torch.ones(256, 1, device=device), 1 - al + 1e-10], 1), 1)[
                :, :-1
            ]
        )
        rgb = (w[..., None] * out[..., :3].sigmoid()).sum(1)
        o.zero_grad()
        F.huber_loss(rgb, torch.rand(256, 3, device=device)).backward()
        o.step()

    return step


@program
def linear_attention_scan(device):
    """A matrix state that decays, one step of a Python loop a token."""
    project = nn.Linear(128, 384).to(device)
    last = nn.Linear(128, 128).to(device)
    dec = nn.Parameter(torch.full((4,), -1.0, device=device))
    o = torch.optim.AdamW([*project.parameters(), *last.parameters(), dec], 0.001)

    def step():
        x = torch.randn(4, 64, 128, device=device)
        q, k, v = project(x).view(4, 64, 3, 4, 32).unbind(2)
        state = torch.zeros(4, 4, 32, 32, device=device)
        out = []
        for t in range(64):
            state = state * dec.exp().neg().exp()[None, :, None, None] + torch.einsum(
                "bhi,bhj->bhij", k[:, t], v[:, t]
            )
            out.append(torch.einsum("bhi,bhij->bhj", q[:, t], state))
        y = torch.stack(out, 1).flatten(2)
        o.zero_grad()
        (last(F.group_norm(y.flatten(0, 1), 4).view_as(x)) - x).pow(2).mean().backward()
        o.step()

    return step
