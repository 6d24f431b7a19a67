"""What the kernels are told: the structs of rows.cpp and attention.h, field by field. Numbers count elements."""

import ctypes


def _struct(name: str, pointers: str, numbers: str, floats: str = "") -> type[ctypes.Structure]:
    fields = [
        *((field, ctypes.c_void_p) for field in pointers.split()),
        *((field, ctypes.c_int64) for field in numbers.split()),
        *((field, ctypes.c_float) for field in floats.split()),
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


NormCall = _struct(
    "NormCall", "x weight more out", "num_rows num_heads width row_stride head_stride weight_stride more_stride", "eps"
)
GateCall = _struct("GateCall", "gate up out", "num_rows width row_stride")
RotateCall = _struct("RotateCall", "x cos sin out", "num_rows num_heads head_dim rotary_dim row_stride")
WriteCall = _struct(
    "WriteCall",
    "k v k_pages v_pages pages offsets",
    "num_rows row k_stride v_stride page_stride num_pages page_size",
)


AttentionCall = _struct(
    "AttentionCall",
    "q out k_pages v_pages own_k own_v sink table blocks",
    "num_blocks num_threads q_stride out_stride own_k_stride own_v_stride page_stride table_stride "
    "num_pages page_size num_kv_heads group_size head_dim is_causal window",
    "scale",
)
