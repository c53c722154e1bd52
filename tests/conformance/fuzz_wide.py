"""More parts for generated programs, of which seeds from :data:`WIDE_FROM` on draw too.

Programs of smaller seeds are recorded, so what they draw from stays as it is. Parts are made as in
:mod:`fuzz_parts`.
"""

from __future__ import annotations

import math
from random import Random

from fuzz_parts import Code, Part, Shape, _divisors, _flag, _sequence, _spread

WIDE_FROM = 100_000
WIDE: dict[str, tuple[Part, float]] = {}
#: Without a second derivative, and what hooks for saved tensors do not go with.
NOT_TWICE, NOT_HOOKED = {"attended", "decoder", "batched"}, {"jacobians", "batched"}


def wide(weight: float = 1.0) -> object:
    def register(function: Part) -> Part:
        WIDE[function.__name__] = (function, weight)
        return function

    return register


@wide(2.0)
def transposed_convolution(r: Random, s: Shape) -> Code | None:
    rank = len(s) - 2
    if rank not in (1, 2, 3) or s[1] > 128 or math.prod(s) > 1 << (17 if rank < 3 else 15):
        return None
    groups = r.choice(_divisors(s[1], 4))
    out, stride = groups * r.choice((1, 3, 8)), r.choice((1, 2))
    options = f"{s[1]}, {out}, {r.choice((2, 3))}, stride={stride}, groups={groups}"
    options += f", padding={r.choice((0, 1))}, output_padding={stride - 1}, bias={_flag(r)}"
    return f"nn.ConvTranspose{rank}d({options})", "x = @(x)"


@wide(2.0)
def parametrized(r: Random, s: Shape) -> Code | None:
    made = "torch.nn.utils.parametrizations." + r.choice(("weight_norm", "spectral_norm"))
    if len(s) == 4 and s[1] <= 64 and math.prod(s) <= 1 << 17 and _flag(r):
        return f"{made}(nn.Conv2d({s[1]}, {r.choice((3, 8, 16))}, 3, padding=1))", "x = @(x)"
    return f"{made}(nn.Linear({s[-1]}, {r.choice((8, 33, 128))}))", "x = @(x)"


@wide(1.5)
def dropped(r: Random, s: Shape) -> Code | None:
    options = ["F.alpha_dropout(x, 0.1, True)", "F.dropout(x, 0.5, True)"]
    if s[-1] % 2 == 0:
        options += ["F.glu(x)"] * 2
    if len(s) in (3, 4):
        options += [
            f"F.dropout{len(s) - 2}d(x, 0.2, True)",
            "F.feature_alpha_dropout(x, 0.2, True)",
        ]
    return "", "x = " + r.choice(options)


@wide(3.0)
def looked_at(r: Random, s: Shape) -> Code | None:
    """Comparisons and counts of which nothing is learned."""
    d, n = r.randrange(len(s)), math.prod(s)
    if n > 1 << 20:
        return None
    y = "x.detach()"
    options = [
        f"torch.isclose({y}, {y} * 2, rtol={r.choice((0.0, 1e-3))}, atol={r.choice((0.0, 1e-3))}, equal_nan={_flag(r)})",
        f"torch.isclose({y}, torch.rand({_spread(r, s)}, device=x.device, dtype=x.dtype))",
        f"torch.isin({y}.float(), torch.rand({r.choice((1, 5, 9))}, device=x.device), invert={_flag(r)})",
        f"{y}.count_nonzero({d})", f"{y}.float().histc(10, 0, 1)", f"{y}.isfinite().all({d})",
        f"torch.bucketize({y}.float(), torch.rand(20, device=x.device))",
        f"{y}.argsort({d})", f"{y}.aminmax()[0]", f"({y} > 0).sum({d})",
        f"torch.nonzero_static({y} > 0, size={r.choice((0, 7, 300))})", f"{y}.msort()",
        f"{y}.isnan().any()",
        f"torch.isposinf({y}) | torch.isneginf({y})",
    ]  # fmt: skip
    if s[d] <= 2048:
        options.append(f"{y}.mode({d})[1]")
    return "", f"y = {r.choice(options)}\ndel y"


