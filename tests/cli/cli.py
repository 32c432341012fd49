"""What the tests of the command share: running it, and files for it to read."""
import os
import struct
import subprocess
from pathlib import Path

OSCAR = os.environ["OSCAR_TEST_OSCAR"]
SOURCE = Path(os.environ["OSCAR_TEST_SOURCE_DIR"])
SHARED = Path(os.environ["OSCAR_TEST_SHARED_DIR"])
WITH_LLAMA = os.environ["OSCAR_TEST_WITH_LLAMA"] == "1"


def clean_environment(**extra):
    """Without the variables that would answer for flags."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("OSCAR_", "LLAMA_", "GGML_", "LD_PRELOAD"))}
    if "OSCAR_CACHE_DIR" in os.environ:
        env["OSCAR_CACHE_DIR"] = os.environ["OSCAR_CACHE_DIR"]
    return {**env, **extra}


def oscar(*words, timeout=120, stdin="", **env):
    return subprocess.run([OSCAR, *map(str, words)], capture_output=True, text=True, timeout=timeout, input=stdin, env=clean_environment(**env))


def gguf(path, metadata, tensors):
    """Writes a GGUF file. metadata: str, int or float values; tensors: name -> list of floats (1-D F32)."""

    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += text(key)
        if isinstance(value, str):
            out += struct.pack("<I", 8) + text(value)
        elif isinstance(value, float):
            out += struct.pack("<If", 6, value)
        else:
            out += struct.pack("<II", 4, value)
    offset, data = 0, b""
    for name, values in tensors.items():
        out += text(name) + struct.pack("<IQIQ", 1, len(values), 0, offset)
        data += struct.pack(f"<{len(values)}f", *values)
        data += b"\0" * (-len(data) % 32)
        offset = len(data)
    out += b"\0" * (-len(out) % 32)
    Path(path).write_bytes(out + data)


def qwen3_gguf(path, layers=36, heads=32, heads_kv=8, head_dim=128):
    """The header of a model with the geometry of Qwen3-4B and two small tensors."""
    arch = "qwen3"
    gguf(path, {"general.architecture": arch, "general.name": "Geometry of Qwen3-4B", f"{arch}.block_count": layers,
                f"{arch}.context_length": 262144, f"{arch}.embedding_length": 2560, f"{arch}.attention.head_count": heads,
                f"{arch}.attention.head_count_kv": heads_kv, f"{arch}.attention.key_length": head_dim,
                f"{arch}.attention.value_length": head_dim, f"{arch}.rope.freq_base": 5000000.0},
         {"output_norm.weight": [1.0, 2.0, 3.0], "blk.0.attn_norm.weight": [0.5, 0.25]})
