"""Names a model and its arithmetic: KV that others made is of no use."""

import hashlib
from pathlib import Path

_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 16


def fingerprint(folder: Path, load_format: str, *arithmetic: str) -> str:
    """A digest of load_format, of what is said of the arithmetic, of config.json and of the weights.

    Of each safetensors file these are its name, its size and sixteen samples of 64 KiB; of random weights nothing.
    """
    digest = hashlib.sha256(f"{' '.join((load_format, *arithmetic))}\n".encode())
    digest.update((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")) if load_format != "dummy" else []:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for i in range(_NUM_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
