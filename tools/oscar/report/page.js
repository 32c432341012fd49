// The plots of `oscar report`: Chart.js draws them from the JSON in the page.
'use strict';
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const GROUPS = {spectral: 'OSCAR', int2: 'published codec', rival: 'other methods', floor: 'noise floor'};
  const SHAPES = ['circle', 'triangle', 'rect', 'rectRot', 'star', 'cross'];
  const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
  const LINES = ['#1f6fd0', '#d9741a', '#3a9d5d', '#a855a0', '#b08a1e', '#2a9d9d', '#cf4a6b', '#7a74d0'];
  const DIGITS = ['--empty', '#b9d4f4', '#6fa8e8', '#2f74c8', '#123f7d'];  // 0 .. 4 base-4 digits
  const css = (name) => name.startsWith('--') ? getComputedStyle(document.documentElement).getPropertyValue(name).trim() : name;
  const short = (value) => Number(value.toPrecision(3)).toString();

  // A decade has ticks at 1, 2 and 5; the others have no grid line either.
  const decade = (value) => {
    const lead = Number((value / 10 ** Math.floor(Math.log10(value) + 1e-9)).toPrecision(6));
    return [1, 2, 5].includes(lead) ? short(value) : null;
  };
  const axis = (text, more) => ({title: {display: true, text}, ...more});
  const bits = [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 32];
  const log = (text) => axis(text, {type: 'logarithmic', ticks: {callback: decade}});

  // Writes each point's name where there is room for it; the first data sets come first.
  const names = {
    id: 'names',
    afterDatasetsDraw(chart) {
      const {ctx, chartArea: area} = chart;
      const shown = chart.data.datasets.map((set, index) => ({set, index})).filter(({set, index}) => set.named && chart.isDatasetVisible(index));
      const boxes = [];
      const free = (b) => b.x > area.left && b.x + b.w < area.right && b.y > area.top && b.y + b.h < area.bottom &&
          boxes.every((o) => b.x + b.w < o.x || o.x + o.w < b.x || b.y + b.h < o.y || o.y + o.h < b.y);
      for (const {index} of shown) {
        for (const p of chart.getDatasetMeta(index).data) boxes.push({x: p.x - 4, y: p.y - 4, w: 8, h: 8});
      }
      ctx.save();
      ctx.font = '11px system-ui, sans-serif';
      ctx.fillStyle = Chart.defaults.color;
      ctx.textBaseline = 'top';
      for (const {set, index} of shown) {
        chart.getDatasetMeta(index).data.forEach((p, i) => {
          const text = set.data[i].name, w = ctx.measureText(text).width, h = 11;
          const places = [[7, -6], [-7 - w, -6], [-w / 2, -18], [-w / 2, 7], [6, -17], [6, 6], [-6 - w, -17], [-6 - w, 6]];
          const place = places.map(([dx, dy]) => ({x: p.x + dx, y: p.y + dy, w, h})).find(free);
          if (!place) return;
          boxes.push(place);
          ctx.fillText(text, place.x, place.y);
        });
      }
      ctx.restore();
    }
  };

  function rate(canvas) {
    const sets = [], several = data.sources.length > 1;
    const xs = data.sources.flatMap((s) => s.points.filter((p) => p.group !== 'floor' && p.bits !== null).map((p) => p.bits));
    for (const group of Object.keys(GROUPS)) {
      data.sources.forEach((source, index) => {
        const points = source.points.filter((p) => p.group === group && p.kl > 0 && (p.bits !== null || group === 'floor'));
        if (points.length === 0) return;
        const colour = css('--' + group), label = GROUPS[group] + (several ? ': ' + source.label : '');
        if (group === 'floor') {
          const y = points[0].kl;
          sets.push({label, data: [{x: Math.min(2, ...xs), y}, {x: Math.max(3, ...xs), y}], showLine: true, pointRadius: 0, borderColor: colour,
                     borderWidth: 1.5, borderDash: [5, 4]});
          return;
        }
        points.sort((a, b) => a.bits - b.bits);
        sets.push({label, named: true, data: points.map((p) => ({x: p.bits, y: p.kl, name: p.label, low: p.low, high: p.high})),
                   showLine: group === 'spectral', borderColor: colour, backgroundColor: colour, borderWidth: 2,
                   pointRadius: group === 'spectral' ? 6 : 4, pointStyle: SHAPES[index % SHAPES.length]});
        const whiskers = points.flatMap((p) => [{x: p.bits, y: Math.max(p.low, p.kl / 100)}, {x: p.bits, y: p.high}, {x: NaN, y: NaN}]);
        sets.push({label, whiskers: true, data: whiskers, showLine: true, pointRadius: 0, borderColor: colour, borderWidth: 1});
      });
    }
    return new Chart(canvas, {
      type: 'scatter', data: {datasets: sets}, plugins: [names],
      options: {
        scales: {x: axis('bits per coded element, metadata included', {
            type: 'logarithmic', ticks: {callback: short},
            afterBuildTicks: (scale) => { scale.ticks = bits.filter((b) => b >= scale.min && b <= scale.max).map((value) => ({value})); }}),
          y: log('KL(exact || method), mean, nats per token')},
        plugins: {
          legend: {labels: {usePointStyle: true, boxWidth: 8, boxHeight: 8, filter: (item) => !sets[item.datasetIndex].whiskers},
                   onClick: (event, item, legend) => {  // a set and its whiskers go together
                     const visible = legend.chart.isDatasetVisible(item.datasetIndex);
                     sets.forEach((set, i) => { if (set.label === item.text) legend.chart.setDatasetVisibility(i, !visible); });
                     legend.chart.update();
                   }},
          tooltip: {filter: (item) => item.dataset.named, callbacks: {
            label: ({raw, dataset}) => `${raw.name} (${dataset.label}): ${short(raw.x)} bits, KL ${short(raw.y)} [${short(raw.low)}, ${short(raw.high)}]`}}
        }
      }
    });
  }

  function lines(canvas, {labels, sets, x, y, legend}) {
    return new Chart(canvas, {
      type: 'line', data: {labels, datasets: sets},
      options: {interaction: {mode: legend ? 'index' : 'nearest', intersect: false}, scales: {x: axis(x, {ticks: {maxRotation: 0}}), y: log(y)},
                plugins: {legend: {display: legend}, tooltip: {callbacks: {label: ({dataset, raw}) => `${dataset.label}: ${short(raw)}`}}}}
    });
  }

  function depth(canvas, index) {
    const {ranges, series} = data.sources[index].depth;
    const counts = {}, others = LINES.slice(3);  // the first three are the groups' own
    const sets = series.map((s) => {
      const own = s.group !== 'rival', i = counts[s.group] = (counts[s.group] ?? -1) + 1;
      const colour = own ? css('--' + s.group) : others[i % others.length];
      return {label: s.label, data: s.kl.map((v) => v > 0 ? v : null), borderColor: colour, backgroundColor: colour, borderWidth: own ? 2.5 : 1.2,
              borderDash: s.group === 'floor' ? [5, 4] : DASHES[(own ? i : Math.floor(i / others.length)) % DASHES.length], pointRadius: own ? 4 : 2};
    });
    return lines(canvas, {labels: ranges, sets, x: 'position of the query in its sequence, tokens', y: 'KL, mean, nats per token', legend: true});
  }

  function error(canvas, index) {
    const layers = data.artifacts[index].layers;
    const line = (label, key, group) => ({label, data: layers.map((l) => l[key] > 0 ? 100 * l[key] : null), borderColor: css('--' + group),
                                          backgroundColor: css('--' + group), borderWidth: 2, pointRadius: 3});
    const sets = [line('codec of this artifact', 'noise', data.artifacts[index].codec), line('int2', 'int2', 'int2')];
    if (data.artifacts[index].codec === 'int2') sets.pop();
    return lines(canvas, {labels: layers.map((l) => l.layer), sets, x: 'layer', y: 'noise of coded keys, % of the layer\'s output (RMS)', legend: true});
  }

  function spectrum(canvas, index, choice) {
    const {heads, spectrum: unit} = data.artifacts[index];
    const numbers = [...new Set(heads.map((h) => h.layer))];
    const chosen = heads.filter((h) => choice === 'all' || h.layer === Number(choice));
    const sets = chosen.map((h) => {
      const t = numbers.length > 1 ? numbers.indexOf(h.layer) / (numbers.length - 1) : 0;
      const colour = choice === 'all' ? `hsl(${215 - 190 * t}, 65%, 52%)` : LINES[h.head % LINES.length];
      return {label: `layer ${h.layer}, head ${h.head}`, data: h.spectrum.map((v) => v > 0 ? v : null), borderColor: colour, backgroundColor: colour,
              borderWidth: choice === 'all' ? 1 : 2, pointRadius: 0};
    });
    const size = Math.max(0, ...chosen.map((h) => h.spectrum.length));
    return lines(canvas, {labels: Array.from({length: size}, (_, i) => i + 1), sets, x: 'coordinate in the calibrated basis', y: unit,
                          legend: choice !== 'all'});
  }

  function widths(canvas, index, choice) {
    const heads = data.artifacts[index].heads, runs = DIGITS.map(() => []);
    for (const head of heads) {
      const digits = head.widths[Number(choice)], y = `${head.layer}.${head.head}`;
      for (let begin = 0, end; begin < digits.length; begin = end) {
        for (end = begin; end < digits.length && digits[end] === digits[begin];) ++end;
        runs[Number(digits[begin])].push({x: [begin, end], y});
      }
    }
    const sets = runs.map((run, digits) => ({label: `${2 * digits} bits`, data: run, backgroundColor: css(DIGITS[digits]), grouped: false,
                                             barPercentage: 1, categoryPercentage: 1}));
    return new Chart(canvas, {
      type: 'bar', data: {labels: heads.map((h) => `${h.layer}.${h.head}`), datasets: sets.reverse()},
      options: {
        indexAxis: 'y', scales: {x: axis('coordinate in the calibrated basis, by descending variance', {max: Math.max(...heads.map((h) => h.spectrum.length))}),
                                 y: axis('layer.head', {grid: {display: false}})},
        plugins: {tooltip: {callbacks: {title: () => '', label: ({dataset, raw}) => `head ${raw.y}, coordinates ${raw.x[0] + 1}-${raw.x[1]}: ${dataset.label}`}}}
      }
    });
  }

  const kinds = {rate, depth, error, spectrum, widths};
  const charts = new Map();
  function draw(canvas) {
    const chooser = document.querySelector(`select[data-for="${canvas.id}"]`);
    charts.get(canvas)?.destroy();
    charts.set(canvas, kinds[canvas.dataset.plot](canvas, Number(canvas.dataset.index), chooser?.value));
  }
  function drawAll() {
    Chart.defaults.color = css('--text');
    Chart.defaults.borderColor = css('--rule');
    document.querySelectorAll('canvas[data-plot]').forEach(draw);
  }
  Object.assign(Chart.defaults, {animation: false, maintainAspectRatio: false});
  document.querySelectorAll('select[data-for]').forEach((s) => s.addEventListener('change', () => draw(document.getElementById(s.dataset.for))));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);
  drawAll();
})();
