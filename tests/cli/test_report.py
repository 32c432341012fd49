"""report: what the page holds, what it does not do, and what it refuses. Plots are checked by running the page's own script against
a Chart that only remembers what it was given (where there is a node)."""
import copy
import hashlib
import json
import re
import shutil
import tempfile
import unittest
from pathlib import Path

from cli import SOURCE, oscar
from page import embedded, plots

RESULTS = SOURCE / "bench" / "results"
RIVALS, PROSE, CODE = (RESULTS / f"smollm2-f16-{name}.json" for name in ("rivals-essays", "essays", "code"))
METHODS = {"noise-floor": ("mode=exact,perturb_q=1", 16, 0.003), "spectral-2": ("codec=spectral,k_bits=2,v_bits=2", 2.125, 0.014),
           "oscar-published": ("codec=int2,k_mean=none", 2.5, 0.19), "kivi2-g32": ("codec=sim:kivi2-g32", 3.0, 0.11)}
DEPTHS = {"1024-2047": 0.8, "2048-4094": 1.1, "all": 1.0}

def evaluation():
    """The shape of oscar eval -o json, with numbers that are easy to tell apart."""
    rows = [{"method": method, "variant": variant, "k_bits": 2, "v_bits": 2, "bits_per_element": bits, "bits_per_element_all": bits + 1,
             "depth": depth, "kl_mean": kl * factor, "kl_mean_ci": [0.9 * kl * factor, 1.2 * kl * factor], "kl_p50": kl / 2,
             "kl_p99": 8 * kl, "kl_max": 20 * kl, "same_top": 0.9, "same_top_ci": [0.8, 0.95], "ppl_ratio": 1.01, "ppl_ratio_ci": [1, 1.02],
             "positions": 3071, "sequences": 1, "context": 4096}
            for method, (variant, bits, kl) in METHODS.items() for depth, factor in DEPTHS.items()]
    retrieval = [{"method": method, "kind": "all", "questions": 30, "accuracy": 0.8, "accuracy_ci": [0.7, 0.9], "chance": 1 / 6,
                  "right_probability": 0.7, "same_choice": 0.9, "same_choice_ci": [0.8, 1]} for method in METHODS]
    return {"oscar": "0.1.0", "ggml": "0.25.3", "model": "tiny.gguf", "model_fingerprint": "f00d", "artifact": {"name": "tiny", "digest": "d1ce"},
            "texts": [{"name": "prose.txt", "sha256": "ab12", "sequences": 1, "tokens": 4096}], "context": 4096, "from": 1024, "sequences": 1,
            "documents": 1, "seed": 1, "n_ubatch": 512, "threads": 2, "confidence": "bootstrap over blocks", "rows": rows,
            "retrieval": retrieval, "continuations": [], "notes": []}


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.output = self.folder / "report.html"

    def write(self, name, content):
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    def page(self, *words, **env):
        done = oscar("report", *words, "-o", self.output, **env)
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.output.read_text()

    def test_the_page_holds_what_the_files_say(self):
        page = self.page(self.write("eval.json", evaluation()), RIVALS, SOURCE_DATE_EPOCH="951782400")
        rivals = json.loads(RIVALS.read_text())
        for fragment in ("tiny.gguf", "f00d", "d1ce", "ab12", "ggml 0.25.3", "bootstrap over blocks", "2000-02-29T00:00:00Z", rivals["model"],
                         rivals["model_fingerprint"], rivals["text_sha256"], hashlib.sha256(RIVALS.read_bytes()).hexdigest()):
            self.assertIn(fragment, page)
        ours, theirs = json.loads(embedded(page))["sources"]
        self.assertEqual([(p["label"], p["group"], p["bits"], p["kl"]) for p in ours["points"]],
                         [("noise-floor", "floor", 16, 0.003), ("spectral-2", "spectral", 2.125, 0.014),
                          ("oscar-published", "int2", 2.5, 0.19), ("kivi2-g32", "rival", 3, 0.11)])
        self.assertEqual(ours["depth"]["ranges"], ["1024-2047", "2048-4094"])
        self.assertEqual([s["kl"] for s in ours["depth"]["series"]][1], [0.0112, 0.0154])
        self.assertEqual(len(theirs["points"]), len(rivals["variants"]))
        for point, variant in zip(theirs["points"], rivals["variants"]):
            self.assertEqual(point["bits"], variant["bits_per_element"])
            self.assertAlmostEqual(point["kl"], variant["kl_mean"], delta=1e-4 * variant["kl_mean"])
            self.assertIn(f"<td>{variant['name']}</td>", page)
        self.assertEqual({p["group"] for p in theirs["points"]}, {"spectral", "int2", "rival"})

    @unittest.skipUnless(shutil.which("node"), "no node")
    def test_plots_show_every_measurement(self):
        page = self.page(self.write("eval.json", evaluation()), RIVALS)
        charts = plots(page)
        self.assertEqual(set(charts), {"rate-0", "depth-0"})
        rate, depth = charts["rate-0"], charts["depth-0"]
        shown = {(point["name"], point["x"], point["y"]) for s in rate["data"]["datasets"] if s.get("named") for point in s["data"]}
        sources = json.loads(embedded(page))["sources"]
        self.assertEqual(shown, {(p["label"], p["bits"], p["kl"]) for s in sources for p in s["points"] if p["group"] != "floor"})
        whiskers = [s for s in rate["data"]["datasets"] if s.get("whiskers")]
        self.assertTrue(all(len(s["data"]) % 3 == 0 for s in whiskers))
        self.assertIn({"x": 2.125, "y": 0.0168}, [point for s in whiskers for point in s["data"]])
        for axis, unit in (("x", "bits"), ("y", "nats")):
            self.assertIn(unit, rate["options"]["scales"][axis]["title"]["text"])
        self.assertEqual(depth["data"]["labels"], ["1024-2047", "2048-4094"])
        self.assertEqual([s["label"] for s in depth["data"]["datasets"]], list(METHODS))
        self.assertIn("tokens", depth["options"]["scales"]["x"]["title"]["text"])

    def test_it_loads_nothing(self):
        page = self.page(PROSE)
        self.assertIn("default-src 'none'", page)
        library = page.split("<script>")[1].split("</script>")[0]
        self.assertRegex(library, r"Chart\.js v\d")
        self.assertNotIn("sourceMappingURL", page)
        rest = page.replace(library, "")
        self.assertNotRegex(rest, r"https?:|//[a-z]+\.|\bsrc=|\bhref=|url\(|@import|\bfetch\(|XMLHttpRequest")
        self.assertNotRegex(page, r"<(img|link|iframe|object|embed|base)\b")

    def test_names_cannot_become_markup(self):
        wicked = evaluation()
        wicked["model"] = wicked["texts"][0]["name"] = "</script><b onclick=x>&amp;"
        wicked["rows"][2]["method"] = '"><script>alert(1)</script>'
        page = self.page(self.write("wicked.json", wicked), "--title", "<i>")
        self.assertNotRegex(page, r"<b onclick|<i>|<script>alert")
        self.assertEqual(page.count("</script>"), 3)
        self.assertEqual(json.loads(embedded(page))["sources"][0]["label"], wicked["model"] + ", " + wicked["model"])

    def test_several_texts_stand_side_by_side(self):
        self.assertEqual(len(json.loads(embedded(self.page(PROSE, CODE)))["sources"]), 2)
        done = oscar("report", PROSE, "-o", "-")
        self.assertTrue(done.stdout.startswith("<!doctype html>"))

    def refused(self, words, *fragments):
        done = oscar("report", *words, "-o", self.output)
        self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        for fragment in fragments:
            self.assertIn(fragment, done.stderr)
        self.assertFalse(self.output.exists())

    def test_bad_input_is_refused_by_name(self):
        self.refused([], "nothing to report")
        self.refused([self.folder / "missing.json"], "missing.json")
        self.refused([self.folder], "not a regular file")
        self.refused([self.write("half.json", json.dumps(evaluation())[:500])], "half.json", "not valid JSON")
        self.refused([self.write("list.json", "[1, 2]")], "list.json", "is not a result of oscar")
        self.refused([self.write("other.json", {"rows": []})], "other.json", "is not a result of oscar")
        self.refused(["--oscar", PROSE], PROSE.name)
        large = self.write("large.json", "")
        with open(large, "r+b") as file:
            file.truncate(100 << 20)
        self.refused([large], "large.json", "is it the right file?")
        good = evaluation()
        for name, row, value, fragment in (("kl_mean", 4, -0.1, "cannot be negative"), ("kl_mean", 4, "small", "not a number"),
                                           ("kl_mean_ci", 4, [2, 1], "is no interval"), ("kl_mean_ci", 4, [1], "two numbers"),
                                           ("same_top", 4, 90, "0 to 1"), ("bits_per_element", 4, 0, "outside"), ("kl_p99", 4, None, "not a number"),
                                           ("positions", 4, -1, "positions"), ("method", 4, 7, "not a string")):
            bad = copy.deepcopy(good)
            bad["rows"][row][name] = value
            self.refused([self.write("bad.json", bad)], "bad.json", name if name != "method" else "'method'", fragment)
        for key in ("oscar", "model", "texts", "context"):
            bad = copy.deepcopy(good)
            del bad[key]
            self.refused([self.write("bad.json", bad)], "bad.json", f"'{key}'")
        self.refused([self.write("bad.json", {**good, "rows": []})], "holds no KL")
        bad = json.loads(PROSE.read_text())
        bad["variants"][0]["kl_median"] = {}
        self.refused([self.write("bad.json", bad)], "bad.json", "kl_median", "not a number")
        # One bad file among good ones spoils the page; nothing is written.
        self.refused([PROSE, self.write("bad.json", bad)], "bad.json")


class Card(unittest.TestCase):
    def test_bad_input_is_refused_by_name(self):
        for words, fragment in (([], "no artifact was named"), (["missing"], "missing"), ([PROSE], PROSE.name)):
            done = oscar("card", *words)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn(fragment, done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
