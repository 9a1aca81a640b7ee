"""Shapes of the transformers that published recipes train, read strictly from `transformers.toml`."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass
from importlib import resources

from ..plans.errors import RequestError

__all__ = ["Transformer", "find_transformer", "load_transformers", "read_shape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """One decoder: widths and counts as in its configuration file.

    Fields that are 0 do not apply: `experts` of `expert_ffn` on `expert_hidden`, latent attention (`q_rank`, `kv_rank`,
    ...), mamba blocks, a sliding `window` in every `window_every`th layer, multi-token prediction (`mtp_layers`).
    """

    match: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    source: str
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = True
    tied: bool = False
    positions: bool = False
    attention_layers: int = -1
    dense_layers: int = -1
    moe_layers: int = 0
    mamba_layers: int = 0
    experts: int = 0
    experts_active: int = 0
    expert_ffn: int = 0
    expert_hidden: int = 0
    expert_bias: bool = False
    shared_ffn: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    mamba_state: int = 0
    mamba_groups: int = 0
    window: int = 0
    window_every: int = 0
    mtp_layers: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        object.__setattr__(self, "expert_hidden", self.expert_hidden or self.hidden)
        if self.attention_layers < 0:
            object.__setattr__(self, "attention_layers", self.layers)
        if self.dense_layers < 0:
            object.__setattr__(self, "dense_layers", self.layers)

    @property
    def is_moe(self) -> bool:
        """Whether some blocks have experts."""
        return self.moe_layers > 0

    @property
    def ffn_products(self) -> int:
        """Inner products of a feed-forward before the last one: 2 when gated."""
        return 2 if self.gated else 1

    def attention_parameters(self) -> int:
        """Weights of one attention block."""
        if self.kv_rank:
            queries = self.q_rank * (self.hidden + self.heads * (self.nope_dim + self.rope_dim))
            keys = self.hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * self.heads * (
                self.nope_dim + self.value_dim
            )
            return queries + keys + self.heads * self.value_dim * self.hidden
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def mamba_parameters(self) -> int:
        """Weights of one mamba block."""
        inner = self.mamba_heads * self.mamba_head_dim
        return self.hidden * (3 * inner + 2 * self.mamba_groups * self.mamba_state + self.mamba_heads)

    def ffn_parameters(self, width: int, hidden: int = 0) -> int:
        """Weights of one feed-forward of inner `width`."""
        return (self.ffn_products + 1) * (hidden or self.hidden) * width

    def expert_parameters(self) -> int:
        """Weights of all experts of one block."""
        return self.experts * self.ffn_parameters(self.expert_ffn, self.expert_hidden)

    def shared_parameters(self) -> int:
        """Weights of one expert block outside its experts."""
        latent = 2 * self.hidden * self.expert_hidden if self.expert_hidden != self.hidden else 0
        return self.hidden * self.experts + self.ffn_parameters(self.shared_ffn) + latent

    def block_parameters(self) -> int:
        """Weights of all blocks but the experts."""
        return (
            self.attention_layers * self.attention_parameters()
            + self.mamba_layers * self.mamba_parameters()
            + self.dense_layers * self.ffn_parameters(self.ffn)
            + self.moe_layers * self.shared_parameters()
        )

    def embedding_parameters(self) -> int:
        """Weights of the embedding and, where untied, of the output."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    def parameters(self) -> int:
        """All weights; norms, biases and positions are left out."""
        return self.block_parameters() + self.moe_layers * self.expert_parameters() + self.embedding_parameters()

    def flops_per_token(self, seq_len: int) -> float:
        """FLOP of a training step per token by the usual count: 6 per active weight, 12 per score, half masked."""
        active = self.block_parameters() + self.vocab * self.hidden
        if self.is_moe:
            active += self.moe_layers * self.experts_active * self.ffn_parameters(self.expert_ffn, self.expert_hidden)
        return 6.0 * active + 6.0 * self.attention_layers * seq_len * self.heads * self.head_dim


def load_transformers(text: str | None = None) -> tuple[Transformer, ...]:
    """The shapes in `text`, or the shipped ones; RequestError names the unknown or missing key."""
    if text is None:
        folder = resources.files(__package__ or "meshwright.cost_models")
        text = (folder / "transformers.toml").read_text(encoding="utf-8")
    known = {field.name: field for field in dataclasses.fields(Transformer)}
    needed = {name for name, field in known.items() if field.default is dataclasses.MISSING}
    shapes: list[Transformer] = []
    for entry in tomllib.loads(text)["model"]:
        if not needed <= set(entry) <= set(known):
            wrong = sorted((set(entry) - set(known)) | (needed - set(entry)))
            raise RequestError(f"'model' must have the keys of Transformer, got {wrong} unknown or missing; correct it")
        shapes.append(Transformer(**entry))
    return tuple(shapes)


def find_transformer(shapes: tuple[Transformer, ...], name: str) -> Transformer | None:
    """The shape of the model called `name`, or None."""
    plain = re.sub(r"\(.*?\)", "", name).strip()
    return next((shape for shape in shapes if re.fullmatch(shape.match, plain, re.IGNORECASE)), None)


def read_shape(note: str, source: str) -> Transformer | None:
    """A shape told in words ('heads=16 hidden=2048 layers=24 vocab=131072'), ungated and four times as wide inside."""
    found = {key: int(value) for key, value in re.findall(r"(heads|hidden|layers|vocab|ffn|kv_heads)=(\d+)", note)}
    if not {"heads", "hidden", "layers", "vocab"} <= set(found):
        return None
    return Transformer(
        match=".*",
        source=source,
        gated=False,
        layers=found["layers"],
        hidden=found["hidden"],
        heads=found["heads"],
        kv_heads=found.get("kv_heads", 0),
        ffn=found.get("ffn", 4 * found["hidden"]),
        vocab=found["vocab"],
    )
