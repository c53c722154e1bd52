"""The shortest remedy for the operator at which NaN or inf first appeared."""

from __future__ import annotations

from pytest_vram.numerics.diagnosis import Birth

_LOG = (
    "clamp what enters the logarithm by more than the dtype's resolution (x.clamp_min(1e-6)), or "
    "use log_softmax, logsigmoid or a loss on logits, which never form log(0)"
)
_ROOT = (
    "put an epsilon inside the root, (x.pow(2).sum(-1) + 1e-12).sqrt(): at 0 its derivative is "
    "infinite; torch.where around it does not help, 0 * inf is NaN in backward"
)
_NEGATIVE = (
    "the root of a negative number is NaN: clamp what enters it (x.clamp_min(1e-12)), also where "
    "torch.where does not take the result"
)
_MASKED_CLASS = (
    "a loss that averages over all classes (label smoothing, a divergence) meets the masked ones: "
    "mask with a finite value (-1e4), or leave these classes out of the loss"
)
_SINGULAR = (
    "the matrix is singular, or nearly so: add a small multiple of the identity, a + 1e-6 * eye"
)
_DEGENERATE = (
    "the derivative of eigenvectors and singular vectors divides by differences of their values, "
    "and equal ones give NaN: use the values alone (eigvalsh, svdvals), or set them apart"
)
_EDGE = "clamp inside the interval, x.clamp(-1 + 1e-6, 1 - 1e-6): at its ends the slope is infinite"
_SOFTMAX = "mask with a finite value inside the dtype's range and zero the empty rows"
_ONE_ELEMENT = (
    "the unbiased variance of one element divides by 0: correction=0, or skip batches of one"
)
_REDUCE = "reduce in float32: x.float() before it, or dtype=torch.float32"
_PRODUCT_HALF = "compute this part in bfloat16 or float32, or scale its inputs down"
_PRODUCT = (
    "values explode: lower the learning rate, clip gradients, look at initialisation and residual "
    "scaling"
)
_CAST = (
    "the value does not fit into the dtype it is cast to: keep this part in float32, or use "
    "bfloat16"
)

#: By operator, without overload and trailing underscore: what to do about NaN or inf that it made.
_REMEDIES: dict[str, str] = {
    **dict.fromkeys(("log", "log2", "log10", "log1p", "logit", "xlogy"), _LOG),
    **dict.fromkeys(("sqrt", "rsqrt", "norm", "linalg_vector_norm", "_cdist_forward"), _ROOT),
    **dict.fromkeys(("masked_fill", "where", "full", "full_like", "index_put"), _MASKED_CLASS),
    **dict.fromkeys(("acos", "asin", "atanh", "acosh"), _EDGE),
    **dict.fromkeys(
        ("linalg_inv_ex", "_linalg_solve_ex", "linalg_cholesky_ex", "linalg_lu_factor_ex"),
        _SINGULAR,
    ),
    **dict.fromkeys(("_linalg_eigh", "_linalg_svd", "linalg_eig"), _DEGENERATE),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), _SOFTMAX),
    **dict.fromkeys(("std", "var", "var_mean", "std_mean"), _ONE_ELEMENT),
    **dict.fromkeys(("sum", "mean", "cumsum", "prod", "dot"), _REDUCE),
    **dict.fromkeys(
        ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_attention_math"),
        _PRODUCT,
    ),
    "div": "guard the divisor: x / y.clamp_min(1e-6); a mean over an empty mask divides by 0",
    "reciprocal": "guard the divisor: (1 / y.clamp_min(1e-6))",
    "exp": "subtract the maximum first (logsumexp, softmax), or clamp the exponent",
    "pow": "a fractional power of a negative number is NaN, and at 0 its derivative is infinite: "
    "clamp the base to a small positive number",
    "_to_copy": _CAST,
    "nll_loss_forward": "every target of this batch is ignore_index, so the mean divides by 0: "
    "skip such a batch, or use reduction='sum' and divide by the count, at least 1",
}
_REMEDIES["_ctc_loss"] = (
    "a target is longer than its input (each repeated label needs one more frame), which has no "
    "alignment: filter such samples, or pass zero_infinity=True"
)
_REMEDIES["nll_loss2d_forward"] = _REMEDIES["nll_loss_forward"]

_DIFFERENCE = "inf - inf is NaN: keep both finite (masks of -1e4 or finfo.min, added once)"
#: Of finite tensors they make NaN only with an infinite number.
_ARITHMETIC = {
    "mul": "0 * inf is NaN: set masked elements with masked_fill or torch.where, not by "
    "multiplying a mask with an infinite number",
    "add": _DIFFERENCE,
    "sub": _DIFFERENCE,
    "rsub": _DIFFERENCE,
}

#: Where backward fails and the forward did not.
BACKWARD = (
    "a derivative is infinite where its function is finite: sqrt, norm or log near 0, log1p(-1), a "
    "clamp below the dtype's resolution; compute that part in fp32"
)


def remedy(birth: Birth | None) -> str:
    """One hint; empty where the operator says nothing about it."""
    if birth is None:
        return ""
    if birth.data:
        return (
            "clean the batch (torch.nan_to_num, a filter in the dataset); the model is not at fault"
        )
    chain = [birth.origin, birth] if birth.origin is not None else [birth]
    return next(filter(None, map(_of_one, chain)), "")


def _of_one(birth: Birth) -> str:
    name = birth.operator.partition(" in ")[0].rstrip("_")
    if name in ("sum", "mean") and birth.what == "NaN":
        return "a mean over no element is NaN: skip the step for an empty selection"
    found = _REMEDIES.get(name, BACKWARD if birth.backward else "")
    if name in _ARITHMETIC and not birth.backward:
        found = _ARITHMETIC[name] if birth.what == "NaN" else _PRODUCT
    if name == "pow" and birth.what != "NaN" and not birth.backward:
        found = _PRODUCT
    if found is _ROOT and birth.what == "NaN" and not birth.backward:
        found = _NEGATIVE
    if found is _PRODUCT and birth.dtype == "float16":
        return _PRODUCT_HALF
    return found
