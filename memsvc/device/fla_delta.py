"""fla-core's gated delta rule over prompts, without what its own entry adds to every call on the host.

That entry goes through autograd, a choice of backends and a tuner for each of its kernels, in every call; a prompt step
of a 27B hybrid makes 48 of them. And it waits for the device where it makes its index of chunks. So that index is made
from the lengths that the host knows, and the kernels are launched as that entry launches them, with the configurations
of fla_configs. Where their parameters are not those known here, or FLA_CACHE_MODE asks for its tuner, the entry is
called, with the same index.
"""

import importlib
import importlib.util
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memsvc.device.delta_plan import DeltaHeads, Rule
from memsvc.device.gated_delta import DeltaRows
from memsvc.device.kernels.launch import cut, padded
from memsvc.device.slots import Stage

logger = logging.getLogger(__name__)

_CONFIGS = Path(__file__).parent / "fla_configs"
"""A configuration for each of its kernels: from its own lists, without spills, and for devices with 96 KiB a program."""
CHUNK = 64
"""Rows that are computed at once."""
_PART = 16
"""Of a chunk, whose inverse is put together from such parts."""
_EPSILON = 1e-6
_MOST_CAPABILITY = 9
"""On later devices fla-core allows the kernel over states 2 warps only, since tl.dot races there with more. fla_configs
has 4, and the entry takes them from there too.
"""
_MOST_KEY_DIM = 256
"""What its entry checks: a kernel holds a state in parts of 64 numbers of a key, four at most."""
_ENTRY, _MODE, _PLAIN = "fla.ops.gated_delta_rule", "FLA_CACHE_MODE", "default"
_CALLS = {
    "l2norm_fwd_kernel": ("fla.modules.norm.l2norm", "x y rstd eps T D BD NB BT"),
    "chunk_local_cumsum_scalar_kernel": (
        "fla.ops.utils.cumsum",
        "s o scale cu_seqlens chunk_indices T B H BT REVERSE HAS_SCALE IS_VARLEN USE_GRAPH",
    ),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": (
        "fla.ops.gated_delta_rule.chunk_fwd",
        "k g beta A cu_seqlens chunk_indices T H HV K BT BC BK USE_G IS_VARLEN",
    ),
    "recompute_w_u_fwd_kernel": (
        "fla.ops.gated_delta_rule.wy_fast",
        "k v beta w u A g cu_seqlens chunk_indices T H HV K V BT BK BV USE_G IS_VARLEN",
    ),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": (
        "fla.ops.common.chunk_delta_h",
        "k v w v_new g gk h h0 ht cu_seqlens chunk_offsets T H HV K V BT BV USE_G USE_GK USE_INITIAL_STATE"
        " STORE_FINAL_STATE SAVE_NEW_VALUE STATE_V_FIRST IS_VARLEN",
    ),
    "chunk_fwd_kernel_o": (
        "fla.ops.common.chunk_o",
        "q k v h g g_gamma o cu_seqlens chunk_indices scale T H HV K V BT BK BV USE_G USE_G_GAMMA STATE_V_FIRST"
        " IS_VARLEN",
    ),
}
"""Its kernels in the order of a call: module, and the parameters that are known here."""

Kernel = tuple[Any, dict[str, Any]]
"""What is launched, and the rest of its named arguments."""


def lacks(dtype: torch.dtype, device: torch.device, heads: DeltaHeads) -> str | None:
    """Why the rule can't be had for such a model here, or None."""
    if device.type != "cuda":
        return f"its kernels are for a CUDA device, not {device}"
    # Of float32 they multiply the first ten bits: such a model is there for its numbers.
    if dtype.itemsize != 2:
        return f"its kernels are for two bytes a number, not {dtype}"
    if heads.k_dim > _MOST_KEY_DIM:
        return f"its kernels are for keys of at most {_MOST_KEY_DIM} numbers, not {heads.k_dim}"
    if (found := torch.cuda.get_device_capability(device)[0]) > _MOST_CAPABILITY:
        return f"4 warps of a kernel race above compute capability {_MOST_CAPABILITY}, {device} has {found}"
    return None if importlib.util.find_spec("fla") is not None else "fla-core is not installed"


