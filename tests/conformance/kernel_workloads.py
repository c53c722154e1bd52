"""Small programs whose every operator call is recorded by ``kernel_probe.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D = "cuda"
f32, f16, bf16, f64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
Workload = tuple[str, Callable[[], object]]
WORKLOADS: list[Workload] = []


def workload(function: Callable[[], object]) -> Callable[[], object]:
    WORKLOADS.append((function.__name__, function))
    return function


def t(*shape: int, dtype: torch.dtype = f32, grad: bool = True) -> Tensor:
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.zeros(shape, dtype=dtype, device=D)
    return torch.empty(shape, dtype=dtype, device=D).requires_grad_(grad)


def back(*results: Tensor) -> None:
    """Backward with a dense gradient for every result."""
    for result in results:
        if result.requires_grad:
            result.backward(torch.empty_like(result), retain_graph=True)


@workload
def linear() -> None:
    for dtype in (f32, f16, bf16):
        for rows, wide, out in (
            (2048, 768, 768),
            (2048, 768, 3072),
            (7, 5, 3),
            (1, 64, 64),
            (16384, 1024, 4096),
            (33, 129, 257),
            (0, 4, 4),
            (64, 1, 16),
            (64, 16, 1),
        ):
            for bias in (True, False):
                layer = nn.Linear(wide, out, bias=bias, device=D, dtype=dtype)
                back(layer(t(rows, wide, dtype=dtype)))
                if rows:
                    back(layer(t(3, rows, wide, dtype=dtype).transpose(0, 1)))
    with torch.autocast(D, dtype=bf16):
        layer = nn.Linear(300, 200, device=D)
        back(layer(t(40, 300)))


@workload
def matmul() -> None:
    for dtype in (f32, f16, f64, torch.complex64):
        a, b = t(65, 33, dtype=dtype), t(33, 17, dtype=dtype)
        back(a @ b)
        back(t(33, 65, dtype=dtype).T @ b)
        back(a @ t(17, 33, dtype=dtype).T)
        back(t(33, 65, dtype=dtype).T @ t(17, 33, dtype=dtype).T)
        back(t(65, 66, dtype=dtype)[:, ::2] @ b)
        back(a @ t(33, 34, dtype=dtype)[:, ::2])
        back(a @ t(33, 34, dtype=dtype)[:, :17])
        back(t(130, 66, dtype=dtype)[::2, ::2] @ t(66, 34, dtype=dtype)[::2, ::2])
        back(a @ t(33, dtype=dtype), t(65, 66, dtype=dtype)[:, ::2] @ t(33, dtype=dtype))
        back(t(33, dtype=dtype) @ b, t(33, dtype=dtype) @ t(33, dtype=dtype))
        back(a @ t(1, dtype=dtype).expand(33), t(1, dtype=dtype).expand(65, 33) @ b)
        back(a @ t(33, 1, dtype=dtype).expand(33, 17))
        if dtype.is_complex:
            back(a.conj() @ b, a.conj().T @ a, a @ b.conj(), a.conj() @ b.conj())
            back(t(65, 66, dtype=dtype)[:, ::2].conj() @ b)
        for m in (
            t(4, 65, 33, dtype=dtype),
            t(4, 33, 65, dtype=dtype).transpose(1, 2),
            t(65, 4, 33, dtype=dtype).transpose(0, 1),
            t(33, 65, 4, dtype=dtype).permute(2, 1, 0),
            t(4, 65, 66, dtype=dtype)[:, :, ::2],
            t(1, 65, 33, dtype=dtype).expand(4, 65, 33),
            t(4, 1, 33, dtype=dtype).expand(4, 65, 33),
        ):
            back(torch.bmm(m, t(4, 33, 17, dtype=dtype)))
            back(torch.bmm(m, t(4, 17, 33, dtype=dtype).transpose(1, 2)))
            back(torch.bmm(t(4, 5, 65, dtype=dtype), m))
        back(
            torch.baddbmm(t(17, dtype=dtype), t(4, 65, 33, dtype=dtype), t(4, 33, 17, dtype=dtype))
        )
        back(
            torch.baddbmm(
                t(4, 65, 17, dtype=dtype),
                t(4, 65, 33, dtype=dtype),
                t(4, 33, 17, dtype=dtype),
                beta=0,
            )
        )
        back(
            torch.addbmm(
                t(65, 17, dtype=dtype), t(4, 65, 33, dtype=dtype), t(4, 33, 17, dtype=dtype)
            )
        )
        for beta in (0, 1, 0.5):
            back(torch.addmm(t(65, 17, dtype=dtype), a, b, beta=beta))
            back(torch.addmm(t(17, dtype=dtype), a, b, beta=beta))
            back(torch.addmv(t(65, dtype=dtype), a, t(33, dtype=dtype), beta=beta))
        back(torch.addmm(t(17, 2, dtype=dtype)[:, 0], a, b))
        back(torch.addmm(t(65, 1, dtype=dtype), a, b), torch.addmm(t(1, 17, dtype=dtype), a, b))
        back(
            torch.addmm(t(1, dtype=dtype), a, b),
            torch.addmm(t(17, dtype=dtype), a, t(17, 33, dtype=dtype).T),
        )
        back(torch.addmm(t(17, dtype=dtype), t(65, 66, dtype=dtype)[:, ::2], b))
        back(torch.addr(t(65, 17, dtype=dtype), t(65, dtype=dtype), t(17, dtype=dtype)))
        back(torch.outer(t(65, dtype=dtype), t(17, dtype=dtype)))
        with torch.no_grad():
            c = t(65, 17, dtype=dtype)
            c.addmm_(a, b)
            torch.mm(a, b, out=c)
            t(4, 65, 17, dtype=dtype).baddbmm_(t(4, 65, 33, dtype=dtype), t(4, 33, 17, dtype=dtype))
            c.addbmm_(t(4, 65, 33, dtype=dtype), t(4, 33, 17, dtype=dtype))
            torch.vdot(t(33, dtype=dtype), t(33, dtype=dtype))
    for k in (0, 5):
        back(
            t(4, k) @ t(k, 6), torch.bmm(t(2, 4, k), t(2, k, 6)), torch.bmm(t(0, 4, k), t(0, k, 6))
        )
        back(
            t(0, k) @ t(k, 6),
            t(4, k) @ t(k, 0),
            t(4, k) @ t(k),
            torch.addmm(t(6), t(4, k), t(k, 6)),
        )
    a8, b8 = t(32, 64, dtype=torch.int8), t(64, 32, dtype=torch.int8)
    torch._int_mm(a8, b8)
    back(
        torch.einsum("bij,bjk->bik", t(3, 4, 5), t(3, 5, 6)),
        torch.einsum("ij,kj->ik", t(4, 5), t(6, 5)),
    )
    back(torch.einsum("bhid,bhjd->bhij", t(2, 3, 8, 16, dtype=f16), t(2, 3, 8, 16, dtype=f16)))
    # outer products (a batched matmul with k = 1) need Triton, which no stub driver can serve
    back(torch._addmm_activation(t(64, grad=False), t(32, 16, grad=False), t(16, 64, grad=False)))
    back(
        torch._addmm_activation(
            t(64, grad=False, dtype=f16),
            t(32, 16, grad=False, dtype=f16),
            t(16, 64, grad=False, dtype=f16),
            use_gelu=True,
        )
    )
    back(torch.linalg.multi_dot([t(4, 50), t(50, 5), t(5, 60)]), torch.kron(t(3, 4), t(5, 6)))


SHAPES = (
    ((), (None,)),
    ((1,), (0,)),
    ((1000,), (0,)),
    ((4096, 4096), (None, 0, 1)),
    ((2048, 768), (0, 1, None)),
    ((2048, 2304), (0,)),
    ((2048, 3072), (0,)),
    ((16384, 4096), (0, 1)),
    ((513, 1023), (0, 1, None)),
    ((32, 12, 512, 64), ((0, 2), (1, 3), (0, 1, 2), (2, 3), 1, (0, 3))),
    ((8, 64, 56, 56), ((0, 2, 3), (2, 3), 1, 0)),
    ((3, 1, 5), (0, 1, (0, 2))),
    ((100000, 3), (0, 1)),
    ((3, 100000), (0, 1)),
    ((50257, 7), (0, 1, None)),
    ((0, 5), (0, 1, None)),
    ((2, 3000001), (1, None)),
    ((1 << 24,), (0,)),
)


def reduced(x: Tensor, dim: object) -> None:
    """Every reduction but ``prod``: that kernel is compiled at run time, which a stub cannot."""
    k = {} if dim is None else {"dim": dim}
    x.sum(**k)
    if x.is_floating_point():
        x.mean(**k)
        if x.numel():
            x.amax(**k)
            x.amin(**({"dim": ()} | k))
        if dim is not None:
            torch.linalg.vector_norm(x, **k), torch.linalg.vector_norm(x, 1, **k)
        x.var(**k), x.std(**k)
        torch.var_mean(x, **k)
        if dim is not None:
            torch.logsumexp(x, **k)
        torch.nansum(x, **k)
    if not isinstance(dim, tuple):
        x.any(**k), x.all(**k)
        if x.numel():
            x.max(**k), x.min(**k)
            if x.dtype != torch.bool:
                x.argmax(**k)


@workload
def reductions() -> None:
    for shape, dims in SHAPES:
        for dim in dims:
            for dtype in (f32, f16, bf16, f64, torch.int64, torch.bool, torch.uint8):
                if dtype in (f64, bf16, torch.uint8) and dim != dims[0]:
                    continue
                reduced(t(*shape, dtype=dtype, grad=False), dim)


@workload
def reductions_strided() -> None:
    for dtype in (f32, f16):
        for x in (
            t(768, 2048, dtype=dtype, grad=False).T,
            t(64, 128, 100, dtype=dtype, grad=False).permute(2, 0, 1),
            t(64, 128, 100, dtype=dtype, grad=False).permute(1, 2, 0),
            t(512, 1024, dtype=dtype, grad=False)[:, ::2],
            t(512, 1024, dtype=dtype, grad=False)[::3, 5:],
            t(300, 1, dtype=dtype, grad=False).expand(300, 5000),
            t(1, 300, dtype=dtype, grad=False).expand(5000, 300),
            t(8, 64, 28, 28, dtype=dtype, grad=False).to(memory_format=torch.channels_last),
            t(65, 4096, 33, dtype=dtype, grad=False)[:, 1:, 1:],
        ):
            for dim in [None, *range(x.dim())] + ([(0, 1), (0, 2)] if x.dim() > 2 else []):
                reduced(x, dim)
        x = t(2048, 768, dtype=dtype, grad=False)
        x.sum(0, keepdim=True), x.sum(0, dtype=f32), x.mean(-1, dtype=f32), x.sum(dtype=f64)
        (
            x.amax(0, keepdim=True),
            x.norm(),
            x.norm(2, dim=0),
            x.norm(3),
            torch.aminmax(x),
            x.aminmax(dim=0),
        )
        torch.linalg.vector_norm(x, float("inf")), torch.linalg.vector_norm(x, 0), x.norm(dtype=f32)
        (
            torch.linalg.vector_norm(x, 3.5, dim=1),
            x.norm(p="fro"),
            torch.sum(x, 0, out=t(768, dtype=dtype, grad=False)),
        )
        (
            torch.count_nonzero(x),
            torch.count_nonzero(x, dim=0),
            x.cumsum(0),
            x.sum((0, 1), keepdim=True),
        )
    for dtype in (torch.int32, torch.int64, torch.bool, torch.uint8):
        x = t(2048, 768, dtype=dtype, grad=False)
        x.sum(0), x.sum(), x.sum(0, dtype=f32), x.any(1), x.all()
        if dtype != torch.bool:
            x.amax(0), x.max(), x.argmin(1)
    x = t(2048, 768, dtype=torch.complex64, grad=False)
    x.sum(), x.sum(0), x.mean(1), torch.linalg.vector_norm(x), x.var(0), x.norm()


@workload
def norms() -> None:
    for dtype in (f32, f16, bf16, f64):
        for rows, wide in (
            (2048, 768),
            (7, 33),
            (16384, 1024),
            (5, 4096),
            (100, 1),
            (0, 8),
            (300, 5000),
        ):
            for affine in (True, False):
                back(
                    nn.LayerNorm(wide, elementwise_affine=affine, device=D, dtype=dtype)(
                        t(rows, wide, dtype=dtype)
                    )
                )
                back(
                    nn.RMSNorm(wide, elementwise_affine=affine, device=D, dtype=dtype)(
                        t(rows, wide, dtype=dtype)
                    )
                )
        back(nn.LayerNorm((4, 33), device=D, dtype=dtype)(t(6, 5, 4, 33, dtype=dtype)))
        back(nn.LayerNorm(64, device=D, dtype=dtype)(t(64, 6, dtype=dtype).T))
        back(nn.LayerNorm(64, bias=False, device=D, dtype=dtype)(t(6, 64, dtype=dtype)))
        back(nn.LayerNorm(64, device=D, dtype=dtype)(t(6, 64, dtype=dtype, grad=False)))
        back(nn.RMSNorm(64, device=D, dtype=dtype)(t(6, 9, 64, dtype=dtype).transpose(0, 1)))
        for shape in (
            (2, 64, 56, 56),
            (3, 32, 7, 5),
            (4, 64, 1),
            (8, 320, 16, 16),
            (2, 8, 4, 4, 4),
        ):
            for groups in (1, 8):
                back(nn.GroupNorm(groups, shape[1], device=D, dtype=dtype)(t(*shape, dtype=dtype)))
                back(
                    nn.GroupNorm(groups, shape[1], affine=False, device=D, dtype=dtype)(
                        t(*shape, dtype=dtype)
                    )
                )
        back(
            nn.GroupNorm(4, 64, device=D, dtype=dtype)(
                t(2, 64, 8, 8, dtype=dtype).to(memory_format=torch.channels_last)
            )
        )
        back(
            F.normalize(t(40, 50, dtype=dtype)),
            F.local_response_norm(t(2, 8, 6, 6, dtype=dtype), 3),
        )
        back(
            torch.renorm(t(40, 50, dtype=dtype), 2, 0, 1.0),
            nn.utils.parametrizations.weight_norm(nn.Linear(40, 30, device=D, dtype=dtype))(
                t(5, 40, dtype=dtype)
            ),
        )
    with torch.autocast(D, dtype=bf16):
        back(
            nn.LayerNorm(64, device=D)(t(6, 64, dtype=bf16)),
            nn.RMSNorm(64, device=D)(t(6, 64, dtype=bf16)),
        )


@workload
def losses() -> None:
    for dtype in (f32, f16, bf16, f64):
        for rows, classes in ((2048, 50257), (256, 10), (7, 1000), (1, 5), (513, 2000)):
            y = torch.zeros(rows, dtype=torch.long, device=D)
            x = t(rows, classes, dtype=dtype)
            for reduction in ("mean", "none", "sum"):
                back(F.cross_entropy(x, y, reduction=reduction))
            back(
                F.cross_entropy(x, y, label_smoothing=0.1),
                F.cross_entropy(x, y, weight=t(classes, dtype=dtype, grad=False)),
            )
            back(F.softmax(x, -1), F.log_softmax(x, -1), F.softmax(x, 0), F.log_softmax(x, 0))
            back(F.softmax(x, -1, dtype=f32), F.log_softmax(x, -1, dtype=f32))
            back(F.cross_entropy(x, torch.softmax(x.detach(), -1)))
        x = t(16, 20, 30, dtype=dtype)
        back(
            F.softmax(x, 1),
            F.softmax(x.transpose(1, 2), -1),
            F.log_softmax(x.transpose(0, 1), 1),
            F.softmax(x[:, ::2], -1),
        )
        back(F.cross_entropy(t(4, 19, 32, 32, dtype=dtype), t(4, 32, 32, dtype=torch.int64)))
        back(
            F.cross_entropy(
                t(4, 19, 32, 32, dtype=dtype), t(4, 32, 32, dtype=torch.int64), reduction="none"
            )
        )
        back(
            F.cross_entropy(
                t(4, 19, 32, 32, dtype=dtype),
                t(4, 32, 32, dtype=torch.int64),
                weight=t(19, dtype=dtype, grad=False),
            )
        )
        for a, b in (
            (t(40, 50, dtype=dtype), t(40, 50, dtype=dtype)),
            (t(2048, 300, dtype=dtype), t(2048, 300, dtype=dtype, grad=False)),
            (t(50, 40, dtype=dtype).T, t(40, 50, dtype=dtype)),
        ):
            for reduction in ("mean", "sum", "none"):
                for loss in (
                    F.mse_loss,
                    F.l1_loss,
                    F.smooth_l1_loss,
                    F.huber_loss,
                    F.kl_div,
                    F.binary_cross_entropy_with_logits,
                ):
                    back(loss(a, b, reduction=reduction))
                back(F.binary_cross_entropy(torch.sigmoid(a), b.detach(), reduction=reduction))
                back(
                    F.soft_margin_loss(a, b.detach(), reduction=reduction),
                    F.poisson_nll_loss(a, b.detach(), reduction=reduction),
                )
                back(F.kl_div(a, b, reduction=reduction, log_target=True))
                back(F.hinge_embedding_loss(a, b.detach(), reduction=reduction))
                back(
                    F.binary_cross_entropy_with_logits(
                        a,
                        b.detach(),
                        weight=b.detach(),
                        pos_weight=torch.ones_like(b),
                        reduction=reduction,
                    )
                )
                back(
                    F.binary_cross_entropy(
                        torch.sigmoid(a), b.detach(), weight=b.detach(), reduction=reduction
                    )
                )
        a, b = t(40, 50, dtype=dtype), t(40, 50, dtype=dtype)
        y = torch.zeros(40, dtype=torch.long, device=D)
        back(
            F.cosine_similarity(a, b),
            F.cosine_embedding_loss(a, b, t(40, dtype=dtype, grad=False)),
            F.triplet_margin_loss(a, b, t(40, 50, dtype=dtype)),
        )
        back(
            F.margin_ranking_loss(
                t(40, dtype=dtype), t(40, dtype=dtype), t(40, dtype=dtype, grad=False)
            ),
            F.pairwise_distance(a, b),
        )
        if dtype in (f32, f64):
            back(
                F.multi_margin_loss(a, y),
                F.multilabel_margin_loss(a, torch.zeros(40, 50, dtype=torch.long, device=D)),
            )
            back(
                F.multilabel_soft_margin_loss(a, b.detach()),
                torch.cdist(t(3, 40, 50, dtype=dtype), t(3, 60, 50, dtype=dtype)),
                torch.cdist(a, b),
                torch.pdist(a),
            )
            back(torch.cdist(t(3, 10, 50, dtype=dtype), t(3, 20, 50, dtype=dtype), p=1.0))
        back(F.nll_loss(a, y), F.nll_loss(a, y, reduction="none"), F.nll_loss(a, y, ignore_index=0))
    with torch.autocast(D, dtype=bf16):
        x, y = t(2048, 5000, dtype=bf16), torch.zeros(2048, dtype=torch.long, device=D)
        back(F.cross_entropy(x, y), F.cross_entropy(x.float(), y))
    with torch.autocast(D, dtype=f16):
        back(
            F.cross_entropy(t(2048, 5000, dtype=f16), torch.zeros(2048, dtype=torch.long, device=D))
        )


@workload
def embeddings() -> None:
    for dtype in (f32, f16, bf16, f64):
        for vocabulary, wide in ((50257, 768), (100, 33), (5, 1)):
            for n in (1, 1024, 3072, 3073, 4096, 16384, 20000, 100001):
                for index in (torch.int64, torch.int32):
                    e = nn.Embedding(vocabulary, wide, device=D, dtype=dtype)
                    back(e(torch.zeros(n, dtype=index, device=D)))
                    e = nn.Embedding(vocabulary, wide, padding_idx=1, device=D, dtype=dtype)
                    back(e(torch.zeros(n, dtype=index, device=D)))
            e = nn.Embedding(vocabulary, wide, scale_grad_by_freq=True, device=D, dtype=dtype)
            back(
                e(torch.zeros(10, 500, dtype=torch.long, device=D)),
                e(torch.zeros(10, dtype=torch.long, device=D)),
            )
            e = nn.Embedding(vocabulary, wide, device=D, dtype=dtype)
            back(
                e(torch.zeros(512, 8, dtype=torch.long, device=D)),
                e(torch.zeros(512, 8, dtype=torch.long, device=D).T),
            )
            for mode in ("sum", "mean", "max") if dtype in (f32, f64) else ("sum", "mean"):
                e = nn.EmbeddingBag(vocabulary, wide, mode=mode, device=D, dtype=dtype)
                for n in (100, 5000, 30000):
                    back(
                        e(
                            torch.zeros(n, dtype=torch.long, device=D),
                            torch.zeros(50, dtype=torch.long, device=D),
                        )
                    )
                    back(e(torch.zeros(n // 50, 50, dtype=torch.long, device=D)))
            e = nn.EmbeddingBag(
                vocabulary, wide, mode="sum", include_last_offset=True, device=D, dtype=dtype
            )
            i = torch.zeros(5000, dtype=torch.long, device=D)
            back(
                e(
                    i,
                    torch.zeros(51, dtype=torch.long, device=D),
                    per_sample_weights=t(5000, dtype=dtype),
                )
            )


@workload
def elementwise() -> None:
    for dtype in (f32, f16, bf16):
        for x in (
            t(64, 128, dtype=dtype),
            t(128, 64, dtype=dtype).T,
            t(64, 256, dtype=dtype)[:, ::2],
        ):
            for f in (
                F.gelu,
                F.silu,
                F.relu,
                F.elu,
                F.selu,
                F.leaky_relu,
                F.hardswish,
                F.hardsigmoid,
                F.mish,
                F.softplus,
                F.logsigmoid,
                torch.sigmoid,
                torch.tanh,
                torch.exp,
                torch.sqrt,
                torch.rsqrt,
                torch.abs,
                torch.sin,
                torch.cos,
                torch.erf,
                torch.log,
                torch.log1p,
                torch.reciprocal,
                F.hardtanh,
                F.softshrink,
                F.hardshrink,
                F.tanhshrink,
                F.softsign,
                F.relu6,
                F.celu,
                torch.neg,
                torch.square,
                torch.sign,
                torch.round,
                torch.nan_to_num,
                torch.logit,
            ):
                back(f(x))
            back(
                F.gelu(x, approximate="tanh"),
                F.glu(x),
                F.prelu(x, t(1, dtype=dtype)),
                F.prelu(x, t(128, dtype=dtype)),
                F.rrelu(x, training=True),
            )
            y = t(64, 128, dtype=dtype)
            for g in (
                torch.add,
                torch.sub,
                torch.mul,
                torch.div,
                torch.maximum,
                torch.minimum,
                torch.pow,
                torch.atan2,
                torch.fmod,
                torch.lerp,
            ):
                back(g(x, y, 0.3) if g is torch.lerp else g(x, y))
            back(
                x + 1,
                x * 2.0,
                3 - x,
                x / 2,
                x**2,
                x**0.5,
                2**x,
                x + t(128, dtype=dtype),
                x * t(64, 1, dtype=dtype),
                x + t(dtype=dtype),
            )
            back(
                x + torch.tensor(2.0),
                torch.addcmul(x, y, y),
                torch.addcdiv(x, y, y),
                torch.clamp(x, 0, 1),
                torch.clamp(x, min=y),
                torch.where(x > 0, x, y),
                torch.where(x > 0, x, 0.0),
            )
            back(
                x + t(64, 128, dtype=f32),
                x * t(64, 128, dtype=bf16),
                x + t(64, 128, dtype=torch.int64),
                torch.where(x > 0, x, t(64, 128, dtype=f64)),
            )
            with torch.no_grad():
                z = t(64, 128, dtype=dtype)
                (
                    z.add_(x),
                    z.mul_(t(64, 128, dtype=f32)),
                    z.clamp_(0),
                    z.copy_(x),
                    z.copy_(t(64, 128, dtype=f32)),
                    z.fill_(1.0),
                    z.zero_(),
                    z.addcmul_(x, y),
                    z.addcdiv_(x, y),
                    z.lerp_(x, 0.1),
                    z.sqrt_(),
                    z.div_(2),
                    z.neg_(),
                    z.masked_fill_(x > 0, 1.0),
                )
                (
                    x > 0,
                    x == y,
                    x.isnan(),
                    x.isfinite(),
                    (x > 0) & (y > 0),
                    ~(x > 0),
                    torch.isclose(x, y),
                    torch.allclose(x, y),
                    torch.equal(x, y),
                    x.logical_not(),
                )
                (
                    (x > 0).float(),
                    (x > 0).sum(),
                    x.eq(1).any(),
                    torch.bitwise_and(x.int(), 3),
                    x.long() % 3,
                    x.int() // 2,
                    x.floor_divide(2),
                    x.remainder(3),
                )
                (
                    x.to(f64),
                    x.float(),
                    x.half(),
                    x.clone(),
                    x.contiguous(),
                    x.T.contiguous(),
                    x.clone(memory_format=torch.contiguous_format),
                    torch.zeros_like(x),
                    torch.ones_like(x),
                    torch.rand_like(x),
                    torch.randn_like(x),
                    torch.full_like(x, 2),
                    torch.empty_like(x),
                )
            for p in (0.1, 0.5, 1.0):
                back(
                    F.dropout(x, p),
                    F.dropout1d(t(4, 6, 8, dtype=dtype), p),
                    F.dropout2d(t(4, 6, 8, 8, dtype=dtype), p),
                    F.alpha_dropout(x, p),
                    F.feature_alpha_dropout(t(4, 6, 8, dtype=dtype), p),
                )
            back(F.dropout(x, 0.1, training=False), F.dropout(t(0, 3, dtype=dtype), 0.1))
    x = t(40, 50, dtype=torch.complex64)  # most complex kernels are compiled at run time
    back(torch.view_as_real(x), x.conj().resolve_conj(), x.real, x.imag)
    back(torch.view_as_real(torch.view_as_complex(t(4, 6, 2))))


@workload
def factories() -> None:
    for dtype in (f32, f16, torch.int64, torch.bool):
        k = {"dtype": dtype, "device": D}
        (
            torch.zeros(3, 5, **k),
            torch.ones(3, 5, **k),
            torch.empty(3, 5, **k),
            torch.full((3, 5), 1, **k),
            torch.eye(5, 7, **k),
            torch.eye(9, **k),
        )
        (
            torch.empty_strided((3, 5), (1, 3), **k),
            torch.tensor([1, 2, 3], **k),
            torch.tensor(5, **k),
            torch.as_tensor([0.5], **k),
            torch.scalar_tensor(3, **k),
        )
        if dtype != torch.bool:
            (
                torch.arange(1000, **k),
                torch.arange(0, 10, 3, **k),
                torch.linspace(0, 1, 77, **k),
                torch.logspace(0, 1, 77, **k),
                torch.range(0, 9, **k),
            )
            (
                torch.tril(t(7, 9, dtype=dtype, grad=False)),
                torch.triu(t(7, 9, dtype=dtype, grad=False), 1),
                t(7, 9, dtype=dtype, grad=False).tril_(),
                torch.tril_indices(7, 9, device=D),
                torch.triu_indices(7, 9, device=D),
                t(9, 7, dtype=dtype, grad=False).T.tril(),
            )
            (
                torch.diag(t(9, dtype=dtype, grad=False)),
                torch.diag(t(9, 9, dtype=dtype, grad=False)),
                torch.diag_embed(t(4, 9, dtype=dtype, grad=False)),
                torch.vander(t(9, dtype=dtype, grad=False)),
                torch.trace(t(9, 9, dtype=dtype, grad=False)),
            )
            (
                torch.meshgrid(
                    t(4, dtype=dtype, grad=False), t(5, dtype=dtype, grad=False), indexing="ij"
                ),
                torch.cartesian_prod(t(4, dtype=dtype, grad=False), t(5, dtype=dtype, grad=False)),
                torch.cross(
                    t(4, 3, dtype=dtype, grad=False), t(4, 3, dtype=dtype, grad=False), dim=1
                ),
            )
    (
        torch.randn(3, 5, device=D),
        torch.rand(3, 5, device=D),
        torch.randint(0, 9, (3, 5), device=D),
        torch.normal(0.0, 1.0, (3, 5), device=D),
    )
    for n in (0, 1, 10, 1000, 30000, 200000, 3000000):
        (
            torch.randperm(n, device=D),
            torch.randperm(n, device=D, dtype=torch.int32),
            torch.randperm(n, device=D, dtype=torch.int16) if n <= 30000 else None,
        )
    x = t(40, 50, grad=False)
    (
        x.normal_(),
        x.uniform_(),
        x.bernoulli_(0.3),
        x.exponential_(),
        x.random_(),
        x.cauchy_(),
        x.geometric_(0.5),
        x.log_normal_(),
        torch.bernoulli(x),
        torch.bernoulli(x, 0.5),
        torch.poisson(x),
        torch.bernoulli(t(40, 50, dtype=f16, grad=False)),
    )
    (
        nn.init.trunc_normal_(x),
        nn.init.kaiming_uniform_(x),
        nn.init.xavier_normal_(x),
        nn.init.eye_(x),
        nn.init.constant_(x, 2.0),
    )
    (
        torch.hann_window(400, device=D),
        torch.hamming_window(400, device=D),
        torch.bartlett_window(9, device=D),
    )
    (
        nn.init.normal_(t(40, 50, dtype=f16, grad=False)),
        nn.init.uniform_(t(50, 40, grad=False).T),
        nn.init.normal_(t(40, 100, grad=False)[:, ::2]),
    )


@workload
def shapes() -> None:
    for dtype in (f32, f16, torch.int64):
        x, y = t(40, 50, dtype=dtype), t(40, 50, dtype=dtype)
        back(
            torch.cat([x, y]),
            torch.cat([x, y], 1),
            torch.stack([x, y]),
            torch.stack([x, y], -1),
            torch.cat([x.T, y.T]),
            torch.cat([x, y[:, ::2]], 1),
            torch.hstack([x, y]),
            torch.vstack([x, y]),
            torch.dstack([x, y]),
            torch.column_stack([x, y]),
        )
        for n in (1, 2, 16, 17, 128, 129, 300):
            many = [t(7, 9, dtype=dtype) for _ in range(n)]
            back(
                torch.cat(many),
                torch.cat(many, 1),
                torch.stack(many),
                torch.cat([m.T for m in many]),
                torch.cat([m[:, None] for m in many], 1),
                torch.cat([m[..., None, None] for m in many]),
            )
        back(
            torch.cat([x, t(0, dtype=dtype), y]),
            torch.cat([t(3, 40, 50, dtype=dtype), t(3, 1, 50, dtype=dtype).expand(3, 40, 50)], 1),
        )
        back(
            torch.cat(
                [
                    t(2, 3, 8, 8, dtype=dtype).to(memory_format=torch.channels_last),
                    t(2, 5, 8, 8, dtype=dtype).to(memory_format=torch.channels_last),
                ],
                1,
            )
        )
        back(
            torch.cat([t(7, dtype=dtype), t(7, dtype=f32)]),
            torch.cat([t(7, dtype=dtype), t(7, dtype=f64)]),
        )
        back(
            x.repeat(2, 3),
            x.tile(2, 2),
            x.repeat_interleave(3),
            x.repeat_interleave(3, 0),
            x.expand(3, 40, 50).reshape(120, 50),
            x.T.reshape(-1),
            x.roll(3),
            x.roll(3, 0),
            x.roll((1, 2), (0, 1)),
            x.flip(0),
            x.flip((0, 1)),
            x.rot90(),
            x.unfold(0, 4, 2).clone(),
            x.T.flip(0),
            x.T.roll(1, 0),
        )
        back(
            *x.split(7),
            *x.chunk(3, 1),
            x[3],
            x[:, 2:5],
            x.select(1, 2),
            x.narrow(0, 2, 3),
            x.diagonal(),
            *x.unbind()[:2],
            x.movedim(0, 1),
            x.unsqueeze(0),
            torch.atleast_3d(x),
            x.permute(1, 0).contiguous(),
            x.as_strided((5, 5), (3, 2)),
        )
        back(F.pad(x, (1, 2)), F.pad(x, (1, 2, 3, 4), value=2), F.pad(x, (-1, 2)), F.pad(x, (0, 0)))
        if dtype != torch.int64:
            for mode in ("reflect", "replicate", "circular"):
                back(
                    F.pad(t(2, 3, 9, dtype=dtype), (2, 3), mode=mode),
                    F.pad(t(2, 3, 9, 9, dtype=dtype), (2, 3, 1, 2), mode=mode),
                    F.pad(t(2, 3, 9, 9, 9, dtype=dtype), (2, 3, 1, 2, 1, 1), mode=mode),
                )
            img = t(2, 12, 16, 16, dtype=dtype)
            back(
                F.pixel_shuffle(img, 2),
                F.pixel_unshuffle(img, 2),
                F.channel_shuffle(img, 3),
                F.unfold(img, 3),
                F.fold(t(2, 27, 100, dtype=dtype), (12, 12), 3),
            )
        with torch.no_grad():
            z = t(40, 50, dtype=dtype)
            z[3] = x[2]
            z[:, 1:3] = 1
            (
                z.T.copy_(t(50, 40, dtype=dtype)),
                z.copy_(t(50, 40, dtype=dtype).T),
                z[::2].copy_(x[1::2]),
                z.copy_(t(50, dtype=dtype)),
                z[:, ::2].copy_(t(40, 25, dtype=dtype)),
            )
            z.set_(t(3, dtype=dtype).untyped_storage()) if dtype == f32 else None
            torch.cat([x, y], out=t(80, 50, dtype=dtype, grad=False))
            (
                t(3, 4, 5, 6, dtype=dtype).to(memory_format=torch.channels_last),
                t(3, 4, 5, 6, dtype=dtype).contiguous(memory_format=torch.channels_last),
                t(3, 4, 5, 6, dtype=dtype).to(memory_format=torch.channels_last).contiguous(),
            )
            (
                torch.block_diag(x, y),
                torch.combinations(t(9, dtype=dtype)),
                torch.tensordot(
                    t(3, 4, 5, grad=False), t(4, 3, 6, grad=False), dims=([1, 0], [0, 1])
                ),
                t(5, dtype=dtype, grad=False).resize_(100),
            )


@workload
def host_copies() -> None:
    for dtype in (f32, f16, torch.int64):
        for shape in ((), (5,), (1000, 300)):
            host = torch.zeros(shape, dtype=dtype)
            (
                host.to(D),
                host.pin_memory().to(D, non_blocking=True),
                host.to(D, non_blocking=True),
                host.to(D, f16),
                host.to(D, f64),
                host.cuda(),
            )
            device = torch.zeros(shape, dtype=dtype, device=D)
            (
                device.cpu(),
                device.to("cpu", non_blocking=True),
                device.to("cpu", f64),
                device.copy_(host),
                host.copy_(device),
                device.copy_(host.double()),
                host.copy_(device.double()),
                device.double().copy_(host),
            )
            if len(shape) == 2:
                (
                    host.T.to(D),
                    host[:, ::2].to(D),
                    device.T.cpu(),
                    device[:, ::2].cpu(),
                    device[:, ::2].copy_(host[:, ::2]),
                    device.T.copy_(torch.zeros(300, 1000, dtype=dtype)),
                    host[:, ::2].copy_(device[:, ::2]),
                    device[:, 0].copy_(host[:, 0]),
                    host.copy_(device.T.contiguous().T),
                    device[:500].copy_(host[:500]),
                )
                host[:, ::2].pin_memory().to(D, non_blocking=True), device[:, ::2].to("cpu", f64)
            if shape == ():
                device.item(), bool(device)
    (
        torch.tensor([1.0, 2.0], device=D),
        torch.tensor([[1, 2], [3, 4]], device=D),
        t(3, 4, grad=False).tolist(),
        t(3, 4, grad=False) + torch.tensor(1.0),
        torch.zeros(3, dtype=torch.complex64).to(D),
    )


@workload
def optimizers() -> None:
    sizes = [(1024, 1024), (7, 5), (300,), (1,), (70000,), (), (64, 3, 7, 7), (0, 3)]
    for dtype in (f32, bf16):
        for make in (
            lambda p: torch.optim.SGD(p, 0.1),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, 0.1, maximize=True),
            lambda p: torch.optim.AdamW(p),
            lambda p: torch.optim.AdamW(p, amsgrad=True),
            lambda p: torch.optim.AdamW(p, fused=True),
            lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
            lambda p: torch.optim.AdamW(p, capturable=True),
            lambda p: torch.optim.AdamW(p, foreach=False),
            lambda p: torch.optim.AdamW(p, foreach=False, capturable=True),
            lambda p: torch.optim.Adam(p, weight_decay=0.1),
            lambda p: torch.optim.Adam(p, maximize=True),
            lambda p: torch.optim.Adam(p, fused=True),
            lambda p: torch.optim.RMSprop(p),
            lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
            lambda p: torch.optim.Adagrad(p),
            lambda p: torch.optim.Adagrad(p, foreach=False),
            lambda p: torch.optim.Adadelta(p),
            lambda p: torch.optim.Adadelta(p, capturable=True),
            lambda p: torch.optim.Adamax(p),
            lambda p: torch.optim.Adamax(p, capturable=True),
            lambda p: torch.optim.NAdam(p),
            lambda p: torch.optim.NAdam(p, capturable=True),
            lambda p: torch.optim.RAdam(p),
            lambda p: torch.optim.RAdam(p, capturable=True),
            lambda p: torch.optim.ASGD(p),
            lambda p: torch.optim.ASGD(p, capturable=True),
            lambda p: torch.optim.Rprop(p),
            lambda p: torch.optim.Rprop(p, capturable=True),
            lambda p: torch.optim.Adafactor(p[:6]),
            lambda p: torch.optim.Adafactor(p[:6], foreach=False),
        ):
            parameters = [nn.Parameter(t(*s, dtype=dtype)) for s in sizes]
            optimizer = make(parameters)
            for _ in range(2):
                for p in parameters:
                    p.grad = torch.zeros_like(p)
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        parameters = [nn.Parameter(t(64, 32, dtype=dtype)), nn.Parameter(t(32, 128, dtype=dtype))]
        for p in parameters:
            p.grad = torch.zeros_like(p)
        torch.optim.Muon(parameters).step()
        parameters = [nn.Parameter(t(*s, dtype=dtype)) for s in sizes]
        parameters = parameters[:-1]
        for norm in (1.0, 2.0, float("inf"), 3.0):
            for foreach in (True, False, None):
                for p in parameters:
                    p.grad = torch.zeros_like(p)
                torch.nn.utils.clip_grad_norm_(parameters, 1.0, norm_type=norm, foreach=foreach)
        (
            torch.nn.utils.clip_grad_value_(parameters, 1.0),
            torch.nn.utils.clip_grad_value_(parameters, 1.0, foreach=False),
        )
        torch.nn.utils.get_total_norm([p.grad for p in parameters])
    scaler = torch.amp.GradScaler(D)
    parameters = [nn.Parameter(t(*s)) for s in sizes]
    optimizer = torch.optim.SGD(parameters, 0.1)
    for _ in range(2):
        scaler.scale(sum((p.sum() for p in parameters), t())).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    average = torch.optim.swa_utils.AveragedModel(
        nn.Linear(30, 40, device=D), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    (
        average.update_parameters(nn.Linear(30, 40, device=D)),
        average.update_parameters(nn.Linear(30, 40, device=D)),
    )
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(30, 40, device=D))
    (
        average.update_parameters(nn.Linear(30, 40, device=D)),
        average.update_parameters(nn.Linear(30, 40, device=D)),
    )


@workload
def foreach() -> None:
    for sizes in (
        [(5, 7), (1000,), (300, 400)],
        [(70000,)] * 3,
        [(3,)] * 400,
        [(200000, 2)],
        [()] * 3,
        [(0,), (4,)],
    ):
        for dtype in (f32, bf16):
            x, y = ([t(*s, dtype=dtype, grad=False) for s in sizes] for _ in range(2))
            s = t(grad=False)
            for op in (
                torch._foreach_add,
                torch._foreach_sub,
                torch._foreach_mul,
                torch._foreach_div,
                torch._foreach_maximum,
                torch._foreach_minimum,
                torch._foreach_pow,
            ):
                op(x, y), op(x, 2.0), op(x, [2.0] * len(x))
            for op in (
                torch._foreach_add_,
                torch._foreach_mul_,
                torch._foreach_div_,
                torch._foreach_clamp_min_,
                torch._foreach_copy_,
            ):
                op(x, y), (op(x, 2.0) if op is not torch._foreach_copy_ else None)
            (
                torch._foreach_mul(x, s),
                torch._foreach_mul_(x, s),
                torch._foreach_div_(x, s),
                torch._foreach_add_(x, s),
                torch._foreach_mul_(x, t(dtype=dtype, grad=False)),
            )
            for op in (
                torch._foreach_sqrt,
                torch._foreach_neg,
                torch._foreach_exp,
                torch._foreach_abs,
                torch._foreach_reciprocal,
                torch._foreach_sign,
                torch._foreach_sqrt_,
                torch._foreach_zero_,
                torch._foreach_sigmoid,
                torch._foreach_rsqrt,
                torch._foreach_neg_,
                torch._foreach_log,
            ):
                op(x)
            (
                torch._foreach_addcmul(x, y, y),
                torch._foreach_addcmul_(x, y, y),
                torch._foreach_addcdiv_(x, y, y),
                torch._foreach_addcdiv_(x, y, y, [1.0] * len(x)),
                torch._foreach_lerp(x, y, 0.1),
                torch._foreach_lerp_(x, y, 0.1),
                torch._foreach_lerp_(x, y, x),
            )
            for p in (2, 1, 3, float("inf")) if (0,) not in sizes else (2,):
                torch._foreach_norm(x, p)
            torch._foreach_norm(x, 2, dtype=f32) if dtype == bf16 else None
            torch._foreach_max(x) if all(v.numel() for v in x) else None
            torch._foreach_add(
                x,
                [
                    v.T if v.dim() == 2 else v
                    for v in [t(*s[::-1], dtype=dtype, grad=False) for s in sizes]
                ],
            )
            (
                torch._foreach_add_(x, [v.float() for v in y]),
                torch._foreach_mul(x, [v.float() for v in y]),
                torch._foreach_copy_(x, [v.float() for v in y]),
                torch._foreach_copy_([v.float() for v in y], x),
            )
            (
                torch._foreach_add([v.int() for v in x], 1),
                torch._foreach_add([v.int() for v in x], 1.5),
                torch._foreach_div([v.int() for v in x], 2),
                torch._foreach_sqrt([v.int() for v in x]),
            )
            (
                torch._foreach_mul(x, [torch.tensor(2.0)] * len(x)),
                torch._foreach_add(x, [t(1, grad=False)] * len(x)) if () not in sizes else None,
            )


@workload
def sorting() -> None:
    sizes = (
        (5,),
        (1,),
        (100,),
        (1024,),
        (1025,),
        (3000,),
        (5000,),
        (200000,),
        (1500000,),
        (40, 50),
        (50, 40000),
        (200, 5000),
        (128, 3000),
        (3, 7, 2048),
        (2, 1100000),
        (130, 33, 65),
        (0,),
        (),
    )
    for shape in sizes:
        for dtype in (
            f32,
            f16,
            bf16,
            f64,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.uint8,
            torch.bool,
        ):
            x = t(*shape, dtype=dtype, grad=False)
            for dim in range(x.dim()) if dtype in (f32, torch.int64) else (-1,):
                (
                    x.sort(dim),
                    x.sort(dim, descending=True),
                    x.argsort(dim),
                    x.sort(dim=dim, stable=True),
                )
            if not x.numel():
                continue
            if dtype != torch.bool:
                for k in (1, 3, 50, 1500):
                    for dim in range(x.dim()) if dtype == f32 else (-1,):
                        if x.dim() and x.shape[dim] >= k:
                            (
                                x.topk(k, dim),
                                x.topk(k, dim, sorted=False),
                                x.topk(k, dim, largest=False),
                            )
                if x.dim():
                    x.kthvalue(1), x.median(-1), x.nanmedian(-1) if x.is_floating_point() else None
                (
                    x.median(),
                    x.mode() if x.dim() and x.shape[-1] <= 2048 and dtype != torch.uint8 else None,
                )
                if (
                    x.is_floating_point()
                    and dtype in (f32, f64)
                    and x.dim()
                    and x.numel() < 16000000
                ):
                    x.quantile(0.5), x.quantile(0.5, -1)
    x = t(64, 2000)
    back(
        x.sort(1)[0],
        x.topk(5, 1)[0],
        x.sort(0)[0],
        x.T.sort(0)[0],
        x.kthvalue(3)[0],
        x.median(1)[0],
        x.max(1)[0],
        x.min(0)[0],
        x.cummax(1)[0],
        x.cummin(0)[0],
        x.amax(1),
        x.max(),
        x.median(),
    )
    x = t(64, 2000, grad=False)
    (
        torch.searchsorted(x, t(64, 30, grad=False)),
        torch.bucketize(t(40, 50, grad=False), t(30, grad=False)),
        torch.searchsorted(x, t(64, 30, grad=False).to(f64)),
        torch.searchsorted(x[:, ::2], t(64, 60, grad=False)[:, ::2]),
        torch.bucketize(t(40, 50, grad=False), t(60, grad=False)[::2], out_int32=True),
    )
    i = torch.zeros(5000, dtype=torch.int64, device=D)
    (
        torch.bincount(i),
        torch.bincount(i, minlength=300),
        torch.bincount(i, weights=t(5000, grad=False)),
        torch.bincount(i, weights=t(5000, grad=False, dtype=f64)),
        torch.bincount(i.int(), minlength=100000),
    )
    (
        torch.histc(x, 100),
        torch.histc(x, 100, 0, 1),
        torch.histc(x.T, 10, 0, 1),
        torch.argwhere(x),
        torch.msort(x),
    )


@workload
def scans() -> None:
    for shape in ((5,), (1000,), (3000000,), (40, 50), (64, 4096), (300, 4, 50), (0, 5), ()):
        for dtype in (f32, f16, bf16, f64, torch.int64, torch.int32, torch.uint8, torch.bool):
            x = t(*shape, dtype=dtype, grad=False)
            for dim in range(max(x.dim(), 1)):
                x.cumsum(dim), x.cumprod(dim)
                if x.is_floating_point():
                    x.logcumsumexp(dim), x.cumsum(dim, dtype=f64)
                    torch.cumulative_trapezoid(x, dim=dim) if x.numel() and x.dim() else None
                if dtype != torch.bool and x.dim():
                    x.cummax(dim), x.cummin(dim)
                if dtype in (f32, torch.int64):
                    x.cumsum_(dim) if x.dim() else None
                    if x.dim():
                        x.diff(dim=dim), x.flip(dim)
    x = t(40, 50)
    back(
        x.cumsum(1),
        x.T.cumsum(1),
        x[:, ::2].cumsum(1),
        x.cumprod(1),
        x.logcumsumexp(1),
        x.diff(),
        x.T.cumprod(0),
        x[:, ::2].logcumsumexp(0),
    )
    back(t(50, 40).T.cumsum(1), t(1000).cumsum(0), t(2000)[::2].cumsum(0))
    torch.use_deterministic_algorithms(True)
    try:
        for dtype in (f32, f16, f64):
            for n in (5, 1000, 3000000):
                t(n, dtype=dtype, grad=False).cumsum(0)
            t(40, 50, dtype=dtype, grad=False).cumsum(1)
    finally:
        torch.use_deterministic_algorithms(False)


@workload
def indexing() -> None:
    for dtype in (f32, f16, torch.int64):
        x = t(400, 50, dtype=dtype)
        for n in (1, 7, 300, 5000, 100000):
            i = torch.zeros(n, dtype=torch.int64, device=D)
            back(
                x[i],
                x.index_select(0, i),
                x[:, i % 50] if n < 5000 else x[i],
                x[i, i % 50],
                x.gather(0, i[:, None].expand(n, 50)),
                x.take(i),
                torch.take_along_dim(x, i[:, None].expand(n, 50), 0),
            )
            with torch.no_grad():
                y = x.clone()
                y[i] = 0
                y[i] = t(n, 50, dtype=dtype)
                (
                    y.index_put_((i,), t(n, 50, dtype=dtype), accumulate=True),
                    y.index_put_((i, i % 50), t(n, dtype=dtype), accumulate=True),
                    y.index_put((i,), t(50, dtype=dtype), accumulate=True),
                    y.index_put_(
                        (i % 400, torch.zeros((), dtype=torch.int64, device=D)),
                        t(n, dtype=dtype),
                        accumulate=True,
                    ),
                )
                torch.ops.aten._index_put_impl_(y, (i,), t(n, 50, dtype=dtype), True, True)
                (
                    y.index_add_(0, i, t(n, 50, dtype=dtype)),
                    y.index_add(0, i, t(n, 50, dtype=dtype)),
                    y.index_copy_(0, i, t(n, 50, dtype=dtype)),
                    y.index_fill_(0, i, 1),
                    y.index_reduce_(0, i, t(n, 50, dtype=dtype), "amax")
                    if dtype != torch.int64
                    else None,
                )
                if n <= 400:
                    (
                        y.scatter_(0, i[:, None].expand(n, 50), t(n, 50, dtype=dtype)),
                        y.scatter(0, i[:, None].expand(n, 50).contiguous(), 1.0),
                    )
                (
                    y.scatter_add_(0, i[:, None].expand(n, 50), t(n, 50, dtype=dtype)),
                    y.scatter_add(0, i[:, None].expand(n, 50).contiguous(), t(n, 50, dtype=dtype)),
                    y.scatter_reduce_(0, i[:, None].expand(n, 50), t(n, 50, dtype=dtype), "amax")
                    if dtype != f16
                    else None,
                )
                y.put_(i, t(n, dtype=dtype), accumulate=True), y.put_(i, t(n, dtype=dtype))
        m = torch.zeros(400, dtype=torch.bool, device=D)
        m2 = torch.zeros(400, 50, dtype=torch.bool, device=D)
        back(
            x[m],
            x[m2],
            x.masked_select(m2),
            x.masked_fill(m2, 0),
            x.masked_fill(m[:, None], 0),
            x.masked_scatter(m2, t(20000, dtype=dtype)),
            x[m, 3],
            x[..., None, m2[0]],
        )
        with torch.no_grad():
            y = x.clone()
            y[m] = 0
            y[m2] = 1
            y[m] = t(50, dtype=dtype)
            y[3, 4] = 5
            y[:, torch.tensor([1, 2], device=D)] = 2
            (
                y.masked_fill_(m2, torch.tensor(2, dtype=dtype, device=D)),
                y.masked_scatter_(m2, t(20000, dtype=dtype)),
                y.fill_diagonal_(1),
                y.diagonal().add_(1),
            )
            (
                y.nonzero(),
                m.nonzero(),
                m2.nonzero(),
                x[:, ::2].nonzero(),
                m.nonzero(as_tuple=True),
                t(3000000, dtype=dtype, grad=False).nonzero(),
                t(dtype=dtype, grad=False).nonzero(),
            )
            (
                F.one_hot(torch.zeros(30, dtype=torch.int64, device=D), 10),
                torch.tril_indices(5, 5, device=D),
            )
        z = t(20, 30, 40, dtype=dtype)
        i, j = (torch.zeros(9, dtype=torch.int64, device=D) for _ in range(2))
        back(
            z[i, j],
            z[:, i, j],
            z[i, :, j],
            z[i],
            z[:, i],
            z[:, :, i],
            z[i[:, None], j],
            z[0, i],
            z[i.int()],
            z.transpose(0, 1)[i],
            z[..., ::2][i],
            z[i, :, 2:5],
        )
        with torch.no_grad():
            for where in (
                (i, j),
                (slice(None), i, j),
                (i, slice(None), j),
                (slice(None), slice(None), i),
            ):
                z.index_put_(
                    tuple(
                        torch.arange(2, device=D)[:0] if w is None else w
                        for w in where
                        if not isinstance(w, slice)
                    ),
                    z[i, j],
                    accumulate=True,
                ) if where[0] is i and len(where) == 2 else z.__setitem__(where, 0)
    torch.use_deterministic_algorithms(True)
    try:
        for dtype in (f32, f16):
            x = t(400, 50, dtype=dtype)
            for n in (7, 300, 5000):
                i = torch.zeros(n, dtype=torch.int64, device=D)
                back(x[i], x.index_select(0, i), x[i, i % 50])
                with torch.no_grad():
                    y = x.clone()
                    (
                        y.scatter_add_(0, i[:, None].expand(n, 50), t(n, 50, dtype=dtype)),
                        y.index_add_(0, i, t(n, 50, dtype=dtype)),
                        y.index_put_((i,), t(n, 50, dtype=dtype)),
                        y.index_copy_(0, i, t(n, 50, dtype=dtype)),
                    )
                    (
                        t(400, dtype=dtype, grad=False).scatter_add_(
                            0, i, t(n, dtype=dtype, grad=False)
                        ),
                        t(400, dtype=dtype, grad=False).index_add_(
                            0, i, t(n, dtype=dtype, grad=False)
                        ),
                    )
                    (
                        y.scatter_(0, i[:, None].expand(n, 50)[:400], t(n, 50, dtype=dtype)),
                        t(400, dtype=dtype, grad=False).scatter_(
                            0, i, t(n, dtype=dtype, grad=False)
                        ),
                    )
                e = nn.Embedding(100, 33, device=D, dtype=dtype)
                back(e(i))
    finally:
        torch.use_deterministic_algorithms(False)


@workload
def pooling() -> None:
    for dtype in (f32, f16):
        for x in (
            t(2, 8, 32, 32, dtype=dtype),
            t(2, 8, 31, 33, dtype=dtype).to(memory_format=torch.channels_last),
            t(2, 8, 32, 64, dtype=dtype)[..., ::2],
            t(8, 32, 32, dtype=dtype),
        ):
            back(
                F.max_pool2d(x, 2),
                F.max_pool2d(x, 3, 2, 1),
                F.max_pool2d(x, 3, 1, 1, ceil_mode=True),
                F.avg_pool2d(x, 2),
                F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
                F.adaptive_avg_pool2d(x, 1),
                F.adaptive_avg_pool2d(x, 7),
                F.adaptive_max_pool2d(x, 7),
                F.adaptive_avg_pool2d(x, (8, 8)),
                F.lp_pool2d(x.abs(), 2, 2),
            )
            if x.dim() == 4:
                for mode in ("nearest", "bilinear", "bicubic", "nearest-exact", "area"):
                    back(
                        F.interpolate(x, scale_factor=2, mode=mode),
                        F.interpolate(x, size=(17, 19), mode=mode),
                    )
                back(
                    F.interpolate(x, size=(17, 19), mode="bilinear", antialias=True),
                    F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True),
                )
                g = t(2, 5, 6, 2, dtype=dtype)
                back(
                    F.grid_sample(x, g, align_corners=False),
                    F.grid_sample(x, g, mode="nearest", padding_mode="border", align_corners=True),
                    F.grid_sample(x, g, mode="bicubic", align_corners=False),
                    F.affine_grid(t(2, 2, 3, dtype=dtype), [2, 8, 5, 6], align_corners=False),
                    F.affine_grid(t(2, 2, 3, dtype=dtype), [2, 8, 4, 6], align_corners=True),
                )
        back(
            F.max_pool1d(t(2, 8, 33, dtype=dtype), 2),
            F.avg_pool1d(t(2, 8, 33, dtype=dtype), 2),
            F.adaptive_avg_pool1d(t(2, 8, 33, dtype=dtype), 5),
            F.adaptive_max_pool1d(t(2, 8, 33, dtype=dtype), 5),
            F.interpolate(t(2, 8, 33, dtype=dtype), scale_factor=2, mode="linear"),
            F.interpolate(t(2, 8, 33, dtype=dtype), scale_factor=2),
        )
        v = t(2, 4, 8, 8, 8, dtype=dtype)
        back(
            F.max_pool3d(v, 2),
            F.avg_pool3d(v, 2),
            F.adaptive_avg_pool3d(v, 3),
            F.adaptive_max_pool3d(v, 3),
            F.interpolate(v, scale_factor=2, mode="trilinear"),
            F.interpolate(v, scale_factor=2),
            F.grid_sample(v, t(2, 3, 3, 3, 3, dtype=dtype), align_corners=False),
            F.adaptive_avg_pool3d(v, 1),
        )
        p, k = F.max_pool2d(t(2, 8, 32, 32, dtype=dtype), 2, return_indices=True)
        back(
            F.max_unpool2d(p, k, 2),
            F.fractional_max_pool2d(t(2, 8, 32, 32, dtype=dtype), 3, output_size=12),
        )
    for length in (30, 300):
        logs = t(length, 4, 20)
        targets = torch.zeros(4, 10, dtype=torch.int64, device=D)
        for reduction in ("mean", "sum", "none"):
            back(
                F.ctc_loss(
                    F.log_softmax(logs, -1), targets, (length,) * 4, (10,) * 4, reduction=reduction
                )
            )


@workload
def long_rows() -> None:
    for dtype in (f32, f16, bf16):
        for rows, wide in ((65537, 64), (70000, 33), (100000, 1024), (200000, 2048), (131072, 768)):
            back(
                nn.LayerNorm(wide, device=D, dtype=dtype)(t(rows, wide, dtype=dtype)),
                nn.RMSNorm(wide, device=D, dtype=dtype)(t(rows, wide, dtype=dtype)),
                nn.LayerNorm(wide, bias=False, device=D, dtype=dtype)(t(rows, wide, dtype=dtype)),
            )
        for vocabulary in (300, 500, 900, 2000):
            back(
                nn.Embedding(vocabulary, 768, device=D, dtype=dtype)(
                    torch.zeros(30000, dtype=torch.long, device=D)
                )
            )
        big = t(9, 2048, 50257, dtype=dtype)
        back(
            big.sum(),
            big.mean(-1),
            F.softmax(big, -1),
            F.cross_entropy(big.flatten(0, 1), torch.zeros(9 * 2048, dtype=torch.long, device=D)),
            big.amax(0),
            big.sum((0, 1)),
            big.var(2),
            big.norm(),
        )
        back(
            t(48, 1024, 1024, 32, dtype=dtype).sum((0, 3)),
            t(70000, 40000, dtype=dtype, grad=False).sum(0),
        )


def formats(*shape: int, dtype: torch.dtype = f32) -> tuple[Tensor, ...]:
    """Empty tensors of one shape: contiguous, channels last, every other row."""
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    batch, channels, rows, *rest = shape
    plain = torch.empty(shape, dtype=dtype, device=D)
    strided = torch.empty(batch, channels, 2 * rows, *rest, dtype=dtype, device=D)[:, :, ::2]
    return plain, plain.contiguous(memory_format=last), strided


@workload
def memory_formats() -> None:
    """Operands of one call in different formats, as around a ``flatten`` or ``view``."""
    for channels in (3, 4):
        for x in formats(2, channels, 8, 8):
            aten = torch.ops.aten
            for function in (aten.reflection_pad2d, aten.replication_pad2d):
                function(x, [1, 1, 1, 1])
            aten.upsample_nearest2d(x, [10, 10])
            aten._upsample_nearest_exact2d(x, [10, 10])
            for g in formats(2, channels, 4, 4):
                aten.avg_pool2d_backward(g, x, [2, 2], [2, 2], [0, 0], False, True, None)
                aten._adaptive_avg_pool2d_backward(g, x)
                aten.upsample_nearest2d_backward(g, [4, 4], [2, channels, 8, 8])
                aten._upsample_nearest_exact2d_backward(g, [4, 4], [2, channels, 8, 8])
                aten.upsample_bilinear2d_backward(g, [4, 4], [2, channels, 8, 8], False)
                for i in formats(2, channels, 4, 4, dtype=torch.int64):
                    pooled = (g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, i)
                    aten.max_pool2d_with_indices_backward(*pooled)
                    aten.max_unpool2d(g, i, [8, 8])


@workload
def memory_formats_3d() -> None:
    aten = torch.ops.aten
    for x in formats(2, 4, 8, 8, 8):
        aten.reflection_pad3d(x, [1] * 6)
        aten.adaptive_max_pool3d(x, [2] * 3)
        aten.max_pool3d_with_indices(x, [2] * 3)
        for g in formats(2, 4, 4, 4, 4):
            aten.upsample_nearest3d_backward(g, [4] * 3, [2, 4, 8, 8, 8])
            aten._upsample_nearest_exact3d_backward(g, [4] * 3, [2, 4, 8, 8, 8])
            for i in formats(2, 4, 4, 4, 4, dtype=torch.int64):
                pooled = (g, x, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, i)
                aten.max_pool3d_with_indices_backward(*pooled)
                aten.max_unpool3d(g, i, [8] * 3, [2] * 3, [0] * 3)


@workload
def checks_and_parts() -> None:
    for dtype in (f32, f16, torch.complex64, torch.int64):
        torch.isinf(t(20, 30, dtype=dtype, grad=False))
        torch.angle(t(20, 30, dtype=dtype, grad=False))
    for p in (1, 3):
        torch.mvlgamma(t(20, 30, grad=False), p)
    x = t(20, 1, dtype=torch.complex64, grad=False)
    for order in (0.5, 1, 2, 3, float("inf"), 0):
        torch.linalg.vector_norm(x, order, 1)
    for size, window, step in ((10, 3, 2), (10, 3, 3), (30, 5, 2)):
        back(t(size, 7).unfold(0, window, step), t(7, size).unfold(1, window, step))
    for scores in formats(2, 3, 4, 5):
        torch.ops.aten._safe_softmax(scores, 2)
