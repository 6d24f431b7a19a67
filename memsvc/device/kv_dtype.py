"""The dtypes that pages of keys and values may have. No torch here: launch imports this file."""

AUTO = "auto"
FP8_E4M3 = "fp8_e4m3"
KV_CACHE_DTYPES = (AUTO, FP8_E4M3)
"""auto is the dtype of the model's arithmetic. fp8_e4m3 keeps 8 bits of each number, without a scale: past 448 it is
448. Arithmetic stays in the model's dtype."""
FP8_CAPABILITY = (8, 9)
"""Compute capability from which on a CUDA device converts such numbers."""


def kv_torch_name(kv_cache_dtype: str, dtype: str) -> str:
    """Name of the torch dtype of the pages. dtype: of the model's arithmetic."""
    return dtype if kv_cache_dtype == AUTO else "float8_e4m3fn"


def kv_item_bytes(kv_cache_dtype: str, item_bytes: int) -> int:
    """Bytes of one number of a page. item_bytes: of one in the model's arithmetic."""
    return item_bytes if kv_cache_dtype == AUTO else 1
