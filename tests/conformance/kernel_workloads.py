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
    back(F.bilinear(t(10, 4), t(10, 5), t(6, 4, 5), t(6)))
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