@wide(2.0)
def selected(r: Random, s: Shape) -> Code | None:
    d, n = r.randrange(len(s)), math.prod(s)
    if n > 1 << 18:
        return None
    options = [
        f"x = x + x.nanmedian({d}, keepdim=True)[0]", "x = x + x.nanmedian()", "x = x + x.median()",
        f"y = x.aminmax(dim={d}, keepdim=True)\nx = x - y[0] + y[1]\ndel y",
        "y = x.aminmax()\nx = x - y[0] + y[1]\ndel y",
        f"x = x.masked_scatter(torch.zeros({_spread(r, s)}, dtype=torch.bool, device=x.device), x * 2)",
        f"i = torch.randint(0, {s[d]}, ({s[d]},), device=x.device)\nx = x.index_reduce({d}, i, x * 2, '{r.choice(('mean', 'amax', 'amin'))}')\ndel i",
        f"x = x.put(torch.randint(0, {n}, (7,), device=x.device), torch.ones(7, device=x.device, dtype=x.dtype), accumulate=True)",
        "x = torch.ldexp(x, torch.ones_like(x))", f"x = x.nan_to_num().cummax({d})[0]",
        f"x = torch.renorm(x, {r.choice((1, 2, 3))}, {d}, 1.0)",
    ]  # fmt: skip
    if s[d] <= 2048:
        options.append(f"x = x + x.mode({d}, keepdim=True)[0]")
    if len(s) > 1:
        j = f"torch.randint(0, {s[0]}, (9,), device=x.device), torch.randint(0, {s[1]}, (9,), device=x.device)"
        options += [
            f"x = x.index_put(({j}), torch.ones((), device=x.device, dtype=x.dtype), accumulate={_flag(r)})",
            f"y = x[{j}]\nx = x * y.sum()\ndel y",
        ]
    return "", r.choice(options)


@wide(2.0)
def complex_layers(r: Random, s: Shape) -> Code | None:
    if s[-1] % 2 or math.prod(s) > 1 << 17:
        return None
    n = s[-1] // 2
    made = "z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())\n"
    back = "\nx = torch.view_as_real(z).flatten(-2).to(x.dtype)\ndel z"
    used = r.choice([
        "z = z - torch.var_mean(z, -1, keepdim=True)[1]", "z = z - z.logsumexp(-1, keepdim=True)",
        "z = z.renorm(2, 0, 1.0)", "z = z * z.abs().square()", "z = z.tanh()", "z = z.conj() + 1",
        "z = torch.polar(z.abs(), z.angle())", "z = z / (1 + z.std())", "z = z.cumsum(-1)",
        "z = z.flip(-1) * 1j", "z = z.sgn()", "z = z.pow(2)",
    ])  # fmt: skip
    if _flag(r, 0.3):
        weight = f"nn.ParameterList([torch.zeros({n}, {n}, dtype=torch.complex64)])"
        return weight, f"{made}z = torch.matmul(z, @[0]){back}"
    return "", f"{made}{used}{back}"


@wide(1.5)
def jacobians(r: Random, s: Shape) -> Code | None:
    """torch.func of a handful of numbers."""
    if math.prod(s) > 1 << 16:
        return None
    f = r.choice(("torch.sin", "torch.tanh", "F.softplus", "lambda t: t.softmax(-1)"))
    k = min(s[-1], 6)
    head = f"x.flatten()[:{k}]"
    return "", "x = x * " + r.choice([
        f"torch.func.jacrev({f})({head}).sum()", f"torch.func.jacfwd({f})({head}).sum()",
        f"torch.func.hessian(lambda t: ({f})(t).pow(2).sum())({head}).sum()",
        f"torch.func.vmap(torch.func.jacrev({f}))(x.reshape(-1, {s[-1]})[:3, :{k}]).sum()",
        f"torch.func.jvp(torch.func.grad(lambda t: ({f})(t).pow(3).sum()), ({head},), ({head} * 2,))[1].sum()",
    ])  # fmt: skip


@wide(1.5)
def batched(r: Random, s: Shape) -> Code | None:
    """vmap of what chooses by device, and of modules."""
    if not _sequence(s) or s[2] % 8 or math.prod(s) > 1 << 17:
        return None
    if _flag(r, 0.3):
        f = "{n: p.expand(x.shape[0], *p.shape) for n, p in @.named_parameters()}"
        call = "lambda p, t: torch.func.functional_call(@, p, (t,))"
        return f"nn.Linear({s[2]}, 24)", f"x = torch.func.vmap({call})({f}, x)"
    return "", "x = " + r.choice([
        "torch.func.vmap(lambda t: F.dropout(t, 0.5, True), randomness='different')(x)",
        "torch.func.vmap(lambda t: F.dropout(t, 0.5, True), randomness='same')(x)",
        "torch.func.vmap(lambda t: F.scaled_dot_product_attention(t[None, None], t[None, None], t[None, None])[0, 0])(x)",
        "torch.func.vmap(lambda t: F.layer_norm(t, t.shape[-1:]))(x)",
        "torch.func.vmap(lambda t: F.conv1d(t[None], torch.ones(4, t.shape[0], 3, device=x.device, dtype=x.dtype), padding=1)[0])(x)",
    ])  # fmt: skip


