"""The least that a step of a dense target can take: weights and KV read once, or its multiplications, if they take longer."""

from target_worker.model.config import TargetShape
from tests.bench.propose_geometry import BYTES_PER_S, FLOPS_PER_S, Floor

MEANING = (
    f"the larger of (weights + KV of the context) bytes / {BYTES_PER_S:g} a second and"
    f" (2 x rows x parameters + attention) / {FLOPS_PER_S:g} operations a second"
)
"""Of floor_us."""


def verify_floor(shape: TargetShape, num_reqs: int, block_size: int, context: int, item_bytes: int) -> Floor:
    """Of num_reqs blocks of block_size rows over so many tokens of context each, the head for all rows."""
    rows = num_reqs * block_size
    layers, head = num_params(shape)
    return Floor(
        weight_bytes=item_bytes * (layers + head),
        kv_bytes=item_bytes * num_reqs * context * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim,
        flops=2 * rows * (layers + head) + rows * _attention_flops(shape, context + (block_size + 1) / 2),
    )


def prompt_floor(shape: TargetShape, prompts: list[int], item_bytes: int) -> Floor:
    """Of whole prompts of these lengths, the head for the last row of each. No context is there to be read."""
    layers, head = num_params(shape)
    attention = sum(num * _attention_flops(shape, (num + 1) / 2) for num in prompts)
    return Floor(
        weight_bytes=item_bytes * (layers + head),
        kv_bytes=0.0,
        flops=2 * (sum(prompts) * layers + len(prompts) * head) + attention,
    )


def num_params(shape: TargetShape) -> tuple[int, int]:
    """Numbers in the matrices of all layers, and in the head."""
    hidden, dim = shape.hidden_size, shape.head_dim
    layer = hidden * (2 * shape.num_heads * dim + 2 * shape.num_kv_heads * dim + 3 * shape.intermediate_size)
    return shape.num_layers * layer, hidden * shape.vocab_size


def bound(floor: Floor) -> str:
    """Which of the two it is: bytes or flops."""
    return "flops" if floor.us > (floor.weight_bytes + floor.kv_bytes) / BYTES_PER_S * 1e6 else "bytes"


def _attention_flops(shape: TargetShape, seen: float) -> float:
    """Of one row that sees so many tokens, itself among them, in all layers."""
    return 4 * seen * shape.num_heads * shape.head_dim * shape.num_layers
