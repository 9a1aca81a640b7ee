"""Functions: linear algebra, indices, running and elementwise ones, complex numbers, losses."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .base import WIDTH, Build, after, indices, layer, spd, whole

__all__ = ["FUNCTIONS"]


def reduced(x: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
    """Every way of reducing into places."""
    ways = ("sum", "prod", "mean", "amax", "amin")
    return [x[:3].scatter_reduce(0, index.expand(5, WIDTH), x, way, include_self=way != "mean") for way in ways]


FUNCTIONS: dict[str, Build] = {
    "inv": after(lambda x: torch.linalg.inv(spd(x)), 3, 4, 4),
    "inverse-of-one": after(lambda x: torch.inverse(spd(x)), 4, 4),
    "cholesky": after(lambda x: torch.linalg.cholesky(spd(x)), 3, 4, 4),
    "solve": after(lambda x, b: torch.linalg.solve(spd(x), b), 3, 4, 4, rest=lambda: (torch.randn(3, 4, 2),)),
    "solve-triangular": after(
        lambda x, b: torch.linalg.solve_triangular(spd(x).tril(), b, upper=False),
        3,
        4,
        4,
        rest=lambda: (torch.randn(3, 4, 2),),
    ),
    "cholesky-solve": after(
        lambda x, b: torch.cholesky_solve(b, torch.linalg.cholesky(spd(x))),
        3,
        4,
        4,
        rest=lambda: (torch.randn(3, 4, 2),),
    ),
    "qr": after(lambda x: torch.linalg.qr(spd(x)), 3, 4, 4),
    "svd": after(lambda x: torch.linalg.svdvals(spd(x)), 3, 4, 4),
    "svd-whole": after(lambda x: torch.linalg.svd(spd(x), full_matrices=False)[1], 3, 4, 4),
    "eigh": after(lambda x: torch.linalg.eigh(spd(x))[0], 3, 4, 4),
    "det": after(lambda x: (torch.linalg.det(spd(x)), torch.linalg.slogdet(spd(x))[1]), 3, 4, 4),
    "pinv": after(lambda x: torch.linalg.pinv(spd(x)), 3, 4, 4),
    "matrix-exp": after(lambda x: torch.linalg.matrix_exp(x * 0.1), 3, 4, 4),
    "matrix-power": after(
        lambda x: (torch.linalg.matrix_power(x, 3), torch.linalg.multi_dot([x[0], x[1], x[2]])), 3, 4, 4
    ),
    "norms": after(
        lambda x: (torch.linalg.matrix_norm(x), torch.linalg.matrix_norm(x, "nuc"), torch.linalg.matrix_norm(x, 2)),
        3,
        4,
        4,
    ),
    "kron-cross": after(lambda x, y: (torch.kron(x, y), torch.linalg.cross(x[:, :3], x[:, 3:])), rest=whole(3)),
    "index-copy": after(
        lambda x, i: x.index_copy(0, i, x[:3] * 2) + x.index_copy(1, i, x[:, 1:4]), rest=indices(4, 0, 2)
    ),
    "index-fill": after(lambda x, i: x.index_fill(0, i, 2.5) + x.index_fill(1, i, 0.5), rest=indices(3, 1)),
    "masked-scatter": after(lambda x: x.masked_scatter(x > 0, x.cos())),
    "scatter-reduce": after(reduced, rest=lambda: (torch.randint(0, 3, (5, 1)),)),
    "index-reduce": after(
        lambda x, i: [x[:4].index_reduce(0, i, x, way) for way in ("mean", "amax", "amin", "prod")],
        rest=indices(3, 1, 1, 0, 2),
    ),
    "take-put": after(
        lambda x, i: (x.take(i), x.put(i, i.to(x.dtype)), torch.take_along_dim(x, x.argsort(1), 1)),
        rest=indices(3, 17, 9),
    ),
    "gather-repeat": after(
        lambda x, i: (x.repeat_interleave(2, 1), x.index_select(1, i), x.repeat(2, 3)), rest=indices(3, 0)
    ),
    "unfolded": after(
        lambda x: (x.unfold(1, 3, 2), x.as_strided((3, 2), (7, 2), 1), x.diagonal(1), x.movedim(0, 1).tile(2))
    ),
    "searched": after(
        lambda x, edges: (
            torch.searchsorted(edges, x.detach()).to(x.dtype) * x,
            torch.bucketize(x.detach(), edges) + x,
        ),
        rest=lambda: (torch.linspace(-1, 1, 7),),
    ),
    "sorted": after(
        lambda x: (x.sort(0, descending=True)[0], x.topk(2, 1)[0], x.kthvalue(2, 0)[0], x.median(1)[0], x.mode(1)[0])
    ),
    "extremes": after(
        lambda x: (x.max(1)[0], x.amin(0), x.cummax(0)[0], torch.aminmax(x, dim=1)[1], x.max(), x.flatten().median())
    ),
    "unique-free": after(
        lambda x: (x.argmax(1).to(x.dtype), F.one_hot(x.argmin(1), 6).to(x.dtype) * x, x.quantile(0.3, 1))
    ),
    "histogram": after(lambda x: (torch.histc(x.detach(), 4, -2, 2) * x[0, 0], x)),
    "running": after(
        lambda x: (x.cumprod(0), x.logcumsumexp(1), x.cumsum(1), x.diff(dim=0), torch.trapezoid(x, dim=1))
    ),
    "special": after(
        lambda x: (
            torch.erfinv(x.tanh()),
            torch.lgamma(x.abs() + 1),
            torch.digamma(x.abs() + 1),
            torch.special.i0(x),
            torch.special.ndtri(x.sigmoid()),
            torch.xlogy(x, x.abs() + 1),
            torch.hypot(x, x),
            torch.atan2(x, x + 3),
            torch.sinc(x),
            torch.logaddexp(x, -x),
            torch.special.entr(x.abs()),
            x.nan_to_num(),
            x.frac(),
            torch.polygamma(1, x.abs() + 1),
        )
    ),
    "activations": after(
        lambda x: [
            f(x)
            for f in (
                F.gelu,
                F.elu,
                F.selu,
                F.celu,
                F.mish,
                F.hardswish,
                F.softshrink,
                F.hardshrink,
                F.tanhshrink,
                F.logsigmoid,
                F.softsign,
                F.relu6,
                F.softplus,
                F.softmin,
                F.silu,
                F.glu,
            )
        ]
    ),
    "drawn-activations": layer(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.RReLU(), nn.PReLU(6), nn.AlphaDropout(0.2)), (5, 6)
    ),
    "dropped-channels": layer(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.Dropout2d(0.3), nn.FeatureAlphaDropout(0.2)), (3, 2, 3, 3)
    ),
    "gumbel": after(lambda x: (F.gumbel_softmax(x, hard=True), F.gumbel_softmax(x, 0.5))),
    "distributions": after(
        lambda x: (
            torch.distributions.Normal(x, x.exp(), validate_args=False).rsample(),
            torch.distributions.Categorical(logits=x, validate_args=False).entropy(),
            torch.distributions.Beta(x.exp(), x.exp(), validate_args=False).log_prob(x.sigmoid()),
        )
    ),
    "fft": after(
        lambda x: (
            torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=4, dim=1),
            torch.fft.fft2(x).abs(),
            torch.fft.fftshift(x, 1),
            torch.view_as_real(torch.fft.ifft(torch.complex(x, x), dim=0)),
            torch.fft.rfftn(x).imag,
            torch.fft.hfft(x + 0j),
        ),
        3,
        4,
        WIDTH,
    ),
    "stft": after(
        lambda x: torch.stft(x, 4, 2, window=torch.hann_window(4, dtype=x.dtype), return_complex=True).abs(), 3, 12
    ),
    "complex-layers": after(
        lambda x: torch.view_as_real(
            torch.einsum(
                "bi,bj->ij", torch.polar(x.abs(), x), x.to(torch.cfloat if x.dtype == torch.float32 else torch.cdouble)
            )
        )
    ),
    "ctc": after(
        lambda x, y: F.ctc_loss(
            x.log_softmax(-1), y, torch.tensor([7, 6, 7]), torch.tensor([3, 2, 1]), zero_infinity=True
        ),
        7,
        3,
        WIDTH,
        rest=lambda: (torch.randint(1, 6, (3, 3)),),
    ),
    "losses": after(
        lambda x, y: (
            F.cross_entropy(x, y, label_smoothing=0.1, weight=torch.ones(6, dtype=x.dtype)),
            F.multi_margin_loss(x, y),
            F.kl_div(x.log_softmax(1), x.cos().softmax(1), reduction="batchmean"),
            F.smooth_l1_loss(x, x.cos()),
            F.multilabel_soft_margin_loss(x, (x > 0).to(x.dtype)),
            F.poisson_nll_loss(x, x.abs()),
            F.huber_loss(x, x.sin()),
            F.cosine_embedding_loss(x, x.cos(), y.sign() * 2 - 1),
        ),
        rest=lambda: (torch.randint(0, 6, (5,)),),
    ),
    "losses-of-pairs": after(
        lambda x: (
            F.triplet_margin_loss(x, x.cos(), x.sin()),
            F.margin_ranking_loss(x[0], x[1], x[2].sign()),
            F.hinge_embedding_loss(x, x.sign()),
            F.pairwise_distance(x, x.cos()),
            F.cosine_similarity(x, x.cos()),
            torch.cdist(x, x.cos()),
            F.pdist(x),
            F.multilabel_margin_loss(x, x.argsort(1)),
            F.soft_margin_loss(x, x.detach().sign()),
        )
    ),
    "bilinear": lambda: (nn.Bilinear(4, 5, 6), (torch.randn(3, 4), torch.randn(3, 5)), {}),
}
