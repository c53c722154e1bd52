"""Losses for generated programs: statements that make ``loss`` of ``x`` of any shape."""

from __future__ import annotations

from random import Random

Shape = tuple[int, ...]


def loss_code(r: Random, shape: Shape, autocast: bool, twice: bool = False) -> list[str]:
    """Every loss of ``torch.nn.functional`` that fits; the generator 0 stands for the simplest.
    ``twice``: one that can be differentiated twice."""
    if r.getstate() == Random(0).getstate():
        return ["loss = x.mean()"]
    if twice:
        return _of_values(r, autocast)
    options = [_of_values(r, autocast), _of_values(r, autocast), _of_classes(r, shape)]
    options.append(_of_pairs(r))
    if len(shape) == 3 and shape[1] > 4 and shape[2] > 4 and shape[0] * shape[1] < 1 << 14:
        options.append(_of_sequences(shape))
    return r.choice(options)


def _of_values(r: Random, autocast: bool) -> list[str]:
    kind = r.choice(("mean", "sum"))
    names = ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss",
             "binary_cross_entropy_with_logits", "gaussian_nll_loss", "soft_margin_loss",
             "hinge_embedding_loss", "none", "plain"]  # fmt: skip
    if not autocast:
        names.append("binary_cross_entropy")
    name = r.choice(names)
    target = "torch.rand(x.shape, device=x.device, dtype=x.dtype)"
    if name == "plain":
        return [r.choice(["loss = x.mean()", "loss = x.square().mean()", "loss = x.float().pow(2).sum()",
                          "loss = x.sum()", "loss = x.abs().mean()", "loss = x.logsumexp(-1).mean()"])]  # fmt: skip
    if name == "none":
        return [f"loss = F.mse_loss(x, {target}, reduction='none').mean()"]
    if name == "kl_div":
        return [
            f"loss = F.kl_div(F.log_softmax(x, -1), {target}.softmax(-1), reduction='batchmean')"
        ]
    if name == "gaussian_nll_loss":
        return [f"loss = F.gaussian_nll_loss(x, {target}, torch.ones_like(x))"]
    if name == "binary_cross_entropy":
        return [f"loss = F.binary_cross_entropy(x.sigmoid(), {target}, reduction='{kind}')"]
    if name == "binary_cross_entropy_with_logits" and r.random() < 0.3:
        return [f"loss = F.{name}(x, {target}, pos_weight=torch.ones((), device=x.device))"]
    if name in ("soft_margin_loss", "hinge_embedding_loss"):
        target = "torch.ones_like(x)"
    return [f"loss = F.{name}(x, {target}, reduction='{kind}')"]


def _of_classes(r: Random, shape: Shape) -> list[str]:
    lines, classes = [], shape[-1]
    if len(shape) != 2:
        lines = ["x = x.flatten(0, -2)" if len(shape) > 1 else "x = x.unsqueeze(0)"]
    if classes < 2:
        return ["loss = x.mean()"]
    target = f"torch.randint(0, {classes}, (x.shape[0],), device=x.device)"
    options = [
        f"loss = F.cross_entropy(x, {target})",
        f"loss = F.cross_entropy(x, {target}, label_smoothing=0.1)",
        f"loss = F.cross_entropy(x, {target}, weight=torch.ones({classes}, device=x.device, dtype=x.dtype))",
        f"loss = F.cross_entropy(x, {target}, reduction='sum', ignore_index=1)",
        "loss = F.cross_entropy(x, torch.rand(x.shape, device=x.device, dtype=x.dtype).softmax(-1))",
        f"loss = F.nll_loss(F.log_softmax(x, -1), {target})",
        f"loss = F.cross_entropy(x.float(), {target}, reduction='none').mean()",
        f"loss = F.multi_margin_loss(x.float(), {target})",
        f"loss = F.multilabel_margin_loss(x.float(), torch.zeros(x.shape, dtype=torch.long, device=x.device))",
        "loss = F.multilabel_soft_margin_loss(x, torch.ones_like(x))",
    ]  # fmt: skip
    if len(shape) > 2 and shape[1] > 1 and r.random() < 0.3:
        target = f"torch.randint(0, {shape[1]}, {(shape[0], *shape[2:])}, device=x.device)"
        return [f"loss = F.cross_entropy(x, {target})"]
    return [*lines, r.choice(options)]


def _of_pairs(r: Random) -> list[str]:
    return [
        "x = x.flatten(1) if x.dim() > 1 else x.unsqueeze(0)",
        "loss = " + r.choice([
            "F.cosine_embedding_loss(x, x * 2, torch.ones(x.shape[0], device=x.device))",
            "F.margin_ranking_loss(x, x * 2, torch.ones_like(x), margin=0.5)",
            "F.triplet_margin_loss(x, x * 2, x * 3)",
            "F.triplet_margin_with_distance_loss(x, x * 2, x * 3, swap=True)",
            "F.pairwise_distance(x, x * 2).mean()",
            "F.cosine_similarity(x, x * 2, dim=-1).mean()",
        ]),
    ]  # fmt: skip


def _of_sequences(shape: Shape) -> list[str]:
    n, t, c = shape
    return [
        "x = x.float().log_softmax(-1).transpose(0, 1)",
        f"loss = F.ctc_loss(x, torch.randint(1, {c}, ({n}, {max(1, t // 4)}), device=x.device), "
        f"torch.full(({n},), {t}), torch.full(({n},), {max(1, t // 4)}))",
    ]
