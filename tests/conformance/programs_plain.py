"""More training programs, written as users write them: generative, recommendation, speech, graph,
reinforcement and meta-learning. Same rules as :mod:`programs`, which registers them."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from programs import amp_step, plain_step, program
from torch import nn


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                b1, b2 = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = m.clone().mul_(b1).add(p.grad, alpha=1 - b1).sign_()
                p.add_(update, alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


class Res(nn.Module):
    def __init__(self, i, o, t):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(8, i), nn.Conv2d(i, o, 3, padding=1)
        self.t = nn.Linear(t, o)
        self.n2, self.c2, self.d = (
            nn.GroupNorm(8, o),
            nn.Conv2d(o, o, 3, padding=1),
            nn.Dropout(0.1),
        )
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x, t):
        h = self.c1(F.silu(self.n1(x))) + self.t(F.silu(t))[:, :, None, None]
        return self.c2(self.d(F.silu(self.n2(h)))) + self.skip(x)


class Attn(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n, self.qkv, self.o = nn.GroupNorm(8, c), nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.n(x)).reshape(b, 3, 4, c // 4, h * w).transpose(-1, -2).unbind(1)
        a = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(b, c, h, w)
        return x + self.o(a)


class Diffusion(nn.Module):
    def __init__(self, c=32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(c, 4 * c), nn.SiLU(), nn.Linear(4 * c, 4 * c))
        self.inp = nn.Conv2d(3, c, 3, padding=1)
        self.r1, self.down = Res(c, c, 4 * c), nn.Conv2d(c, c, 3, stride=2, padding=1)
        self.r2, self.a2 = Res(c, 2 * c, 4 * c), Attn(2 * c)
        self.r3 = Res(2 * c, 2 * c, 4 * c)
        self.r4 = Res(3 * c, c, 4 * c)
        self.out = nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))
        self.c = c

    def forward(self, x, t):
        half = self.c // 2
        f = torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / half)
        e = t[:, None].float() * f[None]
        e = self.time(torch.cat([e.sin(), e.cos()], -1))
        h1 = self.r1(self.inp(x), e)
        h = self.r3(self.a2(self.r2(self.down(h1), e)), e)
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        return self.out(self.r4(torch.cat([h, h1], 1), e))


def _diffusion(dtype, last):
    def make(device):
        model = Diffusion().to(device)
        if last:
            model = model.to(memory_format=torch.channels_last)
        ema = copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        alphas = torch.linspace(0.9999, 0.98, 1000, device=device).cumprod(0)

        def loss():
            x = torch.randn(4, 3, 32, 32, device=device)
            t = torch.randint(0, 1000, (4,), device=device)
            noise = torch.randn_like(x)
            a = alphas[t].view(-1, 1, 1, 1)
            return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)

        inner = amp_step(model, optimizer, loss, dtype) if dtype else plain_step(optimizer, loss)

        def step():
            inner()
            with torch.no_grad():
                for p, q in zip(ema.parameters(), model.parameters(), strict=True):
                    p.lerp_(q, 0.01)

        return step

    make.__name__ = (
        f"diffusion_unet_{'f32' if dtype is None else str(dtype)[6:]}{'_last' if last else ''}"
    )
    program(make)


for chosen, last in ((torch.float16, False), (torch.bfloat16, True)):
    _diffusion(chosen, last)


@program
def dcgan(device):
    def up(i, o, s=2, p=1):
        return [nn.ConvTranspose2d(i, o, 4, s, p, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]

    g = nn.Sequential(
        *up(32, 128, 1, 0), *up(128, 64), *up(64, 32), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh()
    ).to(device)
    d = nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(32, 64, 4, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(64, 128, 4, 2, 1, bias=False),
        nn.BatchNorm2d(128),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(128, 1, 4, 1, 0),
        nn.Sigmoid(),
    ).to(device)
    og = torch.optim.Adam(g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    od = torch.optim.Adam(d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    bce = nn.BCELoss()

    def step():
        real = torch.randn(8, 3, 32, 32, device=device)
        d.zero_grad()
        label = torch.full((8,), 1.0, device=device)
        e1 = bce(d(real).view(-1), label)
        e1.backward()
        fake = g(torch.randn(8, 32, 1, 1, device=device))
        label.fill_(0.0)
        e2 = bce(d(fake.detach()).view(-1), label)
        e2.backward()
        od.step()
        g.zero_grad()
        label.fill_(1.0)
        bce(d(fake).view(-1), label).backward()
        og.step()

    return step


@program
def wgan_gp(device):
    g = nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 784), nn.Tanh()
    ).to(device)
    d = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.InstanceNorm2d(32, affine=True),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(32 * 49, 1),
    ).to(device)
    og = torch.optim.RMSprop(g.parameters(), lr=1e-4)
    od = torch.optim.Adam(d.parameters(), lr=1e-4)

    def step():
        real = torch.randn(16, 1, 28, 28, device=device)
        for _ in range(2):
            od.zero_grad()
            with torch.no_grad():
                fake = g(torch.randn(16, 64, device=device)).view(16, 1, 28, 28)
            a = torch.rand(16, 1, 1, 1, device=device)
            mix = (a * real + (1 - a) * fake).requires_grad_(True)
            out = d(mix)
            grad = torch.autograd.grad(
                out, mix, torch.ones_like(out), create_graph=True, retain_graph=True
            )[0]
            gp = ((grad.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
            (d(fake).mean() - d(real).mean() + 10 * gp).backward()
            od.step()
        og.zero_grad()
        (-d(g(torch.randn(16, 64, device=device)).view(16, 1, 28, 28)).mean()).backward()
        og.step()

    return step


@program
def dlrm(device):
    tables = nn.ModuleList(nn.EmbeddingBag(1000, 16, mode="sum") for _ in range(3)).to(device)
    bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU()).to(device)
    top = nn.Sequential(nn.Linear(16 + 6, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    params = [*tables.parameters(), *bottom.parameters(), *top.parameters()]
    optimizer = torch.optim.Adagrad(params, lr=1e-2)
    li, lj = torch.tril_indices(4, 4, offset=-1).unbind(0)

    def loss():
        dense = bottom(torch.randn(64, 13, device=device))
        offsets = torch.arange(0, 64 * 4, 4).to(device)
        pooled = [t(torch.randint(0, 1000, (256,)).to(device), offsets) for t in tables]
        z = torch.stack([dense, *pooled], 1)
        inter = torch.bmm(z, z.transpose(1, 2))[:, li, lj]
        y = torch.rand(64, 1, device=device)
        return F.binary_cross_entropy_with_logits(top(torch.cat([dense, inter], 1)), y)

    return plain_step(optimizer, loss)


@program
def dlrm_sparse_sgd(device):
    tables = nn.ModuleList(
        nn.EmbeddingBag(1000, 16, mode="mean", sparse=True) for _ in range(3)
    ).to(device)
    top = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.SGD([*tables.parameters(), *top.parameters()], lr=1e-2)

    def loss():
        idx = torch.randint(0, 1000, (64, 5)).to(device)
        return top(torch.cat([t(idx) for t in tables], 1)).square().mean()

    return plain_step(optimizer, loss)


@program
def two_tower_sparse(device):
    users, items = (
        nn.Embedding(5000, 32, sparse=True).to(device),
        nn.Embedding(2000, 32, sparse=True).to(device),
    )
    optimizer = torch.optim.SparseAdam([*users.parameters(), *items.parameters()], lr=1e-3)

    def loss():
        u = users(torch.randint(0, 5000, (128,)).to(device))
        i = items(torch.randint(0, 2000, (128,)).to(device))
        scores = F.normalize(u, dim=-1) @ F.normalize(i, dim=-1).T / 0.1
        return F.cross_entropy(scores, torch.arange(128, device=device))

    return plain_step(optimizer, loss)


@program
def two_tower_dense(device):
    users, items = (
        nn.Embedding(5000, 32).to(device),
        nn.Embedding(2000, 32, padding_idx=0, max_norm=1.0).to(device),
    )
    bias = nn.Embedding(2000, 1).to(device)
    optimizer = torch.optim.Adam(
        [*users.parameters(), *items.parameters(), *bias.parameters()], lr=1e-3, weight_decay=1e-5
    )

    def loss():
        i = torch.randint(0, 2000, (128,)).to(device)
        j = torch.randint(0, 2000, (128,)).to(device)
        u = users(torch.randint(0, 5000, (128,)).to(device))
        pos = (u * items(i)).sum(-1) + bias(i).squeeze(-1)
        neg = (u * items(j)).sum(-1) + bias(j).squeeze(-1)
        return -F.logsigmoid(pos - neg).mean()

    return plain_step(optimizer, loss)


@program
def seq2seq_packed(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.d = nn.Embedding(500, 32, padding_idx=0), nn.Embedding(500, 32)
            self.enc = nn.LSTM(32, 64, batch_first=True, bidirectional=True)
            self.dec = nn.GRU(32, 64, batch_first=True)
            self.bridge = nn.Linear(128, 64)
            self.att = nn.Linear(64, 128)
            self.out = nn.Linear(192, 500)

        def forward(self, src, lengths, tgt):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.e(src), lengths, batch_first=True, enforce_sorted=False
            )
            out, (h, _c) = self.enc(packed)
            out, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
            h0 = torch.tanh(self.bridge(torch.cat([h[0], h[1]], -1)))[None]
            dec, _ = self.dec(self.d(tgt), h0)
            scores = self.att(dec) @ out.transpose(1, 2)
            mask = (
                torch.arange(out.shape[1], device=src.device)[None]
                >= lengths.to(src.device)[:, None]
            )
            scores = scores.masked_fill(mask[:, None], float("-inf"))
            ctx = scores.softmax(-1) @ out
            return self.out(torch.cat([dec, ctx], -1))

    model = Model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    lengths = torch.tensor([12, 5, 9, 7])

    def step():
        src = torch.randint(1, 500, (4, 12)).to(device)
        tgt = torch.randint(1, 500, (4, 10)).to(device)
        optimizer.zero_grad()
        logits = model(src, lengths, tgt[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 500), tgt[:, 1:].reshape(-1), ignore_index=0)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


@program
def graph_network(device):
    class Layer(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.m, self.u = nn.Linear(2 * i, o), nn.Linear(i + o, o)

        def forward(self, x, src, dst):
            msg = F.relu(self.m(torch.cat([x[src], x[dst]], -1)))
            agg = torch.zeros(
                x.shape[0], msg.shape[1], device=x.device, dtype=msg.dtype
            ).index_add_(0, dst, msg)
            deg = (
                torch.zeros(x.shape[0], device=x.device)
                .scatter_add_(0, dst, torch.ones_like(dst, dtype=torch.float))
                .clamp(min=1)
            )
            return F.relu(self.u(torch.cat([x, agg / deg[:, None]], -1)))

    class GAT(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.w, self.a = nn.Linear(i, o, bias=False), nn.Parameter(torch.randn(2 * o))

        def forward(self, x, src, dst):
            h = self.w(x)
            e = F.leaky_relu((torch.cat([h[src], h[dst]], -1) * self.a).sum(-1), 0.2)
            top = torch.full((x.shape[0],), -1e9, device=x.device).scatter_reduce(
                0, dst, e.detach(), "amax"
            )
            w = (e - top[dst]).exp()
            z = torch.zeros(x.shape[0], device=x.device).index_add(0, dst, w)
            w = w / (z[dst] + 1e-9)
            return torch.zeros_like(h).scatter_add(
                0, dst[:, None].expand(-1, h.shape[1]), h[src] * w[:, None]
            )

    l1, l2, head = Layer(16, 32).to(device), GAT(32, 32).to(device), nn.Linear(32, 4).to(device)
    optimizer = torch.optim.Adam(
        [*l1.parameters(), *l2.parameters(), *head.parameters()], lr=1e-2, weight_decay=5e-4
    )

    def loss():
        x = torch.randn(300, 16, device=device)
        edges = torch.randint(0, 300, (2, 2000)).to(device)
        batch = torch.arange(300).div(30, rounding_mode="floor").to(device)
        h = l2(l1(x, *edges), *edges)
        pooled = torch.zeros(10, 32, device=device).scatter_reduce(
            0, batch[:, None].expand(-1, 32), h, "mean", include_self=False
        )
        return F.nll_loss(F.log_softmax(head(pooled), -1), torch.randint(0, 4, (10,)).to(device))

    return plain_step(optimizer, loss)


@program
def supervised_contrastive(device):
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def loss():
        z = F.normalize(net(torch.randn(48, 32, device=device)), dim=1)
        y = torch.randint(0, 5, (48,)).to(device)
        sim = z @ z.T / 0.07
        sim = sim - sim.max(1, keepdim=True)[0].detach()
        mask = torch.eq(y[:, None], y[None]).float()
        off = 1 - torch.eye(48, device=device)
        lp = sim - torch.log((sim.exp() * off).sum(1, keepdim=True))
        trip = F.triplet_margin_loss(z[:16], z[16:32], z[32:])
        cos = F.cosine_embedding_loss(z[:16], z[16:32], torch.ones(16, device=device))
        return -((mask * off * lp).sum(1) / (mask * off).sum(1).clamp(min=1)).mean() + trip + cos

    return plain_step(optimizer, loss)


@program
def vae(device):
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(
                nn.Conv2d(1, 16, 3, 2, 1),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, 2, 1),
                nn.ReLU(),
                nn.Flatten(),
            )
            self.mu, self.lv = nn.Linear(32 * 49, 16), nn.Linear(32 * 49, 16)
            self.dec = nn.Sequential(
                nn.Linear(16, 32 * 49),
                nn.ReLU(),
                nn.Unflatten(1, (32, 7, 7)),
                nn.ConvTranspose2d(32, 16, 3, 2, 1, 1),
                nn.ReLU(),
                nn.ConvTranspose2d(16, 1, 3, 2, 1, 1),
            )

        def forward(self, x):
            h = self.enc(x)
            mu, lv = self.mu(h), self.lv(h)
            z = mu + torch.exp(0.5 * lv) * torch.randn_like(mu)
            return self.dec(z), mu, lv

    model = VAE().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss():
        x = torch.rand(32, 1, 28, 28, device=device)
        out, mu, lv = model(x)
        return F.binary_cross_entropy(out.sigmoid(), x, reduction="sum") - 0.5 * torch.sum(
            1 + lv - mu.pow(2) - lv.exp()
        )

    return plain_step(optimizer, loss)


@program
def vq_vae(device):
    enc = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 4, 2, 1)).to(device)
    dec = nn.Sequential(
        nn.ConvTranspose2d(32, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1)
    ).to(device)
    book = nn.Embedding(64, 32).to(device)
    optimizer = torch.optim.Adam(
        [*enc.parameters(), *dec.parameters(), *book.parameters()], lr=1e-3
    )

    def loss():
        x = torch.randn(4, 3, 32, 32, device=device)
        z = enc(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, 32)
        d = (
            flat.pow(2).sum(1, keepdim=True)
            + book.weight.pow(2).sum(1)
            - 2 * flat @ book.weight.t()
        )
        idx = d.argmin(1)
        q = book(idx).view(z.shape)
        one = F.one_hot(idx, 64).float()
        use = one.mean(0)
        _perplexity = torch.exp(-(use * (use + 1e-10).log()).sum())
        value = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        q = z + (q - z).detach()
        return value + F.mse_loss(dec(q.permute(0, 3, 1, 2)), x)

    return plain_step(optimizer, loss)


@program
def distillation(device):
    def net(w):
        return nn.Sequential(
            nn.Conv2d(3, w, 3, padding=1),
            nn.BatchNorm2d(w),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(w, 2 * w, 3, padding=1, groups=2),
            nn.BatchNorm2d(2 * w),
            nn.Hardswish(),
            nn.AdaptiveAvgPool2d((2, 2)),
            nn.Flatten(),
            nn.Linear(8 * w, 10),
        )

    teacher, student = net(32).to(device).eval(), net(8).to(device)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def step():
        x, y = torch.randn(16, 3, 32, 32).to(device), torch.randint(0, 10, (16,)).to(device)
        with torch.no_grad():
            t = teacher(x)
        optimizer.zero_grad()
        s = student(x)
        kd = F.kl_div(F.log_softmax(s / 4, -1), F.softmax(t / 4, -1), reduction="batchmean") * 16
        (0.5 * F.cross_entropy(s, y) + 0.5 * kd).backward()
        optimizer.step()
        schedule.step()

    return step


@program
def capacity_moe(device):
    """Switch-style dispatch with einsum, capacity and cumsum."""
    w1, w2 = (
        nn.Parameter(torch.randn(4, 64, 128, device=device) * 0.02),
        nn.Parameter(torch.randn(4, 128, 64, device=device) * 0.02),
    )
    router = nn.Linear(64, 4).to(device)
    optimizer = torch.optim.AdamW([w1, w2, *router.parameters()], lr=1e-3)

    def loss():
        x = torch.randn(128, 64, device=device)
        p = router(x).softmax(-1)
        top, e = p.max(-1)
        onehot = F.one_hot(e, 4)
        pos = (onehot.cumsum(0) * onehot).sum(-1) - 1
        keep = pos < 48
        disp = (
            F.one_hot(e, 4).float().unsqueeze(-1)
            * F.one_hot(pos.clamp(0, 47), 48).float().unsqueeze(1)
            * keep[:, None, None]
        )
        xin = torch.einsum("nd,nec->ecd", x, disp)
        h = torch.einsum("ecd,edf->ecf", xin, w1).relu()
        y = torch.einsum("ecf,efd->ecd", h, w2)
        out = torch.einsum("ecd,nec->nd", y, disp * top[:, None, None])
        return out.square().mean()

    return plain_step(optimizer, loss)


@program
def lion_gpt(device):
    class Block(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
            self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
            self.g, self.u, self.dn = (
                nn.Linear(d, 3 * d, bias=False),
                nn.Linear(d, 3 * d, bias=False),
                nn.Linear(3 * d, d, bias=False),
            )

        def forward(self, x, cis):
            b, t, d = x.shape
            q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 4, d // 4).unbind(2)

            def rope(a):
                c = (
                    torch.view_as_complex(a.float().reshape(*a.shape[:-1], -1, 2))
                    * cis[None, :, None]
                )
                return torch.view_as_real(c).flatten(3).type_as(a)

            q, k = rope(q), rope(k)
            a = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            )
            x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
            h = self.n2(x)
            return x + self.dn(F.silu(self.g(h)) * self.u(h))

    e, blocks, n, head = (
        nn.Embedding(1000, 64).to(device),
        nn.ModuleList(Block(64) for _ in range(2)).to(device),
        nn.RMSNorm(64).to(device),
        nn.Linear(64, 1000, bias=False).to(device),
    )
    params = [*e.parameters(), *blocks.parameters(), *n.parameters(), *head.parameters()]
    optimizer = Lion(params)
    freqs = torch.outer(
        torch.arange(48, device=device), 1.0 / 10000 ** (torch.arange(0, 16, 2, device=device) / 16)
    )
    cis = torch.polar(torch.ones_like(freqs), freqs)
    model = nn.ModuleList([e, blocks, n, head])

    def loss():
        tok = torch.randint(0, 1000, (4, 49)).to(device)
        x = e(tok[:, :-1])
        for b in blocks:
            x = b(x, cis)
        return F.cross_entropy(head(n(x)).flatten(0, 1).float(), tok[:, 1:].flatten())

    return amp_step(model, optimizer, loss, torch.bfloat16)


@program
def lstm_lm_tbptt(device):
    e, rnn, head = (
        nn.Embedding(2000, 64).to(device),
        nn.LSTM(64, 64, 2, dropout=0.2).to(device),
        nn.Linear(64, 2000).to(device),
    )
    head.weight = e.weight
    params = [*e.parameters(), *rnn.parameters(), head.bias]
    optimizer = torch.optim.SGD(params, lr=1.0)
    state = [None]

    def step():
        for _ in range(2):
            tok = torch.randint(0, 2000, (17, 8)).to(device)
            out, s = rnn(e(tok[:-1]), state[0])
            state[0] = tuple(v.detach() for v in s)
            loss = F.cross_entropy(head(out).flatten(0, 1), tok[1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(params, 0.25)
            optimizer.step()

    return step


@program
def ctc_speech(device):
    net = nn.Sequential(
        nn.Conv1d(40, 64, 5, stride=2, padding=2),
        nn.GELU(),
        nn.Conv1d(64, 64, 5, padding=2),
        nn.GELU(),
    ).to(device)
    rnn, head = (
        nn.GRU(64, 64, 1, batch_first=True, bidirectional=True).to(device),
        nn.Linear(128, 30).to(device),
    )
    optimizer = torch.optim.AdamW(
        [*net.parameters(), *rnn.parameters(), *head.parameters()], lr=1e-3
    )

    def loss():
        x = torch.randn(4, 40, 80, device=device)
        h = head(rnn(net(x).transpose(1, 2))[0]).log_softmax(-1).transpose(0, 1)
        y = torch.randint(1, 30, (4, 12)).to(device)
        return F.ctc_loss(h, y, torch.full((4,), 40), torch.full((4,), 12), zero_infinity=True)

    return plain_step(optimizer, loss)


@program
def fcn_segmentation(device):
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        nn.Conv2d(16, 32, 3, 1, 2, dilation=2),
        nn.BatchNorm2d(32),
        nn.PReLU(32),
        nn.Conv2d(32, 5, 1),
    ).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def loss():
        x, y = (
            torch.randn(2, 3, 48, 48, device=device),
            torch.randint(0, 5, (2, 48, 48), device=device),
        )
        out = F.interpolate(net(x), size=(48, 48), mode="bilinear", align_corners=False)
        prob = out.softmax(1)
        onehot = F.one_hot(y, 5).permute(0, 3, 1, 2).float()
        dice = (
            1
            - (
                2
                * (prob * onehot).sum((0, 2, 3))
                / (prob.sum((0, 2, 3)) + onehot.sum((0, 2, 3)) + 1)
            ).mean()
        )
        w = torch.tensor([1.0, 2, 1, 1, 1], device=device)
        return F.cross_entropy(out, y, weight=w, ignore_index=4) + dice

    return amp_step(net, optimizer, loss, torch.float16)


@program
def spatial_transformer(device):
    loc = nn.Sequential(
        nn.Conv2d(1, 8, 7),
        nn.MaxPool2d(2, 2),
        nn.ReLU(True),
        nn.Conv2d(8, 10, 5),
        nn.MaxPool2d(2, 2),
        nn.ReLU(True),
        nn.Flatten(),
        nn.Linear(90, 6),
    ).to(device)
    net = nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Dropout2d(),
        nn.Flatten(),
        nn.Linear(1440, 10),
    ).to(device)
    optimizer = torch.optim.SGD([*loc.parameters(), *net.parameters()], lr=0.01)

    def loss():
        x = torch.randn(8, 1, 28, 28, device=device)
        theta = loc(x).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.size(), align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        return F.nll_loss(F.log_softmax(net(x), 1), torch.randint(0, 10, (8,)).to(device))

    return plain_step(optimizer, loss)


@program
def super_resolution(device):
    net = nn.Sequential(
        nn.ReflectionPad2d(2),
        nn.Conv2d(3, 16, 5),
        nn.PReLU(),
        nn.Conv2d(16, 12, 3, padding=1),
        nn.PixelShuffle(2),
    ).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def loss():
        hi = torch.rand(4, 3, 32, 32, device=device)
        lo = F.interpolate(
            hi, scale_factor=0.5, mode="bicubic", align_corners=False, antialias=True
        )
        out = net(lo)
        base = F.interpolate(lo, scale_factor=2, mode="bicubic")
        out = out + base
        tv = (out[..., 1:] - out[..., :-1]).abs().mean() + (
            out[:, :, 1:] - out[:, :, :-1]
        ).abs().mean()
        return F.l1_loss(out, hi) + 0.1 * tv

    return plain_step(optimizer, loss)


@program
def encoder_fast_path(device):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device).eval()

    def step():
        with torch.no_grad():
            return model(torch.randn(4, 20, 64, device=device)).sum()

    return step


@program
def transformer_padding_masks(device):
    model = nn.Transformer(64, 4, 2, 2, 128, 0.1, batch_first=True).to(device)
    e = nn.Embedding(500, 64).to(device)
    head = nn.Linear(64, 500).to(device)
    optimizer = torch.optim.Adam(
        [*model.parameters(), *e.parameters(), *head.parameters()], lr=1e-4, betas=(0.9, 0.98)
    )

    def loss():
        s, t = torch.randint(1, 500, (4, 20)).to(device), torch.randint(1, 500, (4, 17)).to(device)
        m = nn.Transformer.generate_square_subsequent_mask(16, device=device)
        out = model(
            e(s),
            e(t[:, :-1]),
            tgt_mask=m,
            src_key_padding_mask=(s == 0),
            tgt_key_padding_mask=(t[:, :-1] == 0),
            memory_key_padding_mask=(s == 0),
        )
        return F.cross_entropy(
            head(out).flatten(0, 1), t[:, 1:].flatten(), label_smoothing=0.1, ignore_index=0
        )

    return plain_step(optimizer, loss)


@program
def pinn(device):
    net = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    ).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def loss():
        x = torch.rand(200, 2, device=device, requires_grad=True)
        u = net(x)
        g = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        gg = torch.autograd.grad(g[:, 0].sum(), x, create_graph=True)[0]
        return (g[:, 1] - 0.1 * gg[:, 0] + u.squeeze(-1) * g[:, 0]).square().mean()

    return plain_step(optimizer, loss)


@program
def maml(device):
    net = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 1)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def loss():
        total = 0
        for _ in range(3):
            p = dict(net.named_parameters())
            for _ in range(2):
                inner = F.mse_loss(
                    torch.func.functional_call(net, p, torch.randn(10, 8, device=device)),
                    torch.randn(10, 1, device=device),
                )
                g = torch.autograd.grad(inner, list(p.values()), create_graph=True)
                p = {k: v - 0.01 * d for (k, v), d in zip(p.items(), g, strict=True)}
            total = total + F.mse_loss(
                torch.func.functional_call(net, p, torch.randn(10, 8, device=device)),
                torch.randn(10, 1, device=device),
            )
        return total / 3

    return plain_step(optimizer, loss)
