"""What mixes the samples of a batch is found, and named once; what treats each by itself is not."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxpar.errors import SumLossWarning
from fxpar.ir import node_meta
from fxpar.ir.stage import Port, PortKind
from fxpar.passes.decompose.batch_mixing import warn_of_batch_mixing
from fxpar.passes.decompose.follow_samples import follow_samples
from fxpar.passes.total_over_batch import total_over_batch
from fxpar.world.mesh import Mesh
from tests.support.captures import captured
from tests.support.halves import decomposed_stages
from tests.support.small_models import GPT, hf_gpt2, hf_llama

SAMPLES, WIDTH, CLASSES = 4, 6, 5


class Encoder(nn.Module):
    """Two towers, a norm that may be over the batch, and a loss of what they give for a batch."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.loss = norm or nn.Identity(), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.norm(torch.relu(self.first(x))), self.second(y))


def mixing(
    model: nn.Module, batch: Mapping[str, Tensor] | Sequence[Tensor], boundaries: Sequence[str] = ()
) -> fx.Node | None:
    capture = total_over_batch(*captured(model, batch, mesh=Mesh(data=2)))
    joints = decomposed_stages(capture, boundaries)
    assert capture.microbatch_size is not None
    wanted = [Port(PortKind.RESULT, str(capture.loss))]
    return follow_samples(joints, capture.batch_dims, capture.microbatch_size, wanted).mixing


def pairs() -> list[Tensor]:
    return [torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)]