@wide(1.5)
def attended(r: Random, s: Shape) -> Code | None:
    """Multi-head attention with padding, other keys, other widths, a bias for keys."""
    if not _sequence(s) or s[2] < 8 or s[0] * s[1] * s[1] > 1 << 20:
        return None
    heads, keys = r.choice(_divisors(s[2], 4)), r.choice((s[1], 5, 16))
    other = keys != s[1]
    weights = f"need_weights={_flag(r)}, average_attn_weights={_flag(r)}"
    padding = f"key_padding_mask=torch.zeros({s[0]}, {keys}, dtype=torch.bool, device=x.device)"
    y = f"torch.rand({s[0]}, {keys}, {s[2]}, device=x.device, dtype=x.dtype)" if other else "x"
    options = f"{s[2]}, {heads}, dropout={r.choice((0.0, 0.2))}, batch_first=True"
    options += f", add_bias_kv={_flag(r, 0.2)}"
    mask = f", {padding}" if _flag(r) else ""
    return (
        f"nn.MultiheadAttention({options})",
        f"y = {y}\nx = @(x, y, y, {weights}{mask})[0]\ndel y",
    )


@wide()
def decoder(r: Random, s: Shape) -> Code | None:
    if not _sequence(s) or s[2] < 8 or s[0] * s[1] * s[1] > 1 << 19:
        return None
    heads = r.choice(_divisors(s[2], 4))
    layer = (
        f"nn.TransformerDecoderLayer({s[2]}, {heads}, 64, batch_first=True, norm_first={_flag(r)})"
    )
    causal = f"tgt_mask=nn.Transformer.generate_square_subsequent_mask({s[1]}, device=x.device, dtype=x.dtype), tgt_is_causal=True"
    memory = f"torch.rand({s[0]}, 9, {s[2]}, device=x.device, dtype=x.dtype)"
    return (
        f"nn.TransformerDecoder({layer}, 2)",
        f"x = @(x, {memory}{', ' + causal if _flag(r) else ''})",
    )


@wide()
def unpooled(r: Random, s: Shape) -> Code | None:
    if len(s) != 4 or s[2] % 2 or s[3] % 2 or s[2] < 4 or s[3] < 4:
        return None
    return (
        "",
        "x, i = F.max_pool2d(x, 2, return_indices=True)\nx = F.max_unpool2d(x * 2, i, 2)\ndel i",
    )


@wide()
def sampled(r: Random, s: Shape) -> Code | None:
    if len(s) != 4 or math.prod(s) > 1 << 17 or min(s[2:]) < 2:
        return None
    mode, around = (
        r.choice(("bilinear", "nearest", "bicubic")),
        r.choice(("zeros", "border", "reflection")),
    )
    grid = f"F.affine_grid(torch.rand({s[0]}, 2, 3, device=x.device, dtype=x.dtype), [{s[0]}, {s[1]}, 7, 6], align_corners={_flag(r)})"
    return (
        "",
        f"x = F.grid_sample(x, {grid}, mode='{mode}', padding_mode='{around}', align_corners=False)",
    )


@wide()
def checkpointed(r: Random, s: Shape) -> Code | None:
    n = s[-1]
    layers = f"nn.Linear({n}, 40), nn.GELU(), nn.Linear(40, {n}), nn.Dropout(0.1)"
    call = f"torch.utils.checkpoint.checkpoint_sequential(@, {r.choice((1, 2, 3))}, x, use_reentrant=False)"
    return f"nn.Sequential({layers})", f"x = {call}"


@wide()
def assembled(r: Random, s: Shape) -> Code | None:
    n, p = s[-1], math.prod(s)
    if p > 1 << 16:
        return None
    options = [
        "x = torch.kron(x, torch.ones(2, device=x.device, dtype=x.dtype))",
        "x = x * F.one_hot(torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device), x.shape[-1])",
        "x = torch.block_diag(x.reshape(x.shape[0], -1)[:20, :20], torch.eye(3, device=x.device, dtype=x.dtype))",
        "x = torch.cartesian_prod(x.flatten()[:6], x.flatten()[:5])",
        "x = torch.special.xlog1py(x, x.abs())", "x = torch.cross(x, x.roll(1, -1), dim=-1)" if n == 3 else "x = x.unsqueeze(0).movedim(0, -1).squeeze(-1)",
    ]  # fmt: skip
    if len(s) == 2 and n <= 256:
        options.append(
            f"x = torch.linalg.multi_dot([x, torch.ones({n}, 9, device=x.device, dtype=x.dtype), torch.ones(9, {n}, device=x.device, dtype=x.dtype)])"
        )
    return "", r.choice(options)
