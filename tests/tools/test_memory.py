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
        # Filling: far less than 16 bit, and not less than the codes themselves.
        self.assertGreater(cache["rows_written"], 1800)
        at_16_bit = cache["rows_written"] * nominal / 32768
        grown = coded.filled - coded.idle
        self.assertLess(cache["resident_bytes"], 0.5 * at_16_bit)
        self.assertGreater(cache["resident_bytes"], cache["code_bytes"])
        self.assertLess(grown, 0.5 * at_16_bit + 48 * MIB)


if __name__ == "__main__":
    unittest.main(verbosity=2)
