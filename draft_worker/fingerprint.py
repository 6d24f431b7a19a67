"""Names a drafter: draft KV that another one made is of no use."""

import hashlib
from pathlib import Path

_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 16


def fingerprint(draft_path: Path, dtype: str, load_format: str, kv_cache_dtype: str) -> str:
    """A digest of both dtypes, config.json, and of each weight file its name, size and samples of its bytes."""
    digest = hashlib.sha256(f"{dtype} {load_format} {kv_cache_dtype} ".encode())
    digest.update((draft_path / "config.json").read_bytes())
    files = sorted(draft_path.glob("*.safetensors")) if load_format == "auto" else []
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        step = max(1, (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
        with file.open("rb") as stream:
            for offset in range(0, max(1, size - _SAMPLE_BYTES + 1), step):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
