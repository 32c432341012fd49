"""The page of `oscar report`, as tests look at it: its data, and what its script gives to Chart.js."""
import json
import re
import subprocess

from cli import SOURCE

# Runs the page's script with a document that has the page's canvases and choosers; prints the charts' configurations.
HARNESS = """
const [data, page, elements] = JSON.parse(require('fs').readFileSync(0, 'utf8'));
const made = [];
class Chart { constructor(canvas, config) { made.push([canvas.id, config]); } destroy() {} }
Chart.defaults = {color: '', borderColor: ''};
const canvases = elements.canvases.map(([id, plot, index]) => ({id, dataset: {plot, index}}));
const choosers = elements.choosers.map(([id, value]) => ({value, dataset: {for: id}, addEventListener() {}}));
const document = {documentElement: {}, getElementById: () => ({textContent: data}),
  querySelector: (q) => choosers.find((c) => q.includes('"' + c.dataset.for + '"')) ?? null,
  querySelectorAll: (q) => q.startsWith('canvas') ? canvases : choosers};
const getComputedStyle = () => ({getPropertyValue: (name) => name});
const matchMedia = () => ({addEventListener() {}});
eval(page);
console.log(JSON.stringify(made, (key, value) => typeof value === 'number' && !isFinite(value) ? null : value));
"""


def embedded(page):
    return re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL).group(1)


def plots(page):
    """Canvas id -> configuration that the page's script gives to Chart.js."""
    elements = {"canvases": re.findall(r'<canvas id="([^"]+)" data-plot="(\w+)" data-index="(\d+)"', page),
                "choosers": [(name, re.search(r'value="([^"]+)" selected', options).group(1))
                             for name, options in re.findall(r'<select data-for="([^"]+)">(.*?)</select>', page)]}
    script = (SOURCE / "tools" / "oscar" / "report" / "page.js").read_text()
    done = subprocess.run(["node", "-e", HARNESS], input=json.dumps([embedded(page), script, elements]), capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return dict(json.loads(done.stdout))
