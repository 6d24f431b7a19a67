"""The least that a step of a target can take: what has to be read once, or its multiplications, if they take longer."""

from dataclasses import dataclass

from target_worker.model.config import TargetShape
from tests.bench.propose_geometry import BYTES_PER_S, FLOPS_PER_S, Floor
from tests.bench.target_pages import PAGE_SIZE

MEANING = (
    f"the larger of (weights + KV of the context) bytes / {BYTES_PER_S:g} a second and"
    f" (2 x rows x parameters + attention) / {FLOPS_PER_S:g} operations a second; of a hybrid, whose products wait for"
    " its states and these for its products, the sum of two such: of the weights, and of KV, states and rings"
)
"""Of floor_us."""
TOKENS_A_STEP = 4
"""With so many accepted, one block in PAGE_SIZE / TOKENS_A_STEP passes a page edge and writes its states."""


@dataclass(frozen=True, slots=True)
class TwoFloors:
    """Of a hybrid's step: of what follows one upon the other in every layer no part can hide another."""

    products: Floor
    """All projections and the head."""
    memory: Floor
    """What each request has of its own, and what is done with it: KV, states, rings."""

    @property
    def us(self) -> float:
        """Both together."""
        return self.products.us + self.memory.us


def verify_floor(
    shape: TargetShape, num_reqs: int, block_size: int, context: int, item_bytes: int
) -> Floor | TwoFloors:
    """Of num_reqs blocks of block_size rows over so many tokens of context each, the head for all rows."""
    rows = num_reqs * block_size
    layers, head = num_params(shape)
    weight_bytes, products = item_bytes * (layers + head), 2 * rows * (layers + head)
    kv_bytes = item_bytes * num_reqs * context * shape.num_full_layers * 2 * shape.num_kv_heads * shape.head_dim
    attention = rows * _attention_flops(shape, context + (block_size + 1) / 2)
    if shape.linear is None:
        return Floor(weight_bytes=weight_bytes, kv_bytes=kv_bytes, flops=products + attention)
    own = num_reqs * state_bytes(shape, block_size, item_bytes)
    recurrence = rows * _state_flops(shape)
    return TwoFloors(
        Floor(weight_bytes=weight_bytes, kv_bytes=0.0, flops=products),
        Floor(weight_bytes=0.0, kv_bytes=kv_bytes + own, flops=attention + recurrence),
    )


def state_bytes(shape: TargetShape, block_size: int, item_bytes: int) -> float:
    """That a verify moves of one request's states and rings, in the mean over where its context ends in a page.

    States are read, and written where an edge is passed. The rows since the edge before the newest block are read
    from the rings, and those of the block are written there.
    """
    linear = shape.linear
    assert linear is not None, f"{shape.architecture} has no states"
    state = linear.state_bytes(item_bytes)
    replayed = (PAGE_SIZE - 1) / 2 + TOKENS_A_STEP
    rings = linear.ring_bytes(1, item_bytes) * (replayed + block_size)
    return shape.num_linear_layers * (state * (1 + TOKENS_A_STEP / PAGE_SIZE) + rings)


def prompt_floor(shape: TargetShape, prompts: list[int], item_bytes: int) -> Floor | TwoFloors:
    """Of whole prompts of these lengths, the head for the last row of each. No context is there to be read."""
    layers, head = num_params(shape)
    attention = sum(num * _attention_flops(shape, (num + 1) / 2) for num in prompts)
    weight_bytes, products = item_bytes * (layers + head), 2 * (sum(prompts) * layers + len(prompts) * head)
    if shape.linear is None:
        return Floor(weight_bytes=weight_bytes, kv_bytes=0.0, flops=products + attention)
    written = len(prompts) * shape.num_linear_layers * shape.linear.state_bytes(item_bytes)
    return TwoFloors(
        Floor(weight_bytes=weight_bytes, kv_bytes=0.0, flops=products),
        Floor(weight_bytes=0.0, kv_bytes=written, flops=attention + sum(prompts) * _state_flops(shape)),
    )


def num_params(shape: TargetShape) -> tuple[int, int]:
    """Numbers in the matrices of all layers, and in the head."""
    hidden, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    # A hybrid's attention has a gate as wide as its queries.
    into = queries * (1 + shape.is_hybrid_family) + 2 * shape.num_kv_heads * shape.head_dim
    mixers = shape.num_full_layers * (into + queries)
    if (linear := shape.linear) is not None:
        mixers += shape.num_linear_layers * (linear.conv_dim + 2 * linear.value_size + 2 * linear.num_v_heads)
    return hidden * (mixers + shape.num_layers * 3 * shape.intermediate_size), hidden * shape.vocab_size


def bound(floor: Floor | TwoFloors) -> str:
    """Which of the two it is: bytes or flops; of a hybrid, what its products are bound by."""
    of = floor.products if isinstance(floor, TwoFloors) else floor
    return "flops" if of.us > (of.weight_bytes + of.kv_bytes) / BYTES_PER_S * 1e6 else "bytes"


def _attention_flops(shape: TargetShape, seen: float) -> float:
    """Of one row that sees so many tokens, itself among them, in all layers."""
    return 4 * seen * shape.num_heads * shape.head_dim * shape.num_full_layers


def _state_flops(shape: TargetShape) -> float:
    """Of one row's states in all layers: what its key finds there is replaced, and its query reads."""
    assert shape.linear is not None, f"{shape.architecture} has no states"
    return 6 * shape.linear.value_size * shape.linear.k_dim * shape.num_linear_layers
