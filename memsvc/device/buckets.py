"""Sizes of the batches that a worker captures in graphs. No torch: launch sizes memory by them."""

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Requests of the batches that are captured; past the last one in strides of BUCKET_STRIDE."""
BUCKET_STRIDE = 32


def bucket_sizes(max_bs: int, max_reqs: int) -> tuple[int, ...]:
    """Sizes to capture, ascending: every batch up to min(max_bs, max_reqs) fits one, and none exceeds max_bs."""
    top = min(max_bs, max_reqs)
    if top < 1:
        return ()
    sizes = [*BUCKETS, *range(BUCKETS[-1] + BUCKET_STRIDE, top + BUCKET_STRIDE, BUCKET_STRIDE)]
    last = min(max_bs, next(size for size in sizes if size >= top))
    return (*[size for size in sizes if size < last], last)


def most_places(max_bs: int, max_reqs: int) -> int:
    """Places of the largest batch that ever runs, captured or not: no less than max_reqs."""
    return max((max_reqs, *bucket_sizes(max_bs, max_reqs)))
