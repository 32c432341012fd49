"""`oscar bench`: what it refuses, what it lists, and the shape of its JSON. Nothing here depends on how fast anything is."""
import json
import statistics
import tempfile
import unittest
from pathlib import Path

from cli import WITH_LLAMA, oscar, qwen3_gguf

TINY = ["--kernel", "--shape", "4/2/64", "-p", "40", "-r", "1", "--stock-runs", "1", "--allow-noisy"]


class Arguments(unittest.TestCase):
    def refused(self, words, fragment, **env):
        done = oscar("bench", *words, **env)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(fragment, done.stderr.splitlines()[-1])
        self.assertEqual(done.stdout, "")

    def test_what_makes_no_sense_is_refused(self):
        self.refused(["--shape", "12/5/64"], "12/5/64 makes no sense")
        self.refused(["--shape", "12"], "QUERY-HEADS/KV-HEADS/DIMENSIONS")
        self.refused(["-d", "2048,many"], "-d 2048,many")
        self.refused(["-d", "2000000000"], "0 to 1048576")
        self.refused(["--ops", "encode"], "decode, prefill and append")
        self.refused(["--stock", "q5_1"], "--stock q5_1")
        self.refused(["--stock", "f16,f16"], "twice")
        self.refused(["--filter", "nothing of this name"], "leaves nothing")
        self.refused(["-t", "1000"], "-t 1000")
        self.refused(["-p", "1"], "-p 1")
        self.refused(["-r", "-1"], "-r -1")
        self.refused(["--max-load", "0"], "--max-load 0")
        if WITH_LLAMA:
            self.refused(["-o", "xml"], "md, json or csv")
            self.refused(["--codec", "fp4", "--allow-noisy"], "spectral, int2 or exact")
            self.refused(["-m", "missing.gguf", "--llama-bench", "/bin/true"], "no model file missing.gguf")
            self.refused(["-m", "missing.gguf", "--llama-bench", "no-such-program"], "no-such-program")
        else:
            self.refused([], "built without it")

    def test_list(self):
        done = oscar("bench", "--list", "--filter", "decode 9/3/64")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        self.assertIn("  scalar", lines)
        self.assertEqual([line for line in lines if line.startswith("  decode")],
                         [f"  decode 9/3/64 1 tokens at {depth}" for depth in (2048, 8192, 32768)])
        forced = oscar("bench", "--list", OSCAR_CPU="scalar")
        self.assertEqual(forced.stdout.splitlines()[1], "  scalar")
        self.refused(["--list"], "OSCAR_CPU=mmx", OSCAR_CPU="mmx")


@unittest.skipUnless(WITH_LLAMA, "built without llama.cpp")
class Kernel(unittest.TestCase):
    def measured(self, *words, depth=700, threads=1, temperature=("--hot",), **env):
        done = oscar("bench", *TINY, "-d", depth, "-t", threads, *temperature, *words, **env)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def test_json(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "bench.json"
            done = self.measured("-o", "json", "--json", file, threads=2, temperature=())
            result = json.loads(done.stdout)
            self.assertEqual(json.loads(file.read_text()), result)
        self.assertEqual((result["machine"]["threads"], result["machine"]["codec"]), (2, "spectral"))
        for key in ("cpu", "ghz", "load", "isa", "version", "commit", "ggml"):
            self.assertIn(key, result["machine"])
        self.assertEqual([(row["what"], row["tokens"]) for row in result["rows"]],
                         [("decode", 1), ("append", 1), ("prefill", 40), ("append", 40)])
        for row in result["rows"]:
            self.assertEqual((row["shape"], row["depth"], row["unit"]), ("4/2/64", 700, "us"))
            for key in ("ours", "stock_f16", "stock_q8_0", "stock_q4_0", "cycles"):
                self.assertGreater(row[key], 0, row)
            for ratio in ("ratio_f16", "ratio_q8_0", "ratio_q4_0"):
                self.assertLessEqual(row[ratio]["min"], row[ratio]["median"])
                self.assertLessEqual(row[ratio]["median"], row[ratio]["max"])
            ratios = [f16 / ours for f16, ours in zip(row["samples"]["f16"], row["samples"]["ours"])]
            self.assertAlmostEqual(row["ratio_f16"]["median"], statistics.median(ratios))
            self.assertEqual(len(ratios), row["runs"])

    def test_other_codecs_and_parts(self):
        for codec in ("int2", "exact"):
            done = self.measured("--codec", codec, "--no-rope-mean", "--ops", "prefill,decode", "--stock", "f16", "-o", "csv")
            header, *rows = done.stdout.splitlines()
            self.assertIn("ours,f16,x f16", header)
            self.assertEqual([row.split(",")[0] for row in rows], ["decode", "prefill"])
        alone = self.measured("--stock", "none", "--ops", "append", "--sink", "0", "--recent", "0")
        self.assertIn("instruction set", alone.stdout.splitlines()[0])
        self.assertNotIn("x f16", alone.stdout)

    def test_what_is_too_noisy_is_left_out_and_said(self):
        words = ["--kernel", "--shape", "4/2/64", "-p", "40", "-r", "3", "--stock-runs", "1"]
        done = oscar("bench", *words, "-d", "700", "-t", "1", "--hot", "--ops", "decode,append", "--max-load", "64",
                     "--max-spread", "1e-9", "--stock", "f16", "-o", "json")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("cases were too noisy and are left out", done.stderr.splitlines()[-1])
        result = json.loads(done.stdout)
        # A clock may give one case the same ratio three times, hardly all of them.
        self.assertGreater(len(result["left_out"]), 0)
        self.assertEqual(len(result["left_out"]) + len(result["rows"]), 3)
        for row in result["left_out"]:
            self.assertIn(row["what"].split()[0], ("decode", "append"))
            self.assertIn("spread over", row["why"])

    def test_an_empty_cache(self):
        done = self.measured("--stock", "f16,q4_0", depth=0)
        self.assertIn("| prefill | 4/2/64", done.stdout)

    def test_another_instruction_set(self):
        done = self.measured("--ops", "decode", "--stock", "none", "-o", "json", OSCAR_CPU="scalar")
        self.assertEqual(json.loads(done.stdout)["machine"]["isa"], "scalar")


@unittest.skipUnless(WITH_LLAMA, "built without llama.cpp")
class Models(unittest.TestCase):
    def test_figures_that_are_not_oscars_are_refused(self):
        """A program that prints what llama-bench would, without ever loading the plug-in."""
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model.gguf"
            qwen3_gguf(model)
            program = Path(folder) / "llama-bench"
            program.write_text("#!/bin/sh\necho '[]'\n")
            program.chmod(0o755)
            words = ["-m", model, "--llama-bench", program, "--allow-noisy"]
            done = oscar("bench", *words, OSCAR_CACHE_DIR=folder)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn("no calibration artifact for model.gguf", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