class FlaRule:
    """For models of two bytes a number on a CUDA device."""

    name = "fla"

    def __init__(self, dtype: torch.dtype, entry: Callable[..., Any] | None = None) -> None:
        """entry: in the place of fla-core's, always called."""
        self.dtype = dtype
        is_tuned = os.environ.get(_MODE, _PLAIN) != _PLAIN
        self._entry = entry or _import_entry()
        self._kernels = None if entry or is_tuned else find_kernels()

    def __call__(self, lens: Sequence[int], stage: Stage) -> Rule:
        """See PlanRule."""
        chunks = Chunks.of(lens, stage)
        if self._kernels is not None:
            return _Launches(chunks, self._kernels)

        def run(rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self._entry(
                rows.q, rows.k, rows.v, rows.g, rows.beta, scale=rows.k.shape[-1] ** -0.5, initial_state=state,
                output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=chunks.cu_seqlens,
                chunk_indices=chunks.chunk_indices,
            )  # fmt: skip

        return run


@dataclass(frozen=True, slots=True)
class Chunks:
    """Where sequences and their chunks of CHUNK rows begin: int64, on the device."""

    cu_seqlens: torch.Tensor
    """[n + 1]: where each sequence begins, and the end."""
    chunk_indices: torch.Tensor
    """[chunks, 2]: of each chunk its sequence, and its number there."""
    chunk_offsets: torch.Tensor
    """[n + 1]: chunks before each sequence, and all."""

    @classmethod
    def of(cls, lens: Sequence[int], stage: Stage) -> "Chunks":
        """In one copy, for which nobody waits."""
        counts = [cut(num, CHUNK) for num in lens]
        cu_seqlens, offsets = (np.cumsum([0, *numbers], dtype=np.int64) for numbers in (lens, counts))
        owners = np.repeat(np.arange(len(lens)), counts)
        indices = np.stack((owners, np.arange(offsets[-1]) - offsets[owners]), axis=1)
        # Each begins at a multiple of 16 bytes: the kernels would be compiled anew for one that does not.
        parts = [cu_seqlens, np.zeros(len(cu_seqlens) % 2, dtype=np.int64), indices.ravel(), offsets]
        on_device = stage(np.concatenate(parts)).split([len(part) for part in parts])
        return cls(on_device[0], on_device[2].view(-1, 2), on_device[3])


def find_kernels() -> dict[str, Kernel] | None:
    """By the names of _CALLS, with tiles and warps of fla_configs; None, and a warning, if one is not as known here."""
    found = {}
    for name, (module, parameters) in _CALLS.items():
        kernel = _unwrapped(module, name)
        if kernel is None or list(kernel.arg_names) != parameters.split():
            logger.warning("fla-core's kernel %s is not as known here: its entry serves, which is slower", name)
            return None
        config = json.loads((_CONFIGS / f"{name}.json").read_text())["default_config"]
        options = {option: config[option] for option in ("num_warps", "num_stages", "num_ctas")}
        found[name] = kernel, config["kwargs"] | options
    return found


def _unwrapped(module: str, name: str) -> Any:
    """The kernel itself, which its tuner and what finds arguments from others are around; None if there is none."""
    try:
        found: Any = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    while type(found).__name__ in ("Heuristics", "CachedAutotuner", "Autotuner"):
        found = found.fn
    return found if hasattr(found, "arg_names") else None


@dataclass(frozen=True, slots=True)
class _Launches:
    """A Rule."""

    chunks: Chunks
    kernels: Mapping[str, Kernel]

    def __call__(self, rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = rows.q, rows.k, rows.v, rows.g, rows.beta, state
        assert all(x.is_contiguous() for x in given), f"strides {[x.stride() for x in given]}"
        q, k, v = self._normed(rows.q), self._normed(rows.k), rows.v
        sizes = {"T": v.shape[1], "H": k.shape[2], "HV": v.shape[2], "K": k.shape[3], "BT": CHUNK}
        g_cumsum = self._summed(rows.g)
        w, u = self._solved(k, v, g_cumsum, rows.beta, sizes)
        sizes["V"] = v.shape[3]
        num, num_heads = len(self.chunks.chunk_indices), sizes["HV"]
        h = k.new_empty((1, num, num_heads, sizes["K"], sizes["V"]))
        v_new, final_state, out = torch.empty_like(u), torch.empty_like(state), torch.empty_like(v)
        self._launch(
            "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
            lambda tile: (cut(sizes["V"], tile["BV"]) * len(state) * num_heads,),
            k=k, v=u, w=w, v_new=v_new, g=g_cumsum, gk=None, h=h, h0=state, ht=final_state,
            cu_seqlens=self.chunks.cu_seqlens, chunk_offsets=self.chunks.chunk_offsets, USE_G=True, USE_GK=False,
            USE_INITIAL_STATE=True, STORE_FINAL_STATE=True, SAVE_NEW_VALUE=True, STATE_V_FIRST=False, IS_VARLEN=True,
            **sizes,
        )  # fmt: skip
        self._launch(
            "chunk_fwd_kernel_o", lambda tile: (cut(sizes["V"], tile["BV"]) * num, num_heads),
            q=q, k=k, v=v_new, h=h, g=g_cumsum, g_gamma=None, o=out, scale=sizes["K"] ** -0.5, USE_G=True,
            USE_G_GAMMA=False, STATE_V_FIRST=False, **self._places(), **sizes,
        )  # fmt: skip
        return out, final_state

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, t, heads, dim] at unit length."""
        num, dim = x.shape[1] * x.shape[2], x.shape[3]
        out, root = torch.empty_like(x), torch.empty(num, dtype=torch.float32, device=x.device)
        self._launch(
            "l2norm_fwd_kernel", lambda tile: (cut(num, tile["BT"]),), x=x, y=out, rstd=root, eps=_EPSILON, T=num,
            D=dim, BD=padded(dim), NB=1,  # for its tuner alone
        )  # fmt: skip
        return out

    def _summed(self, g: torch.Tensor) -> torch.Tensor:
        """The running sum of g in each chunk, to the base of 2."""
        out, (_, num_rows, num_heads) = torch.empty_like(g), g.shape
        self._launch(
            "chunk_local_cumsum_scalar_kernel", lambda tile: (len(self.chunks.chunk_indices) * num_heads,), s=g, o=out,
            scale=math.log2(math.e), T=num_rows, B=1, H=num_heads, BT=CHUNK, REVERSE=False, HAS_SCALE=True,
            USE_GRAPH=False, **self._places(),
        )  # fmt: skip
        return out

    def _solved(
        self, k: torch.Tensor, v: torch.Tensor, g_cumsum: torch.Tensor, beta: torch.Tensor, sizes: dict[str, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What each row takes from the state before its chunk, [1, t, v_heads, k_dim], and what it adds, as v."""
        num_rows, num_heads = sizes["T"], sizes["HV"]
        # What lies above the diagonal is read and not written.
        inverse = torch.zeros((1, num_rows, num_heads, CHUNK), dtype=k.dtype, device=k.device)
        grid = len(self.chunks.chunk_indices), num_heads
        self._launch(
            "chunk_gated_delta_rule_fwd_kkt_solve_kernel", lambda tile: grid, k=k, g=g_cumsum, beta=beta, A=inverse,
            BC=_PART, USE_G=True, **self._places(), **sizes,
        )  # fmt: skip
        w, u = k.new_empty((1, num_rows, num_heads, sizes["K"])), torch.empty_like(v)
        self._launch(
            "recompute_w_u_fwd_kernel", lambda tile: grid, k=k, v=v, beta=beta, w=w, u=u, A=inverse, g=g_cumsum,
            V=v.shape[3], BK=64, BV=64, USE_G=True, **self._places(), **sizes,
        )  # fmt: skip
        return w, u

    def _places(self) -> dict[str, Any]:
        return {"cu_seqlens": self.chunks.cu_seqlens, "chunk_indices": self.chunks.chunk_indices, "IS_VARLEN": True}

    def _launch(self, name: str, grid: Callable[[dict[str, Any]], tuple[int, ...]], **operands: Any) -> None:
        kernel, tile = self.kernels[name]
        kernel[grid(tile)](**operands, **tile)


def _import_entry() -> Callable[..., Any]:
    # Else it compiles and times 59 configurations at its first call: half a minute of a core, to choose what is best for
    # a prompt of one token; and 25 more for each further size of prompts. FLA_CACHE_MODE=disabled lets it do so.
    os.environ.setdefault("FLA_CONFIG_DIR", str(_CONFIGS))
    os.environ.setdefault(_MODE, _PLAIN)
    # Under a name of its own, since checkers do without the package.
    return importlib.import_module(_ENTRY).chunk_gated_delta_rule
