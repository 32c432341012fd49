"""Resident memory of a stock llama-server: llama.cpp's own 16-bit cache must cost nothing, and ours what the codec says."""
import unittest

from memory import MIB, measure
from stock import MODEL, assert_served


class MemoryTest(unittest.TestCase):
    def test_32k_context(self):
        stock = measure("stock", MODEL, 32768, 2000)
        coded = measure("oscar", MODEL, 32768, 2000)
        assert_served(self, coded.server)
        (cache,) = coded.server.stats["caches"]
        nominal = cache["nominal_bytes"]
        self.assertEqual(nominal, 30 * 2 * 32768 * 192 * 2)
        # The whole nominal cache is missing from the idle process; what is there instead is bookkeeping per cell.
        self.assertGreater(stock.idle - coded.idle, nominal - 48 * MIB)
        self.assertEqual(cache["nominal_resident_bytes"], 0)
        # Filling: the codes, and 16-bit rows of the windows and of the largest batch, whatever the length.
        self.assertGreater(cache["rows_written"], 1800)
        self.assertGreater(cache["code_bytes"], 1500 * 30 * 2 * 3 * 20)
        plan = cache["code_bytes"] + cache["peak_exact_bytes"] + cache["bookkeeping_bytes"]
        self.assertLess(cache["resident_bytes"], plan + 8 * MIB)
        self.assertGreater(cache["resident_bytes"], cache["code_bytes"])
        self.assertLess(cache["peak_exact_bytes"], (64 + 256 + 64 + 512 + 8) * 30 * 2 * 192 * 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