def contrastive(a: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(a @ b.t(), torch.arange(len(a)))


def balanced(a: Tensor, b: Tensor) -> Tensor:
    """As the auxiliary loss of a mixture of experts: each one's share of samples, times its mean probability."""
    share = F.one_hot(a.topk(2).indices, WIDTH).float().mean((0, 1))
    return (a - b).square().mean() + (share * a.softmax(-1).mean(0)).sum()


MIXING: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "contrastive": (contrastive, "mm"),
    "softmax over the batch": (lambda a, b: (a.softmax(0) * b).mean(), "_softmax"),
    "cumulative sum over the batch": (lambda a, b: (a.cumsum(0) * b).mean(), "cumsum"),
    "centred by hand": (lambda a, b: ((a - a.mean(0)) * b).mean(), "sub"),
    "covariance": (lambda a, b: (a.t() @ b).square().sum(), "pow"),
    "distances of pairs": (lambda a, b: (a[:, None] - b[None, :]).abs().mean(), "sub"),
    "neighbours in the batch": (lambda a, b: (a[1:] * b[:-1]).mean(), "slice"),
    "variance over the batch": (lambda a, b: a.var(0).sum() + b.mean(), "var"),
    "largest of the batch": (lambda a, b: a.amax() + b.mean(), "amax"),
    "root of a mean": (lambda a, b: (a - b).square().mean().sqrt(), "sqrt"),
    "load balance": (balanced, "mul"),
    "the same samples of every batch": (lambda a, b: (a[torch.tensor([1, 0, 1])] * b[:3]).mean(), "index"),
    "the first two": (lambda a, b: a.index_select(0, torch.arange(2)).mean() + b.mean(), "index_select"),
    "median": (lambda a, b: a.median() + b.mean(), "median"),
    "transform over the batch": (lambda a, b: torch.fft.fft2(a).abs().mean() + b.mean(), "_fft_c2c"),
    "diagonal": (lambda a, b: a.diagonal().mean() + b.mean(), "diagonal"),
    "memory": (lambda a, b: a.as_strided((2, WIDTH), (2 * WIDTH, 1)).mean() + b.mean(), "as_strided"),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_samples_is_found(name: str) -> None:
    loss, op = MIXING[name]
    found = mixing(Encoder(loss), pairs())
    assert found is not None and found.target.overloadpacket.__name__ == op, found
    assert "test_batch_mixing.py" in node_meta.source_line(found)


class Paired(nn.Module):
    """The loss of samples with others of the batch, whose places are given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        y = self.linear(x)
        return (y - y[order.long()]).square().mean()


def test_places_in_the_batch_that_are_given_with_it_mix_samples() -> None:
    found = mixing(Paired(), [torch.randn(SAMPLES, WIDTH), torch.randperm(SAMPLES).int()])
    assert found is not None and found.target is torch.ops.aten.index.Tensor


def of_last(a: Tensor, b: Tensor) -> Tensor:
    """Of each sample one value, at a place of its own."""
    return (a[torch.arange(len(a)), b.detach().argmax(-1)] - b[:, 0]).square().mean()


def with_token(a: Tensor, b: Tensor) -> Tensor:
    joined = torch.cat([a.new_ones(1, 1, WIDTH).expand(len(a), -1, -1), a[:, None], b[:, None]], 1)
    return F.scaled_dot_product_attention(joined, joined, joined).flatten(0, 1).view(len(a), -1).sum()


SEPARATE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda a, b: (a - b).square().mean(),
    "sums, scaled and added": lambda a, b: 0.5 * a.sum().double().float() + (b.sum(0) / len(b)).mean() - 1.0,
    "one value of each": of_last,
    "attention inside samples": with_token,
    "the same places of each sample": lambda a, b: (a[:, torch.tensor([1, 0])] * b[:, [2, 3]]).mean(),
    "diagonals of samples": lambda a, b: (a[:, :, None] * b[:, None]).diagonal(dim1=1, dim2=2).mean(),
    "both in one batch": lambda a, b: torch.cat([a, b]).softmax(-1).chunk(2)[0].mean(),
    "detached from the loss": lambda a, b: ((a - b) + 0.0 * len((a @ b.t()).detach())).mean(),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_what_treats_each_sample_by_itself_is_left_alone(name: str) -> None:
    assert mixing(Encoder(SEPARATE[name]), pairs()) is None


def test_a_batch_norm_mixes_in_training_and_not_in_evaluation() -> None:
    model = Encoder(lambda a, b: (a - b).square().mean(), nn.BatchNorm1d(WIDTH))
    found = mixing(model, pairs(), ["second"])
    assert found is not None and node_meta.module_path(found) == "norm"
    assert mixing(Encoder(lambda a, b: (a - b).square().mean(), nn.BatchNorm1d(WIDTH).eval()), pairs()) is None


@pytest.mark.parametrize(("microbatches", "sizes", "warns"), [(1, {"data": 2}, False), (2, {"data": 2}, True)], ids=str)
def test_a_synchronized_batch_norm_mixes_microbatches_alone(
    microbatches: int, sizes: dict[str, int], warns: bool
) -> None:
    norm = nn.SyncBatchNorm(WIDTH)
    found = warned(lambda a, b: (a - b).square().mean(), microbatches, norm, **sizes)
    assert bool(found) == warns, found


def test_samples_are_followed_from_stage_to_stage() -> None:
    found = mixing(Encoder(contrastive), pairs(), ["second"])
    assert found is not None and found.target is torch.ops.aten.mm.default


@pytest.mark.parametrize("build", [GPT, lambda: hf_gpt2(layers=1), lambda: hf_llama(layers=1)])
def test_language_models_treat_each_sample_by_itself(build: Callable[[], nn.Module]) -> None:
    ids = torch.randint(0, 60, (SAMPLES, 8))
    model = build()
    names = ("tokens", "targets") if isinstance(model, GPT) else ("input_ids", "labels")
    assert mixing(model, dict.fromkeys(names, ids)) is None


def test_a_unet_treats_each_sample_by_itself() -> None:
    from tests.support.parity import image_batch, small_unet

    assert mixing(small_unet(1), image_batch(SAMPLES)) is None


def warned(
    loss: Callable[[Tensor, Tensor], Tensor], microbatches: int, norm: nn.Module | None = None, **sizes: int
) -> list[str]:
    capture, distribution = captured(Encoder(loss, norm), pairs(), microbatches=microbatches, mesh=Mesh(**sizes))
    joints = decomposed_stages(capture)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            warn_of_batch_mixing(joints, capture, distribution)
    return [str(warning.message) for warning in caught]


def test_a_divided_batch_is_warned_of_once_with_the_line() -> None:
    for microbatches, sizes in ((2, {}), (1, {"data": 2}), (1, {"z": 2})):
        (text,) = warned(contrastive, microbatches, **sizes)
        assert text.startswith("aten.mm.default in the root module (File ") and "in contrastive" in text, text
        assert f"sees {SAMPLES // microbatches} at a time" in text
    assert warned(contrastive, 1) == [] == warned(SEPARATE["mean"], 2)


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda a, b: F.mse_loss(a, b, reduction="sum"),
    "scaled": lambda a, b: 0.5 * (a - b).square().sum(),
    "mean and sum": lambda a, b: a.square().mean() + 0.1 * b.square().sum(),
    "smooth": functools.partial(F.smooth_l1_loss, reduction="sum"),
    "Huber's": functools.partial(F.huber_loss, reduction="sum"),
    "of margins": lambda a, b: F.soft_margin_loss(a, b.detach().sign(), reduction="sum"),
    "cross entropies": lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid(), reduction="sum"),
    "of probabilities": lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), reduction="sum"),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("microbatches", [2, SAMPLES])
def test_a_loss_that_is_a_sum_is_warned_of(name: str, microbatches: int) -> None:
    (text,) = warned(SUMS[name], microbatches)
    assert text.startswith("the loss is a sum over samples, or has a term that is one")
    assert f"1/{microbatches} of those" in text
    assert warned(SUMS[name], 1) == []


@pytest.mark.parametrize("divided", [lambda loss: loss / 7, lambda loss: loss / torch.full((), 8.0)])
def test_a_sum_that_is_divided_by_another_number_is_still_one(divided: Callable[[Tensor], Tensor]) -> None:
    (text,) = warned(lambda a, b: divided((a - b).square().sum()), 2)
    assert text.startswith("the loss is a sum over samples")


class Summed(nn.Module):
    """A model whose loss is the sum over all items, divided by the number of items that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor, num_items: float | Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), labels, reduction="sum") / num_items


@pytest.mark.parametrize("num_items", [SAMPLES, float(SAMPLES), torch.tensor(SAMPLES)])
def test_a_number_of_items_of_the_caller_makes_no_mean_of_a_microbatch(num_items: float | Tensor) -> None:
    batch = torch.randn(SAMPLES, WIDTH), torch.randint(CLASSES, (SAMPLES,)), num_items
    capture, distribution = captured(Summed(), batch, microbatches=2)
    joints = decomposed_stages(capture)
    with pytest.warns(SumLossWarning):
        warn_of_batch_mixing(joints, capture, distribution)


def test_a_sum_that_is_divided_is_a_mean() -> None:
    assert warned(lambda a, b: (a - b).square().sum() / len(a) + b.mean(), 2) == []
