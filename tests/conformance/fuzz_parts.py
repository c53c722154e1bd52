"""The parts that generated programs are made of: each turns ``x`` of any shape into another ``x``.

A part is a function of a random generator and the shape of ``x``. It returns the module that the
model holds (or ``""``) and the statements of ``forward``; ``@`` stands for that module's name. None
of them reads a value, because neither a simulated GPU nor a stub driver has any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

Shape = tuple[int, ...]
Code = tuple[str, str]
Part = Callable[[Random, Shape], Code | None]
PARTS: dict[str, tuple[Part, float]] = {}

WIDTHS = (1, 3, 8, 10, 16, 24, 33, 64, 96, 100, 128, 200, 256, 384, 512, 768, 1000, 1024)


def part(weight: float = 1.0) -> Callable[[Part], Part]:
    def register(function: Part) -> Part:
        PARTS[function.__name__] = (function, weight)
        return function

    return register


def _flag(r: Random, chance: float = 0.5) -> bool:
    return r.random() < chance


def _dim(r: Random, shape: Shape) -> int:
    return r.randrange(len(shape)) - (len(shape) if _flag(r) else 0)


def _divisors(n: int, most: int = 16) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def _spread(r: Random, shape: Shape) -> str:
    """A shape that broadcasts against ``shape``."""
    dims = [1 if _flag(r, 0.4) else n for n in shape]
    return str(tuple(dims[r.randrange(len(dims)) :] if _flag(r, 0.3) else dims))


# ---- shapes ------------------------------------------------------------------------------------


@part(1.5)
def to_matrix(r: Random, s: Shape) -> Code | None:
    if len(s) == 2:
        return None
    return "", r.choice(["x = x.flatten(1)", "x = x.flatten(0, -2)", "x = x.reshape(-1, x.shape[-1])"]) \
        if len(s) > 2 else "x = x.reshape(1, -1)"  # fmt: skip


@part(2.0)
def to_sequence(r: Random, s: Shape) -> Code | None:
    if len(s) == 3:
        return None
    if len(s) == 2:
        rows = [d for d in _divisors(s[0], 64) if d > 1] or [1]
        return "", f"x = x.unflatten(0, ({r.choice(rows)}, -1))"
    return "", r.choice(["x = x.flatten(2)", "x = x.flatten(1, -2)", "x = x.flatten(2).mT"])


@part(2.0)
def to_image(r: Random, s: Shape) -> Code | None:
    if len(s) == 4:
        return None
    n = math.prod(s[1:])
    channels = [c for c in _divisors(n, 64) if c > 1 and n // c >= 16]
    if not channels or s[0] > 512:
        return None
    c = r.choice(channels)
    height = r.choice([d for d in _divisors(n // c, 64) if d * d <= n // c])
    last = ".contiguous(memory_format=torch.channels_last)" if _flag(r, 0.25) else ""
    return "", f"x = x.reshape({s[0]}, {c}, {height}, {n // c // height}){last}"


@part(0.5)
def to_volume(r: Random, s: Shape) -> Code | None:
    n = math.prod(s[1:])
    if len(s) == 5 or n % 32 or s[0] > 128 or n > 65536:
        return None
    return "", f"x = x.reshape({s[0]}, 4, 2, 2, {n // 16})"


@part()
def permute(r: Random, s: Shape) -> Code | None:
    order = list(range(len(s)))
    r.shuffle(order)
    return "", f"x = x.permute({', '.join(map(str, order))})" + r.choice(["", ".contiguous()"])


@part()
def narrow(r: Random, s: Shape) -> Code | None:
    dim = _dim(r, s)
    if s[dim] < 4:
        return None
    n = s[dim]
    return "", r.choice([
        f"x = x.narrow({dim}, 1, {n - 2})",
        f"x = torch.split(x, {max(1, n // 3)}, dim={dim})[1]",
        f"x = torch.chunk(x, 2, dim={dim})[0]",
        f"x = x.select({dim}, {n // 2}).unsqueeze({dim})",
        f"x = x.unfold({dim}, 2, 2).flatten(-2)",
    ])  # fmt: skip


@part()
def gate(r: Random, s: Shape) -> Code | None:
    dim = _dim(r, s)
    if s[dim] % 2 or s[dim] < 4:
        return None
    f = r.choice(
        ["a * b.sigmoid()", "F.silu(a) * b", "torch.maximum(a, b)", "a + b * b", "a.addcmul(a, b)"]
    )
    return "", f"a, b = x.chunk(2, {dim})\nx = {f}\ndel a, b"


# ---- modules -----------------------------------------------------------------------------------


@part(4.0)
def linear(r: Random, s: Shape) -> Code | None:
    return f"nn.Linear({s[-1]}, {r.choice(WIDTHS)}, bias={_flag(r, 0.7)})", "x = @(x)"


@part()
def linear_of_a_transposed(r: Random, s: Shape) -> Code | None:
    if len(s) < 2 or s[-2] > 4096:
        return None
    a, b = r.choice([(-1, -2), (0, -1)])
    if s[a if a == 0 else b] > 4096:
        return None
    inner = s[-2] if a == -1 else s[0]
    return (
        f"nn.Linear({inner}, {r.choice(WIDTHS)}, bias={_flag(r)})",
        f"x = @(x.transpose({a}, {b}))",
    )


@part()
def feed_forward(r: Random, s: Shape) -> Code | None:
    n, h = s[-1], r.choice(WIDTHS)
    act = r.choice(["GELU()", "ReLU()", "SiLU()", "Tanh()", "ReLU(inplace=True)"])
    return (
        f"nn.Sequential(nn.Linear({n}, {h}), nn.{act}, nn.Linear({h}, {n}))",
        r.choice(
            [
                "x = x + @(x)",
                "y = @(x)\nx = x + y\ndel y",
                "x = @(x)",
                "x = F.layer_norm(x + @(x), x.shape[-1:])",
            ]
        ),
    )


@part(0.5)
def tied(r: Random, s: Shape) -> Code | None:
    n = s[-1]
    return (
        f"nn.Linear({n}, {n})",
        "x = @(F.relu(@(x)))" if _flag(r) else "x = F.linear(F.gelu(@(x)), @.weight.t())",
    )


@part(0.5)
def bilinear(r: Random, s: Shape) -> Code | None:
    if s[-1] > 64 or math.prod(s[:-1]) > 2048:
        return None
    return f"nn.Bilinear({s[-1]}, {s[-1]}, {r.choice((3, 8, 16))})", "x = @(x, x)"


@part(2.0)
def convolution(r: Random, s: Shape) -> Code | None:
    rank = len(s) - 2
    if rank not in (1, 2, 3) or min(s[2:]) < 1 or s[1] > 1024 or math.prod(s) > 1 << 20:
        return None
    groups = r.choice(_divisors(s[1], 8)) if _flag(r, 0.3) else 1
    out = groups * r.choice((1, 2, 4, 8, 16))
    kernel = r.choice([k for k in (1, 2, 3, 5) if k <= min(s[2:]) + 2])
    dilation = r.choice((1, 1, 2)) if kernel <= 2 else 1
    transposed = "Transpose" if _flag(r, 0.3) else ""
    padding = kernel // 2 if dilation == 1 else 1
    return (
        f"nn.Conv{transposed}{rank}d({s[1]}, {out}, {kernel}, stride={r.choice((1, 1, 2))}, "
        f"padding={padding}, dilation={dilation}, groups={groups}, bias={_flag(r, 0.7)})",
        "x = @(x)",
    )


@part(2.0)
def norm(r: Random, s: Shape) -> Code | None:
    kinds = [
        f"nn.LayerNorm({list(s[-r.randint(1, min(2, len(s))) :])}, elementwise_affine={_flag(r, 0.8)})",
        f"nn.LayerNorm({s[-1]}, bias={_flag(r)})",
        f"nn.RMSNorm({s[-1]}, elementwise_affine={_flag(r, 0.8)})",
    ]
    if len(s) in (2, 3, 4, 5) and math.prod(s) > 2 * s[1]:
        rank = max(len(s) - 2, 1)
        options = f"{s[1]}, affine={_flag(r, 0.8)}, track_running_stats={_flag(r, 0.7)}"
        kinds += [f"nn.BatchNorm{rank}d({options})"] * 2
        if len(s) > 2 and math.prod(s[2:]) > 1:
            kinds += [f"nn.InstanceNorm{rank}d({options})"]
        kinds += [
            f"nn.GroupNorm({r.choice(_divisors(s[1], 32))}, {s[1]}, affine={_flag(r, 0.8)})"
        ] * 2
        if len(s) > 2:
            kinds += [f"nn.LocalResponseNorm({r.choice((2, 3, 5))})"]
    return r.choice(kinds), "x = @(x)"


ACTIVATIONS = (
    "ReLU()", "ReLU(inplace=True)", "ReLU6()", "ELU()", "ELU(inplace=True)", "SELU()", "CELU()",
    "GELU()", "GELU(approximate='tanh')", "SiLU()", "SiLU(inplace=True)", "Mish()", "Sigmoid()",
    "Tanh()", "Softplus()", "Softsign()", "Softshrink()", "Hardshrink()", "Hardtanh()",
    "Hardsigmoid()", "Hardswish()", "LeakyReLU(0.1)", "LeakyReLU(0.1, inplace=True)", "PReLU()",
    "RReLU()", "LogSigmoid()", "Tanhshrink()", "Threshold(0.1, 0.2)", "Softmin(-1)",
    "Softmax(-1)", "LogSoftmax(-1)", "Softmax(0)", "LogSoftmax(1)", "GLU(-1)",
)  # fmt: skip


@part(3.0)
def activation(r: Random, s: Shape) -> Code | None:
    chosen = r.choice(ACTIVATIONS)
    if (chosen == "GLU(-1)" and s[-1] % 2) or (chosen == "LogSoftmax(1)" and len(s) < 2):
        return None
    if chosen == "PReLU()" and len(s) > 1 and _flag(r):
        chosen = f"PReLU({s[1]})"
    if "inplace" in chosen:  # what made x may need it as it was
        return f"nn.{chosen}", "x = @(x * 1.5)"
    return f"nn.{chosen}", "x = @(x)"


@part()
def dropout(r: Random, s: Shape) -> Code | None:
    kinds = ["Dropout", "AlphaDropout", "FeatureAlphaDropout"]
    kinds += [f"Dropout{len(s) - 2}d"] if len(s) in (3, 4, 5) else ["Dropout"]
    return f"nn.{r.choice(kinds)}({r.choice((0.1, 0.5))})", "x = @(x)"


@part()
def pooling(r: Random, s: Shape) -> Code | None:
    rank = len(s) - 2
    if rank not in (1, 2, 3) or min(s[2:]) < 4:
        return None
    kinds = [
        f"MaxPool{rank}d({r.choice((2, 3))}, stride={r.choice((1, 2))})",
        f"AvgPool{rank}d({r.choice((2, 3))}, stride={r.choice((1, 2))}, ceil_mode={_flag(r)})",
        f"LPPool{rank}d(2, 2)",
        f"AdaptiveAvgPool{rank}d({r.choice((1, 2, 3))})",
        f"AdaptiveMaxPool{rank}d({r.choice((1, 2, 3))})",
    ]
    kinds += [f"FractionalMaxPool{rank}d(2, output_ratio=0.5)"] if rank > 1 else []
    return f"nn.{r.choice(kinds)}", "x = @(x)"


@part()
def resize(r: Random, s: Shape) -> Code | None:
    rank = len(s) - 2
    if rank not in (1, 2, 3) or min(s[2:]) < 2 or math.prod(s) > 1 << 19:
        return None
    modes = {1: ["linear", "nearest"], 2: ["bilinear", "bicubic", "nearest", "nearest-exact"],
             3: ["trilinear", "nearest"]}[rank]  # fmt: skip
    mode = r.choice(modes)
    corners = f", align_corners={_flag(r)}" if "linear" in mode or mode == "bicubic" else ""
    options = [f"x = F.interpolate(x, scale_factor=2, mode='{mode}'{corners})"]
    if mode in ("bilinear", "bicubic"):
        options += [
            f"x = F.interpolate(x, size={(s[2] + 1) // 2, (s[3] + 1) // 2}, mode='{mode}', antialias=True)"
        ]
    if rank == 2 and s[1] % 4 == 0:
        options += ["x = F.pixel_shuffle(x, 2)", "x = F.channel_shuffle(x, 2)"]
    if rank == 2 and s[2] % 2 == s[3] % 2 == 0:
        options += ["x = F.pixel_unshuffle(x, 2)"]
    if rank == 2 and s[2] > 3 and s[3] > 3 and s[1] <= 64:
        options += ["x = F.unfold(x, 3, padding=1)",
                    f"x = F.fold(F.unfold(x, 2, stride=2), {(s[2] // 2 * 2, s[3] // 2 * 2)}, 2, stride=2)",
                    "x = F.grid_sample(x, torch.rand(x.shape[0], 8, 9, 2, device=x.device, dtype=x.dtype), align_corners=False)"]  # fmt: skip
    return "", r.choice(options)


@part()
def pad(r: Random, s: Shape) -> Code | None:
    rank = len(s) - 2
    options = [
        "x = F.pad(x, (1, 2))",
        "x = F.pad(x, (0, 1, 0, 1), value=1.0)" if len(s) > 1 else "x = F.pad(x, (2, 0))",
    ]
    if rank in (1, 2, 3) and min(s[2:]) > 2:
        options += [
            f"x = F.pad(x, {(1, 1) * rank}, mode='{mode}')"
            for mode in ("reflect", "replicate", "circular")
        ]
    return "", r.choice(options)


# ---- attention and recurrence ------------------------------------------------------------------


def _sequence(s: Shape) -> bool:
    return len(s) == 3 and 1 < s[1] <= 512 and s[0] <= 256 and math.prod(s) <= 1 << 19


@part(1.5)
def multihead_attention(r: Random, s: Shape) -> Code | None:
    if not _sequence(s) or s[2] < 8 or s[0] * s[1] * s[1] > 1 << 21:
        return None
    heads = r.choice(_divisors(s[2], 8))
    first = _flag(r, 0.7)
    length = s[1] if first else s[0]
    more = r.choice(["", "", f", attn_mask=torch.ones({length}, {length}, dtype=torch.bool, device=x.device).triu(1)",
                     f", attn_mask=nn.Transformer.generate_square_subsequent_mask({length}, device=x.device, dtype=x.dtype), is_causal=True"])  # fmt: skip
    return (
        f"nn.MultiheadAttention({s[2]}, {heads}, dropout={r.choice((0.0, 0.1))}, bias={_flag(r, 0.8)}, "
        f"add_zero_attn={_flag(r, 0.1) and not more}, batch_first={first})",
        f"x = @(x, x, x, need_weights={_flag(r, 0.4)}{more})[0]",
    )


@part(1.5)
def transformer_layer(r: Random, s: Shape) -> Code | None:
    if not _sequence(s) or s[2] < 8 or s[0] * s[1] * s[1] > 1 << 21:
        return None
    heads = r.choice(_divisors(s[2], 8))
    options = (f"{s[2]}, {heads}, {r.choice((64, 128, 512))}, dropout={r.choice((0.0, 0.1))}, "
               f"activation='{r.choice(('relu', 'gelu'))}', batch_first={_flag(r, 0.8)}, "
               f"norm_first={_flag(r)}")  # fmt: skip
    if _flag(r, 0.25):
        return f"nn.TransformerDecoderLayer({options})", "x = @(x, x)"
    return f"nn.TransformerEncoderLayer({options})", "x = @(x)"


@part(2.0)
def scaled_dot_product(r: Random, s: Shape) -> Code | None:
    if not _sequence(s) or s[0] * s[1] * s[1] > 1 << 20:
        return None
    heads, width = r.choice((1, 2, 4, 6)), r.choice((8, 16, 20, 32, 64, 80, 128))
    groups = r.choice([d for d in (1, 2) if heads % d == 0]) if _flag(r, 0.3) else heads
    n = width * (heads + 2 * groups)
    mask = r.choice([
        "", "", "is_causal=True",
        f"attn_mask=torch.ones({s[1]}, {s[1]}, dtype=torch.bool, device=x.device).tril()",
        f"attn_mask=torch.zeros({s[0]}, 1, {s[1]}, {s[1]}, dtype=q.dtype, device=x.device)",
        f"attn_mask=torch.zeros({s[1]}, dtype=q.dtype, device=x.device).expand({s[0]}, {heads}, {s[1]}, {s[1]})",
    ])  # fmt: skip
    drop = "dropout_p=0.1" if _flag(r, 0.25) else ""
    gqa = "enable_gqa=True" if groups != heads else ""
    scale = "scale=0.2" if _flag(r, 0.2) else ""
    given = "".join(f", {o}" for o in (mask, drop, gqa, scale) if o)
    return f"nn.Linear({s[2]}, {n}, bias={_flag(r)})", (
        f"q, k, v = @(x).unflatten(-1, (-1, {width})).transpose(1, 2).split(({heads}, {groups}, {groups}), 1)\n"
        f"x = F.scaled_dot_product_attention(q, k, v{given}).transpose(1, 2).flatten(2)\n"
        "del q, k, v"
    )


@part()
def attention_by_hand(r: Random, s: Shape) -> Code | None:
    if not _sequence(s) or s[0] * s[1] * s[1] > 1 << 20:
        return None
    return f"nn.Linear({s[2]}, {3 * 32})", (
        "q, k, v = @(x).chunk(3, -1)\n"
        + r.choice(["w = (q @ k.mT / 5.6).softmax(-1)", "w = torch.einsum('bqc,bkc->bqk', q, k).softmax(-1)",
                    f"w = torch.baddbmm(torch.zeros((), device=x.device, dtype=q.dtype), q, k.mT, beta=0, alpha=0.2).softmax(-1)",
                    f"w = (q @ k.mT).masked_fill(torch.ones({s[1]}, {s[1]}, device=x.device).triu(1).bool(), float('-inf')).softmax(-1)"])
        + "\nx = " + r.choice(["w @ v", "torch.bmm(w, v)", "torch.einsum('bqk,bkc->bqc', w, v)"])
        + "\ndel q, k, v, w"
    )  # fmt: skip


@part(0.8)
def recurrent(r: Random, s: Shape) -> Code | None:
    if not _sequence(s) or s[1] > 24 or s[0] > 64:
        return None
    kind = r.choice(("LSTM", "GRU", "RNN"))
    layers = r.choice((1, 1, 2))
    drop = f", dropout={0.2}" if layers > 1 and _flag(r) else ""
    return (
        f"nn.{kind}({s[2]}, {r.choice((16, 64, 100))}, num_layers={layers}, bidirectional={_flag(r, 0.3)}, "
        f"bias={_flag(r, 0.8)}, batch_first={_flag(r, 0.7)}{drop})",
        "x = @(x)[0]",
    )


@part(0.5)
def recurrent_cell(r: Random, s: Shape) -> Code | None:
    if len(s) != 2 or s[0] > 2048 or s[1] > 1024:
        return None
    kind, n = r.choice(("LSTM", "GRU", "RNN")), r.choice((16, 64, 100))
    first = "[0]" if kind == "LSTM" else ""
    return f"nn.{kind}Cell({s[1]}, {n})", f"x = @(x){first}"


@part(1.5)
def positions(r: Random, s: Shape) -> Code | None:
    if len(s) < 2 or s[-1] > 2048:
        return None
    n = r.choice((100, 1000, 5000)) if s[-2] <= 100 else max(s[-2], 5000)
    index = r.choice([
        f"torch.arange({s[-2]}, device=x.device)",
        f"torch.randint(0, {n}, ({s[-2]},), device=x.device)",
        f"torch.randint(0, {n}, {s[:-1]}, device=x.device)",
    ])  # fmt: skip
    if s[-2] > 5000:
        return None
    options = r.choice(["", "", ", padding_idx=0", ", scale_grad_by_freq=True"])
    return f"nn.Embedding({max(n, s[-2])}, {s[-1]}{options})", f"x = x + @({index})"


@part(0.6)
def bags(r: Random, s: Shape) -> Code | None:
    if len(s) != 2 or s[0] > 4096 or s[1] > 1024:
        return None
    mode, n = r.choice(("sum", "mean", "max")), r.choice((50, 1000))
    return (
        f"nn.EmbeddingBag({n}, {s[1]}, mode='{mode}')",
        f"x = x + @(torch.randint(0, {n}, ({s[0]}, {r.choice((1, 3, 8))}), device=x.device))",
    )


@part(0.6)
def experts(r: Random, s: Shape) -> Code | None:
    if math.prod(s[:-1]) > 8192 or s[-1] > 512:
        return None
    k = r.choice((2, 3, 4))
    return (
        f"nn.ModuleList([nn.Linear({s[-1]}, {k}), *(nn.Linear({s[-1]}, {s[-1]}) for _ in range({k}))])",
        (
            f"w = @[0](x).softmax(-1)\n"
            f"g = torch.zeros_like(w)\n"
            f"w, i = w.topk({k - 1}, dim=-1)\n"
            f"g = g.scatter(-1, i, w)\n"
            f"x = (torch.stack([m(x) for m in @[1:]], -2) * g.unsqueeze(-1)).sum(-2)\n"
            "del w, i, g"
        ),
    )


# ---- tensor expressions ------------------------------------------------------------------------


@part(2.0)
def pointwise(r: Random, s: Shape) -> Code | None:
    other = f"torch.rand({_spread(r, s)}, device=x.device, dtype=x.dtype)"
    return "", "x = " + r.choice([
        f"x + {other}", f"x * {other}", f"x / (1 + {other})", f"{other} - x", f"torch.maximum(x, {other})",
        "x.abs().add(1).log()", "x.square()", "x.exp().clamp(max=5)", "x.sin() * x.cos()", "(x * x + 1).sqrt()",
        "(x * x + 1).rsqrt()", "x.clamp(-1, 1)", "x.pow(3)", "(x.abs() + 1).pow(1.5)", "torch.lerp(x, x * x, 0.3)",
        f"torch.where({other} > 0.5, x, x * 2)", "x.masked_fill(torch.zeros_like(x, dtype=torch.bool), 0.0)",
        "torch.erf(x)", "torch.log1p(x.abs())", "torch.atan2(x, x + 2)", "torch.addcdiv(x, x, x.abs() + 1)",
        "x.nan_to_num()", "torch.hypot(x, x)", "x.expm1()", "torch.logaddexp(x, x + 1)", "torch.xlogy(x, x.abs() + 1)",
        "x - x.detach().mean()", "torch.polar(x.float().abs(), x.float()).real.to(x.dtype)", "x.tan().sinh().asinh()",
        "x.sgn() + x.frac()", "torch.fmod(x, 0.7)", "torch.remainder(x, 0.7)", "x.sigmoid().logit(eps=1e-3)",
        "torch.special.i0(x.clamp(-2, 2))", "torch.copysign(x, x + 1)", "x.lgamma()", "x.reciprocal()",
    ])  # fmt: skip


@part(2.0)
def reduce(r: Random, s: Shape) -> Code | None:
    dims = sorted(r.sample(range(len(s)), r.randint(1, max(1, len(s) - 1))))
    d = dims[0]
    return "", r.choice([
        f"x = x - x.mean({dims}, keepdim=True)", f"x = x * x.sum({d}, keepdim=True)",
        f"x = x / (x.std({dims}, keepdim=True) + 1)" if math.prod(s[i] for i in dims) > 1 else "x = x * x.mean()",
        f"x = x - x.amax({dims}, keepdim=True)", f"x = x - x.max({d}, keepdim=True)[0]",
        f"x = x - x.logsumexp({dims}, keepdim=True)", f"x = x / (x.norm(dim={dims}, keepdim=True) + 1)",
        f"x = x * x.var({d}, keepdim=True, correction=0)", f"x = x + x.median({d}, keepdim=True)[0]",
        f"x = x + x.min({d}, keepdim=True).values", f"x = x * x.norm(p=1)", "x = x + x.max()", "x = x - x.sum()",
        f"x = F.normalize(x, dim={d})", f"x = x + torch.var_mean(x, {d}, keepdim=True, correction=0)[1]",
        f"x = x + x.prod({d}, keepdim=True)", f"x = x + x.abs().norm(p=3, dim={d}, keepdim=True)",
        f"x = x + x.kthvalue(1, {d}, keepdim=True)[0]",
        f"x = x + x.nansum({d}, keepdim=True)", f"x = x + torch.linalg.vector_norm(x, float('inf'), {d}, keepdim=True)",
        f"x = x + x.float().quantile(0.5, dim={d}, keepdim=True).to(x.dtype)" if math.prod(s) < 1 << 20 else "x = x + x.std()",
        f"x = x + x.aminmax(dim={d}, keepdim=True)[1]",
    ])  # fmt: skip


@part()
def drop_dim(r: Random, s: Shape) -> Code | None:
    if len(s) < 3:
        return None
    d = _dim(r, s)
    f = r.choice(["mean", "sum", "amax", "logsumexp", "std"]) if s[d] > 1 else "sum"
    return "", f"x = x.{f}({d})"


@part()
def scan(r: Random, s: Shape) -> Code | None:
    d = _dim(r, s)
    return "", "x = " + r.choice([
        f"x.cumsum({d})", f"x.cumsum({d}) / {s[d]}", f"(1 + x / 99).cumprod({d})", f"x.logcumsumexp({d})",
        f"x.cummax({d})[0]", f"x.cummin({d}).values", f"x.sort({d})[0]", f"x.sort({d}, descending=True, stable=True)[0]",
        f"x.topk({max(1, s[d] // 2)}, {d})[0]", f"x.gather({d}, x.argsort({d}))", f"x.flip({d})", f"x.roll(1, {d})",
        f"x.diff(dim={d}, prepend=x.narrow({d}, 0, 1))", f"x.renorm(2, {d}, 1.0)", f"torch.trapezoid(x, dim={d}).unsqueeze({d}) + x",
    ])  # fmt: skip


@part(1.5)
def join(r: Random, s: Shape) -> Code | None:
    if math.prod(s) > 1 << 19:
        return None
    d = r.randrange(len(s))
    return "", "x = " + r.choice([
        f"torch.cat([x, x * 2], {d})", f"torch.cat([x, x.flip({d}), x.narrow({d}, 0, 1)], {d})",
        f"torch.stack([x, x.neg()], {d})" if len(s) < 5 else "x * 3", f"x.repeat_interleave(2, {d})",
        f"x.unsqueeze({d}).expand({', '.join('3' if i == d else '-1' for i in range(len(s) + 1))}).flatten({d}, {d + 1})",
        f"x.repeat({', '.join('2' if i == d else '1' for i in range(len(s)))})", "torch.hstack([x, x])",
        f"torch.tile(x, (2,))", "torch.vstack([x, x.detach()])", f"x.index_select({d}, torch.arange({s[d]}, device=x.device).repeat(2))",
    ])  # fmt: skip


@part(1.5)
def indexed(r: Random, s: Shape) -> Code | None:
    d, n = r.randrange(len(s)), math.prod(s)
    k = s[d]
    if n > 1 << 20:
        return None
    pick = f"torch.randint(0, {k}, ({r.choice((k, max(1, k // 2)))},), device=x.device)"
    full = f"torch.randint(0, {k}, {s}, device=x.device)"
    lead = ":, " * d
    return "", r.choice([
        f"x = x.index_select({d}, {pick})", f"x = x[{lead}{pick}]", f"x = x.gather({d}, {full})",
        f"x = torch.take_along_dim(x, {full}, {d})", f"i = {full}\nx = x.scatter({d}, i, x * 2)\ndel i",
        f"i = {full}\nx = torch.zeros_like(x).scatter_add({d}, i, x)\ndel i",
        f"i = {full}\nx = x.scatter_reduce({d}, i, x, '{r.choice(('sum', 'mean', 'amax'))}')\ndel i",
        f"i = torch.randint(0, {k}, ({k},), device=x.device)\nx = x.index_add({d}, i, x)\ndel i",
        f"i = torch.randint(0, {k}, ({k},), device=x.device)\nx = x.index_copy({d}, i, x * 3)\ndel i",
        f"i = torch.randint(0, {s[0]}, ({s[0]},), device=x.device)\nx = x.index_put((i,), x * 2, accumulate={_flag(r)})\ndel i",
        f"x = x.index_fill({d}, torch.arange({max(1, k // 2)}, device=x.device), 0.5)",
        f"y = torch.zeros_like(x)\ny[{lead}::2] = x[{lead}::2] * 2\nx = y\ndel y",
        f"x = x.take(torch.randint(0, {n}, {s}, device=x.device))", "x = x.tril(1)" if len(s) > 1 else "x = x * 2",
        f"x = x[{lead}::2]", f"x = x[torch.arange({s[0]}, device=x.device), ...]",
        f"x = x.masked_scatter(torch.zeros_like(x, dtype=torch.bool), x * 2)",
        f"x = x.select_scatter(x.select({d}, 0) * 2, {d}, 0)", f"x = x.slice_scatter(x.narrow({d}, 0, 1) * 2, {d}, 0, 1)",
    ])  # fmt: skip


@part(2.0)
def product(r: Random, s: Shape) -> Code | None:
    n, k = s[-1], r.choice((1, 3, 16, 65, 128))
    w = f"torch.randn({n}, {k}, device=x.device, dtype=x.dtype)"
    options = [
        f"x = x @ {w}",
        f"x = torch.matmul(x, {w})",
        f"x = torch.einsum('...i,io->...o', x, {w})",
        f"x = torch.tensordot(x, {w}, 1)",
    ]
    if len(s) == 2:
        options += ["x = x.t() @ x" if s[1] <= 1024 else "x = x @ x.t()[:, :8]", f"x = torch.addmm(torch.randn({k}, device=x.device, dtype=x.dtype), x, {w})",
                    f"x = torch.outer(x.sum(1), x.sum(0))" if math.prod(s) < 1 << 20 else f"x = x @ {w}",
                    f"x = torch.mv(x, torch.randn({n}, device=x.device, dtype=x.dtype)).unsqueeze(1)"]  # fmt: skip
        if s[0] <= 1024 and s[1] <= 1024:
            options += [
                "x = torch.cdist(x, x * 2)",
                "x = F.cosine_similarity(x, x * 2, dim=-1).unsqueeze(1) * x",
            ]
    if len(s) >= 3 and s[-2] <= 512 and math.prod(s[:-1]) * s[-2] <= 1 << 20:
        options += [
            "x = x @ x.mT",
            "x = torch.matmul(x, x.transpose(-1, -2).contiguous())",
            "x = torch.einsum('...ic,...jc->...ij', x, x)",
        ]
    if len(s) == 3:
        options += [f"x = torch.bmm(x, torch.randn({s[0]}, {n}, {k}, device=x.device, dtype=x.dtype))",
                    f"x = torch.einsum('bic,bcd->bid', x, torch.randn({s[0]}, {n}, {k}, device=x.device, dtype=x.dtype))",
                    f"x = torch.baddbmm(torch.randn({s[1]}, {k}, device=x.device, dtype=x.dtype), x, torch.randn({s[0]}, {n}, {k}, device=x.device, dtype=x.dtype))",
                    f"x = torch.einsum('bic,jc->bij', x, torch.randn({k}, {n}, device=x.device, dtype=x.dtype))",
                    f"x = torch.einsum('bic,d->bicd', x, torch.randn(2, device=x.device, dtype=x.dtype)).flatten(2)"]  # fmt: skip
    return "", r.choice(options)


@part()
def learned(r: Random, s: Shape) -> Code | None:
    """A bare parameter, broadcast."""
    return f"nn.ParameterList([torch.ones({_spread(r, s)})])", r.choice(
        ["x = x * @[0]", "x = x + @[0]", "x = torch.addcmul(x, x, @[0])"]
    )


@part()
def cast(r: Random, s: Shape) -> Code | None:
    return "", r.choice([
        "x = x.float()", "x = (x.double() * 1.5).to(x.dtype)", "y = x.half()\nx = (y * y).to(x.dtype)\ndel y",
        "x = x.to(torch.bfloat16).to(x.dtype)", "x = x.contiguous()", "x = x.clone()", "x = x.float().softmax(-1).to(x.dtype)",
        "x = x.type_as(torch.zeros((), device=x.device))", "x = x.clone(memory_format=torch.contiguous_format)",
    ])  # fmt: skip


@part(0.7)
def in_place(r: Random, s: Shape) -> Code | None:
    return "", r.choice([
        "y = x * 2\ny.add_(1)\nx = y\ndel y", "y = x + 1\ny.mul_(x.detach())\nx = y\ndel y", "x = (x * 2).clamp_(-1, 1)",
        "y = x.clone()\ny[0] = 0\nx = y\ndel y", "y = x * 1\ny.relu_()\nx = y\ndel y", "y = torch.empty_like(x)\ny.copy_(x)\nx = y\ndel y",
        "y = x.clone()\ny.narrow(0, 0, 1).mul_(2)\nx = y\ndel y", "y = x * 1\ny.sigmoid_()\nx = y\ndel y",
        "y = x * 1\ny.div_(3).sub_(x)\nx = y\ndel y", "y = x.new_zeros(x.shape)\ny += x\nx = y\ndel y",
    ])  # fmt: skip


@part(0.5)
def hooked(r: Random, s: Shape) -> Code | None:
    return "", r.choice([
        "if x.requires_grad:\n    x.register_hook(lambda g: g * 2)",
        "if x.requires_grad:\n    x.register_hook(lambda g: None)",
        "if x.requires_grad and torch.is_grad_enabled():\n    x = x * 1\n    x.retain_grad()",
        "x = x + x.detach() * 0.1",
    ])  # fmt: skip


@part(0.7)
def transformed(r: Random, s: Shape) -> Code | None:
    """torch.func: gradients of samples, products with Jacobians, a module called with other data."""
    if math.prod(s) > 1 << 18:
        return None
    if _flag(r, 0.3):
        return (
            f"nn.Linear({s[-1]}, {s[-1]})",
            "x = torch.func.functional_call(@, {n: p * 2 for n, p in @.named_parameters()}, (x,))",
        )
    f = r.choice(["torch.sin", "torch.tanh", "F.gelu", "F.softplus", "lambda t: t.softmax(-1) * t"])
    return "", "x = " + r.choice([
        f"torch.func.vmap({f})(x)",
        f"torch.func.vmap(torch.func.grad(lambda t: t.square().sum()))(x)",
        f"torch.func.jvp({f}, (x,), (x * 2,))[1]",
        f"torch.func.vjp({f}, x)[1](x * 3)[0]",
        f"torch.func.grad(lambda t: ({f})(t).sum())(x)",
    ])  # fmt: skip


@part(0.7)
def complex_numbers(r: Random, s: Shape) -> Code | None:
    if s[-1] % 2 or math.prod(s) > 1 << 18:
        return None
    made = "z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())\n"
    used = r.choice([
        "x = torch.view_as_real(z * z.conj()).flatten(-2).to(x.dtype)",
        "x = torch.cat([z.real, z.imag], -1).to(x.dtype)",
        "x = (z * 1j).abs().to(x.dtype)", "x = z.exp().real.to(x.dtype)",
        "x = (z @ torch.randn(z.shape[-1], 8, dtype=z.dtype, device=z.device)).abs().to(x.dtype)",
        "x = (z - z.mean()).angle().to(x.dtype)", "x = torch.view_as_real(z / (1 + z.abs())).flatten(-2).to(x.dtype)",
    ])  # fmt: skip
    return "", f"{made}{used}\ndel z"


@part(0.5)
def einsum(r: Random, s: Shape) -> Code | None:
    if len(s) not in (2, 3, 4) or math.prod(s) > 1 << 18:
        return None
    n, k = s[-1], r.choice((1, 4, 16))
    given = "x.dtype, device=x.device"
    options = {
        2: [f"'bi,ki->bk', x, torch.randn({k}, {n}, dtype={given})", f"'bi,bi->b', x, x",
            f"'bi,ij,bj->bi', x, torch.randn({n}, {n}, dtype={given}), x" if n <= 512 else f"'bi->b', x"],
        3: [f"'bti,ki->btk', x, torch.randn({k}, {n}, dtype={given})", f"'bti,bki->bik', x, torch.randn({s[0]}, {k}, {n}, dtype={given})",
            f"'bti,bti->bt', x, x", f"'bti,t->bi', x, torch.randn({s[1]}, dtype={given})", f"'bti->bit', x"],
        4: [f"'bhti,ik->bhtk', x, torch.randn({n}, {k}, dtype={given})", f"'bhti,hik->bthk', x, torch.randn({s[1]}, {n}, {k}, dtype={given})",
            f"'bhti,bhti->bht', x, x", f"'bchw,c->bhw', x, torch.randn({s[1]}, dtype={given})"],
    }[len(s)]  # fmt: skip
    return "", f"x = torch.einsum({r.choice(options)})"
