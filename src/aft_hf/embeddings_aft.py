"""Embeddings of tokens and of image patches, with learned position embeddings."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from .caching_aft import AFTLayerState
from .configuration_aft import AFTConfig, pair
from .documents_aft import Documents
from .sequence_shards_aft import SequenceShard


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class AFTTextEmbeddings(nn.Module):
    """Token embeddings, with learned position embeddings if `config.use_position_embeddings` is set."""

    def __init__(self, config: AFTConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings, self.max_positions = None, config.max_position_embeddings
        if config.use_position_embeddings:
            self.position_embeddings = nn.Embedding(self.max_positions, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        state: AFTLayerState | None = None,
        documents: Documents | None = None,
        shard: SequenceShard | None = None,
    ) -> torch.Tensor:
        if self.position_embeddings is not None:
            positions = self._positions(inputs_embeds, self.max_positions, padding_mask, state, documents, shard)
            inputs_embeds = inputs_embeds + self.position_embeddings(positions)
        return self.dropout(inputs_embeds)

    def _positions(
        self,
        inputs_embeds: torch.Tensor,
        limit: int,
        padding_mask: torch.Tensor | None,
        state: AFTLayerState | None,
        documents: Documents | None,
        shard: SequenceShard | None,
    ) -> torch.Tensor:
        """Return the position of each token, (B or 1, T), within a table of `limit` positions.

        Padding is not counted, so it does not change the positions of the real tokens.

        Raises:
            ValueError: a sequence or a document is longer than the table.
        """
        length = inputs_embeds.shape[1]
        if shard is not None:
            if shard.longest > limit:
                raise ValueError(
                    f"a sequence of {shard.longest} tokens is longer than max_position_embeddings={limit}"
                )
            return shard.positions().clamp_max(limit - 1)
        if documents is not None:
            longest_document = documents.longest()
            if longest_document is not None and longest_document > limit:
                raise ValueError(
                    f"a document of {longest_document} tokens is longer than max_position_embeddings={limit}"
                )
            return documents.positions(padding_mask)
        start: torch.Tensor | int = 0
        longest = length
        if state is not None and state.is_initialized:
            start, longest = state.seen[:, None], state.tokens_after(length, limit)
        if longest > limit:
            raise ValueError(f"a sequence of {longest} tokens is longer than max_position_embeddings={limit}")
        if padding_mask is None:
            return start + torch.arange(length, device=inputs_embeds.device).unsqueeze(0)
        return (start + padding_mask.long().cumsum(-1) - 1).clamp_min(0)


class AFTImageEmbeddings(nn.Module):
    """Patch embeddings, with a class token and learned position embeddings if the config has them."""

    def __init__(self, config: AFTConfig):
        super().__init__()
        self.patch_size, self.grid_stride = pair(config.patch_size), config.grid_stride
        self.num_channels, self.image_size = config.num_channels, pair(config.image_size)
        self.patch_embeddings = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=self.patch_size, stride=self.grid_stride
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if config.use_cls_token else None
        self.position_embeddings = None
        if config.use_position_embeddings:
            self.position_embeddings = nn.Parameter(torch.zeros(1, config.max_positions, config.hidden_size))
        # Learned tables cover one grid size. Only AFT-conv without position embeddings accepts other sizes.
        self.fixed_size = set(config.layer_aft_types) != {"conv"} or config.use_position_embeddings
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, pixel_values: torch.Tensor, shard: SequenceShard | None = None
    ) -> tuple[torch.Tensor, tuple[int, int]]:
        self._check_size(pixel_values, shard)
        if self.patch_size != self.grid_stride:
            pixel_values = nn.functional.pad(pixel_values, self._margins(), mode="replicate")
        patches = self.patch_embeddings(pixel_values.to(self.patch_embeddings.weight.dtype))  # (B, d, rows, columns)
        grid_size = (patches.shape[2], patches.shape[3])
        # A residual stream that is not contiguous would slow down every layer.
        embeddings = patches.flatten(2).transpose(1, 2).contiguous()
        if self.cls_token is not None:
            embeddings = torch.cat([self.cls_token.expand(embeddings.shape[0], -1, -1), embeddings], 1)
        if self.position_embeddings is not None:
            positions: torch.Tensor = self.position_embeddings
            if shard is not None:
                positions = positions.narrow(1, shard.first_row * shard.columns, shard.length)
            embeddings = embeddings + positions
        return self.dropout(embeddings), grid_size

    def _margins(self) -> list[int]:
        """Pixels by which overlapping patches extend beyond the image: left, right, top and bottom, as `pad` does."""
        beyond = [size - stride for size, stride in zip(self.patch_size, self.grid_stride)]
        return [margin for pixels in reversed(beyond) for margin in (pixels // 2, pixels - pixels // 2)]

    def shard(self, group: "ProcessGroup", pixel_values: torch.Tensor) -> SequenceShard:
        """Return the `SequenceShard` for `pixel_values`, this process's rows of images that a group shares.

        Raises:
            ValueError: the patches overlap, so that they extend to the pixels of other processes.
        """
        self._check_patches(pixel_values)
        if self.patch_size != self.grid_stride:
            raise ValueError(
                "within context_parallel, patches must not overlap, got patches of "
                f"{self.patch_size[0]} x {self.patch_size[1]} pixels with patch_stride={self.grid_stride}"
            )
        rows, columns = (side // stride for side, stride in zip(pixel_values.shape[2:], self.grid_stride))
        return SequenceShard(group, len(pixel_values), rows * columns, pixel_values.device, columns=columns)

    def _check_patches(self, pixel_values: torch.Tensor) -> None:
        if pixel_values.dim() != 4 or pixel_values.shape[1] != self.num_channels:
            raise ValueError(
                f"pixel_values must be (batch, {self.num_channels}, height, width), got {tuple(pixel_values.shape)}"
            )
        size = tuple(pixel_values.shape[2:])
        if size[0] % self.grid_stride[0] or size[1] % self.grid_stride[1] or 0 in size:
            unit = "patch_stride" if self.patch_size != self.grid_stride else "the patch size"
            raise ValueError(
                f"images of {size[0]} x {size[1]} pixels cannot be divided into a grid of {self.grid_stride[0]} x "
                f"{self.grid_stride[1]} pixels: height and width must be multiples of {unit}"
            )

    def _check_size(self, pixel_values: torch.Tensor, shard: SequenceShard | None) -> None:
        self._check_patches(pixel_values)
        height, width = pixel_values.shape[2:]
        if shard is not None:
            height = shard.total_length // shard.columns * self.grid_stride[0]
        if self.fixed_size and (height, width) != self.image_size:
            raise ValueError(
                f"images of {height} x {width} pixels do not match image_size={self.image_size[0]} x "
                f'{self.image_size[1]}: only models with aft_type="conv" in all layers and without position '
                "embeddings accept images of other sizes"
            )
