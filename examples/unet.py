"""A U-Net of diffusers that predicts the noise in images. It knows nothing of fxpar."""

from dataclasses import dataclass

from diffusers import UNet2DModel
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the model; the defaults make a million parameters."""

    image: int = 32
    """Height and width in pixels, of one channel; a multiple of 2 ** (levels - 1)."""
    channels: tuple[int, ...] = (32, 64, 64)
    """Channels of each level, which halves the height and width of the one before. All but the first have attention."""
    layers: int = 1
    """Residual blocks per level."""
    head: int = 8
    """Channels of an attention head."""
    groups: int = 8
    """Groups of each group norm; divides all `channels`."""


class NoisePredictor(nn.Module):
    """A `UNet2DModel` whose forward returns the mean squared error of the predicted noise."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        deeper = len(config.channels) - 1
        self.unet = UNet2DModel(
            sample_size=config.image,
            in_channels=1,
            out_channels=1,
            block_out_channels=config.channels,
            down_block_types=("DownBlock2D", *["AttnDownBlock2D"] * deeper),
            up_block_types=(*["AttnUpBlock2D"] * deeper, "UpBlock2D"),
            layers_per_block=config.layers,
            attention_head_dim=config.head,
            norm_num_groups=config.groups,
        )

    def forward(self, noisy: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        """noisy, noise: (batch, 1, image, image); times: (batch,) of int64 -> the loss, a scalar."""
        return F.mse_loss(self.unet(noisy, times).sample, noise)
