"""read_torch() and write_torch() against torch: what torch writes we read to the byte, what we write torch loads.

Needs OSCAR_TEST_TORCH_DUMP (the program oscar_torch_dump), OSCAR_TEST_SHARED_DIR and a Python with torch.
"""
import collections
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
import warnings
import zipfile
from pathlib import Path

try:
    import torch
except ImportError:
    sys.exit("this test compares with torch: install Debian's python3-torch, or run it with a Python that has torch")

DUMP = os.environ["OSCAR_TEST_TORCH_DUMP"]
SHARED = Path(os.environ["OSCAR_TEST_SHARED_DIR"])
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


def raw(tensor):
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def described(value):
    """What oscar_torch_dump prints for a value."""
    if isinstance(value, torch.Tensor):
        return {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "sha256": hashlib.sha256(raw(value)).hexdigest()}
    if isinstance(value, dict):
        return {"dict": [[described(key), described(item)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    return value


def sample(dtype, *shape):
    count = torch.Size(shape).numel()
    values = (torch.arange(count) * 37 % 251 - 100).reshape(shape)
    return (values > 0) if dtype == torch.bool else (values / 8 if dtype.is_floating_point else values).to(dtype)


class TorchFiles(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "file.pt"
        self.addCleanup(self.folder.cleanup)

    def dump(self, *arguments):
        return subprocess.run([DUMP, *map(str, arguments)], capture_output=True, text=True, timeout=120)

    def read(self, path):
        result = self.dump(path)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def refused(self, *words):
        result = self.dump(self.path)
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)

    def check(self, value, weights_only=True):
        """torch.save -> read_torch, then write_torch -> torch.load; both must keep every value."""
        torch.save(value, self.path)
        self.assertEqual(self.read(self.path), described(value))
        copy = Path(self.folder.name) / "copy.pt"
        self.assertEqual(self.dump("--copy", self.path, copy).returncode, 0)
        self.assertEqual(described(torch.load(copy, weights_only=weights_only)), described(value))
        self.assertEqual(self.read(copy), described(value))

    def repack(self, **options):
        """The file's entries zipped again in another way; `entries` replaces or adds some."""
        entries = options.pop("entries", {})
        compression = options.pop("compression", zipfile.ZIP_STORED)
        with zipfile.ZipFile(self.path) as source:
            content = {name: source.read(name) for name in source.namelist()}
        root = next(name for name in content if name.endswith("/data.pkl")).rsplit("/", 1)[0]
        content.update({f"{root}/{name}": data for name, data in entries.items()})
        target = options.pop("target", lambda path: open(path, "wb"))(self.path)
        with target, zipfile.ZipFile(target, "w", compression) as zipped:
            for name, data in content.items():
                info = zipfile.ZipInfo(name)
                info.compress_type = compression
                with zipped.open(info, "w", **options) as entry:
                    entry.write(data)
        return content

    def test_a14_views(self):
        matrix = sample(torch.float32, 16, 24)
        self.check(matrix.t())
        self.check(matrix[3:7, 5:11])
        self.check(matrix[:, 7])
        self.check(matrix[::3, ::5])
        self.check(matrix.reshape(4, 4, 24).permute(2, 0, 1))
        self.check(matrix[5].expand(3, 24))
        self.check({"whole": matrix, "rotated": matrix.t(), "row": matrix[2], "again": matrix})

    def test_a16_types(self):
        for dtype in DTYPES:
            with self.subTest(dtype=dtype):
                self.check({"one": sample(dtype, 3, 5), "two": sample(dtype, 7)})
                self.check(sample(dtype))
                self.check(torch.empty(0, 4, dtype=dtype))
        torch.save({"z": torch.zeros(2, dtype=torch.complex64)}, self.path)
        self.refused("dtype not supported", "ComplexFloatStorage")

    def test_plain_values(self):
        self.check([None, True, False, 0, -1, 255, 256, 65535, 65536, -2**31, 2**31, -2**63, 2**63 - 1, "", "a\u00e9\U0001f600"])
        self.check([0.5, -1e300, 1e-320], weights_only=False)  # torch 1.13 knows no float in its weights-only mode
        self.check({"t": (1, (2,), ()), "l": [[], [1]], "o": collections.OrderedDict(a=1, b=sample(torch.float32, 2)), 3: {"x": {}}})
        self.check(list(range(3000)))
        self.check({f"layer.{i}": sample(torch.float32, 4, 4) for i in range(300)})  # more than 256 memo slots
        self.check(sample(torch.float32, 3).requires_grad_())
        torch.save([2**63], self.path)
        self.refused("64 bits")

    def test_published_rotations(self):
        for path in sorted((SHARED / "data" / "rotationzoo" / "qwen3-4b-thinking-2507").iterdir()):
            value = torch.load(path)
            self.assertEqual(len(value["layers"]), 36)
            self.assertEqual(self.read(path), described(value))
            self.check(value)

    def test_a17_protocols_and_legacy(self):
        for protocol in (3, 4, 5):
            torch.save({"a": sample(torch.float32, 2)}, self.path, pickle_protocol=protocol)
            self.refused(f"protocol {protocol}", "opcode 128", "offset 0")
        torch.save({"a": sample(torch.float32, 2)}, self.path, _use_new_zipfile_serialization=False)
        self.refused("legacy", "opcode 128", "offset 0")

    def test_code_is_refused(self):
        torch.save(torch.nn.Linear(2, 2), self.path)
        self.refused("refused", "torch.nn.modules.linear.Linear")
        torch.save(torch.nn.Parameter(sample(torch.float32, 2)), self.path)
        self.refused("refused", "_rebuild_parameter")
        torch.save(collections.Counter("abc"), self.path)
        self.refused("refused", "collections.Counter")
        torch.save(torch.nn.Linear(2, 2).state_dict(), self.path)
        self.refused("BUILD")

    def test_a19_zip_variants(self):
        value = {"a": sample(torch.float32, 3, 4), "b": sample(torch.int64, 5)}
        torch.save(value, self.path)
        self.repack(force_zip64=True)
        self.assertEqual(self.read(self.path), described(value))

        class Unseekable(io.RawIOBase):  # makes zipfile write data descriptors
            def __init__(self, path):
                self.file = open(path, "wb")

            def writable(self):
                return True

            def write(self, data):
                return self.file.write(data)

            def close(self):
                self.file.close()
                super().close()

        self.repack(target=Unseekable)
        with zipfile.ZipFile(self.path) as zipped:
            self.assertTrue(all(info.flag_bits & 8 for info in zipped.infolist()))
        self.assertEqual(self.read(self.path), described(value))
        self.repack(entries={".data/serialization_id": b"1234", ".format_version": b"1", ".storage_alignment": b"64"})
        self.assertEqual(self.read(self.path), described(value))

        def reversed_words(data, size):
            return b"".join(data[i:i + size][::-1] for i in range(0, len(data), size))

        content = self.repack(entries={"byteorder": b"big"})
        storages = {name.rsplit("/data/", 1)[1]: data for name, data in content.items() if "/data/" in name}
        self.repack(entries={"data/0": reversed_words(storages["0"], 4), "data/1": reversed_words(storages["1"], 8)})
        self.assertEqual(self.read(self.path), described(value))

        torch.save({"a": torch.zeros(64, 64)}, self.path)
        self.repack(compression=zipfile.ZIP_DEFLATED)
        self.refused("compressed")
        torch.save(value, self.path)
        data = self.path.read_bytes()
        self.path.write_bytes(data[:data.index(b"PK\x01\x02")])
        self.refused("not a whole zip file")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    unittest.main(verbosity=2)
