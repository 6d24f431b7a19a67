"""The gated delta net of a hybrid target, as its folder says it. No torch here: launch imports this file."""

from dataclasses import dataclass
from typing import Any

from memsvc.device.hf_config import get_int

FULL, LINEAR = "full_attention", "linear_attention"

RING_PAGES = 2
"""Pages of one layer's ring. Halves fill frames better: at 27B geometry 9 of them one frame of 3.2 MB, against 4 wholes
with 11.5 % left over."""

STATE_DTYPES = {"float32": 4, "bfloat16": 2}
"""What states may be kept in, with the bytes of an item."""
_VECTOR = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSpec:
    """Sizes of a gated delta net layer, all linear layers alike."""

    num_k_heads: int
    """Query heads and key heads."""
    num_v_heads: int
    """Value heads: states. Each key head serves num_v_heads / num_k_heads of them, in order."""
    k_dim: int
    """Of a query or key head."""
    v_dim: int
    """Of a value head."""
    conv_kernel: int
    """Rows that the convolution sees, its own included."""

    @property
    def value_size(self) -> int:
        """Width of all value heads."""
        return self.num_v_heads * self.v_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.num_k_heads * self.k_dim + self.value_size

    @property
    def gate_width(self) -> int:
        """Columns in which b, and a, are computed: num_v_heads rounded up.

        exp and log differ by a bit between whole vectors and what is left over at the end of a tensor, and a row's
        numbers must not depend on where in the batch it stands.
        """
        return -(-self.num_v_heads // _VECTOR) * _VECTOR

    def state_bytes(self, item: int, state_dtype: str = "float32") -> int:
        """A page of state: [num_v_heads, k_dim, v_dim] of state_dtype, and conv_kernel - 1 rows of conv_dim items."""
        return self.value_size * self.k_dim * STATE_DTYPES[state_dtype] + (self.conv_kernel - 1) * self.conv_dim * item

    def ring_bytes(self, num_rows: int, item: int) -> int:
        """A page of ring: rows of conv_dim items, and g and beta of each value head in float32."""
        return num_rows * (self.conv_dim * item + 2 * self.num_v_heads * 4)


def ring_page_rows(page_size: int, block_size: int) -> int:
    """Rows of one of the RING_PAGES pages of a ring.

    The ring holds up to page_size + block_size - 1 rows that are to be replayed, and a block written meanwhile.
    """
    return -(-(page_size + 2 * block_size) // RING_PAGES)


def read_layer_types(config: dict[str, Any], *, may_be_linear: bool) -> tuple[str, ...]:
    """FULL or LINEAR for each layer, from layer_types, else from full_attention_interval (default 4).

    Raises ValueError for other kinds of layers, and where no layer is FULL.
    """
    num_layers = get_int(config, "num_hidden_layers")
    names = config.get("layer_types")
    if not names and not may_be_linear:
        return (FULL,) * num_layers
    if not names:
        interval = get_int(config, "full_attention_interval", 4)
        names = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    if not isinstance(names, list):
        raise ValueError(f"layer_types must be a list of names, got {names!r:.80}")
    odd = sorted({str(name) for name in names} - ({FULL, LINEAR} if may_be_linear else {FULL}))
    if odd:
        wanted = f"{FULL} or {LINEAR}" if may_be_linear else FULL
        raise ValueError(f"layer_types {odd} is not supported; the target's layers must all be {wanted}")
    if len(names) != num_layers and may_be_linear:
        raise ValueError(f"layer_types names {len(names)} layers, num_hidden_layers is {num_layers}")
    if may_be_linear and FULL not in names:
        raise ValueError(f"none of {num_layers} layers is {FULL}; a target needs at least one")
    return tuple(names) if may_be_linear else (FULL,) * num_layers


def read_linear_spec(config: dict[str, Any]) -> LinearSpec:
    """The sizes in config.json. Raises ValueError where one is missing or does not fit another."""
    spec = LinearSpec(
        num_k_heads=get_int(config, "linear_num_key_heads"),
        num_v_heads=get_int(config, "linear_num_value_heads"),
        k_dim=get_int(config, "linear_key_head_dim"),
        v_dim=get_int(config, "linear_value_head_dim"),
        conv_kernel=get_int(config, "linear_conv_kernel_dim"),
    )
    if spec.num_v_heads % spec.num_k_heads:
        raise ValueError(
            f"{spec.num_v_heads} linear value heads are not a multiple of {spec.num_k_heads} linear key heads"
        )
    if spec.conv_kernel < 2:
        raise ValueError(f"linear_conv_kernel_dim is {spec.conv_kernel}, must be at least 2")
    return spec
