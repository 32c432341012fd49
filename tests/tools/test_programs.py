"""Stock llama-completion, llama-perplexity and llama-bench with the plug-in."""
import json
import re
import statistics
import subprocess
import tempfile
import unittest
from pathlib import Path

from stock import ARTIFACT, LLAMA_BIN, MODEL, OSCAR, TEXT, THREADS, Run, assert_served, looks_like_text, prose

COMMON = ["-m", MODEL, "-t", THREADS]
PROMPT = prose(30000, 2600)
COMPLETION = [*COMMON, "-c", 2048, "-p", PROMPT, "-n", 24, "--temp", 0, "-no-cnv", "--no-display-prompt", "-fa", "on"]


def perplexity(result):
    return float(re.search(r"Final estimate: PPL = ([0-9.]+)", result.out + result.err)[1])


class ProgramsTest(unittest.TestCase):
    def test_completion(self):
        coded = Run("llama-completion", COMPLETION)
        assert_served(self, coded)
        self.assertTrue(looks_like_text(coded.out), coded.out)

    def test_completion_delegating_is_stock(self):
        stock = Run("llama-completion", COMPLETION, mode="stock")
        delegated = Run("llama-completion", COMPLETION, mode="delegate")
        self.assertEqual(stock.code, 0, stock.err)
        self.assertEqual(delegated.code, 0, delegated.err)
        self.assertEqual(delegated.out, stock.out)

    def test_prompt_cache(self):
        with tempfile.TemporaryDirectory() as folder:
            words = [*COMPLETION, "--prompt-cache", Path(folder) / "prompt.cache"]
            made = Run("llama-completion", words)
            assert_served(self, made)
            self.assertEqual(sum(cache["imported_rows"] for cache in made.stats["caches"]), 0)
            once, twice = Run("llama-completion", words), Run("llama-completion", words)
            for loaded in (once, twice):
                assert_served(self, loaded)
                self.assertGreater(sum(cache["imported_rows"] for cache in loaded.stats["caches"]), 400)
                self.assertLess(sum(cache["rows_written"] for cache in loaded.stats["caches"]),
                                sum(cache["rows_written"] for cache in made.stats["caches"]))
                self.assertTrue(looks_like_text(loaded.out), loaded.out)
            self.assertEqual(once.out, twice.out)

    def test_perplexity(self):
        words = [*COMMON, "-f", TEXT, "-c", 1024, "-b", 512, "--chunks", 1, "-fa", "on"]
        stock, coded = Run("llama-perplexity", words, mode="stock"), Run("llama-perplexity", words)
        assert_served(self, coded)
        ratio = perplexity(coded) / perplexity(stock)
        # From both sides: a cache that is not coded at all would give 1.000, a broken one several times more.
        self.assertGreater(abs(ratio - 1), 1e-4)
        self.assertLess(ratio, 1.5)

    def test_bench(self):
        result = Run("llama-bench", [*COMMON, "-p", 128, "-n", 8, "-d", 512, "-r", 1, "-fa", 1, "-o", "json"])
        assert_served(self, result)
        rows = json.loads(result.out)
        self.assertEqual(sorted((row["n_prompt"], row["n_gen"]) for row in rows), [(0, 8), (128, 0)])
        for row in rows:
            self.assertGreater(row["avg_ts"], 0)

    def test_oscar_bench(self):
        """Stock and ours through the same llama-bench; how fast either is does not matter here."""
        words = ["bench", "-m", MODEL, "--oscar", ARTIFACT, "--llama-bench", LLAMA_BIN / "llama-bench", "-t", THREADS, "-d", 256, "-p", 64,
                 "-n", 4, "-r", 1, "--stock", "f16,q8_0", "--allow-noisy", "-o", "json"]
        done = subprocess.run([OSCAR, *map(str, words)], capture_output=True, text=True, timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = json.loads(done.stdout)["rows"]
        self.assertEqual([(row["what"], row["model"], row["depth"], row["unit"]) for row in rows],
                         [(what, Path(MODEL).name, 256, "t/s") for what in ("tg4", "pp64")])
        for row in rows:
            for key in ("ours", "stock_f16", "stock_q8_0"):
                self.assertGreater(row[key], 0, row)
            self.assertIsNone(row["stock_q4_0"])
            ratios = [ours / f16 for ours, f16 in zip(row["samples"]["ours"], row["samples"]["f16"])]
            self.assertAlmostEqual(row["ratio_f16"]["median"], statistics.median(ratios))


if __name__ == "__main__":
    unittest.main(verbosity=2)
