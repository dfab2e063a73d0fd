"use strict";
/* The charts: uPlot with hover, zoom, smoothing, intervals, marks at events, and a click that opens a step's tokens. */
const Curves = (() => {
  const source = document.getElementById("data-curves");
  if (!source) return { plots: [] };
  const groups = JSON.parse(source.textContent);
  const tokens = document.getElementById("data-tokens");
  const completions = tokens ? JSON.parse(tokens.textContent).completions : [];
  const withTokens = [...new Set(completions.filter((c) => c.t).map((c) => c.s))].sort((a, b) => a - b);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const plots = [];
  const HEIGHT = 185; // pixels
  const HERO = 270;
  const SHOWN = 6; // charts that are open; the others are behind a button
  /* Palette of the page in the dark: the same hues as in the light, lighter. */
  const DARK = {
    "#0173b2": "#4fb3e8", "#de8f05": "#f2b134", "#029e73": "#3fcf9b", "#d55e00": "#ff8f4d", "#cc78bc": "#e3a0d8",
    "#ca9161": "#dcb48c", "#fbafe4": "#ffc9ec", "#949494": "#b5b5b5", "#ece133": "#f1ea6a", "#56b4e9": "#8fd0f5",
  };
  let smoothing = 1;
  let zooming = false;

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function format(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    const text = value !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
    return text.replaceAll("-", "−");
  }

  /* Mean of the values in a window of `smoothing` points around each; what is null stays null. */
  function smooth(values) {
    if (smoothing < 2) return values;
    const half = Math.floor(smoothing / 2);
    return values.map((value, i) => {
      if (value === null) return null;
      const near = values.slice(Math.max(0, i - half), i + half + 1).filter((v) => v !== null);
      return near.reduce((sum, v) => sum + v, 0) / near.length;
    });
  }

  /* uPlot's columns: the steps, each setting's mean, then the thin lines: what was smoothed, or each seed. */
  function columns(chart) {
    const thin = chart.series.flatMap((one) => one.seeds || [smoothing > 1 ? one.y : one.y.map(() => null)]);
    return [chart.x, ...chart.series.map((one) => smooth(one.y)), ...thin];
  }

  function visibleEnds(chart, group, low, high) {
    const inside = chart.x.map((x, i) => i).filter((i) => chart.x[i] >= low && chart.x[i] <= high);
    const values = [];
    chart.series.forEach((one, k) => {
      if (group.hidden.has(k)) return;
      for (const column of [one.y, one.low, one.high, ...(one.seeds || [])]) {
        if (column) values.push(...inside.map((i) => column[i]).filter((v) => v !== null && (!chart.log || v > 0)));
      }
    });
    return values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
  }

  /* Intervals: bars at few points, else a band; hollow rings where an estimate is saturated; lines at events. */
  function decorate(u, chart, group) {
    const { ctx, bbox } = u;
    const at = (value, axis) => u.valToPos(value, axis, true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineWidth = devicePixelRatio;
    ctx.strokeStyle = color("--soft");
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const [step, , kind] of group.events) {
      if (kind !== "machine") line(ctx, at(step, "x"), bbox.top, at(step, "x"), bbox.top + bbox.height);
    }
    ctx.setLineDash([]);
    chart.series.forEach((one, k) => {
      if (group.hidden.has(k)) return;
      ctx.strokeStyle = ctx.fillStyle = ink(group.settings[k]);
      const known = chart.x.map((x, i) => i).filter((i) => one.low && one.low[i] !== null && one.high[i] !== null);
      const y = (value) => at(chart.log ? Math.max(value, 1e-300) : value, "y");
      if (known.length && known.length <= 30) {
        for (const i of known) {
          const x = at(chart.x[i], "x") + 3 * devicePixelRatio * k; // bars of several settings stand side by side
          line(ctx, x, y(one.low[i]), x, y(one.high[i]));
        }
      } else if (known.length) {
        ctx.globalAlpha = 0.18;
        ctx.beginPath();
        for (const i of known) ctx.lineTo(at(chart.x[i], "x"), y(one.high[i]));
        for (const i of known.reverse()) ctx.lineTo(at(chart.x[i], "x"), y(one.low[i]));
        ctx.fill();
        ctx.globalAlpha = 1;
      }
      for (const i of one.hollow || []) {
        ctx.fillStyle = color("--page");
        ctx.beginPath();
        ctx.arc(at(chart.x[i], "x"), y(one.y[i]), 4 * devicePixelRatio, 0, 2 * Math.PI);
        ctx.fill();
        ctx.stroke();
      }
    });
    ctx.restore();
    ctx.fillStyle = color("--soft");
    for (const step of withTokens) {
      const x = at(step, "x");
      if (x >= bbox.left && x <= bbox.left + bbox.width) ctx.fillRect(x - 1, bbox.top + bbox.height - 5 * devicePixelRatio, 2, 5 * devicePixelRatio);
    }
  }

  function line(ctx, x0, y0, x1, y1) {
    ctx.beginPath();
    ctx.moveTo(x0, y0);
    ctx.lineTo(x1, y1);
    ctx.stroke();
  }

  function color(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  const ink = (setting) => (dark.matches ? DARK[setting.color] || setting.color : setting.color);

  /* Width of the y axis: its longest label, so that none is cut. */
  function widthOf(u, labels) {
    return 22 + 7.2 * Math.max(3, ...(labels || []).map((text) => String(text || "").length));
  }

  /* Lines of a logarithmic axis: powers of ten, with 2 and 5 between where there are few. */
  function logSplits(u, axis, low, high) {
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const steps = last - first > 3 ? [1] : [1, 2, 5];
    const found = [];
    for (let e = first; e <= last; e += 1) for (const m of steps) found.push(m * 10 ** e);
    return found.filter((v) => v >= low * 0.999 && v <= high * 1.001);
  }

  function axesOf(log) {
    const axis = { stroke: color("--soft"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid"), width: 1 } };
    const whole = [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6].map((e) => n * 10 ** e)).sort((a, b) => a - b);
    const y = { ...axis, size: widthOf, values: (plot, ticks) => ticks.map((v) => (v === null ? "" : format(v))) };
    if (log) y.splits = logSplits;
    if (log) y.filter = (plot, splits) => splits;
    return [{ ...axis, size: 32, incrs: whole }, y];
  }

  function says(chart, group, index) {
    if (index === null || index === undefined) return "";
    const step = chart.x[index];
    const parts = chart.series.map((one, k) => {
      if (group.hidden.has(k) || one.y[index] === null) return null;
      const ends = one.low && one.low[index] !== null ? ` (${format(one.low[index])} to ${format(one.high[index])})` : "";
      const name = group.settings.length > 1 ? `${group.settings[k].label} ` : "";
      return `${name}${format(one.y[index])}${ends}${(one.hollow || []).includes(index) ? " saturated" : ""}`;
    }).filter((part) => part !== null);
    const happened = group.events.filter(([at]) => at === step).map(([, text]) => ` · ${text}`).join("");
    return `step ${format(step)}: ${parts.join(", ")}${happened}`;
  }

  /* The tokens of the step nearest to `step` that the page has; of a run of the setting `k` where one has them. */
  function open(step) {
    window.location.hash = `#step-${Math.round(step)}`;
    window.dispatchEvent(new Event("openstep"));
  }

  function draw(place, chart, group) {
    const few = chart.x.length <= 12;
    const named = group.settings.map((setting) => ({
      label: setting.label, stroke: ink(setting), width: 2, spanGaps: true, points: { show: few, size: 6, fill: ink(setting) },
    }));
    const thin = chart.series.flatMap((one, k) => (one.seeds || [one.y]).map(() => ({
      stroke: `${ink(group.settings[k])}66`, width: 1, spanGaps: true, points: { show: false },
    })));
    let down = null;
    const u = new uPlot({
      width: place.clientWidth, height: HEIGHT, legend: { show: false },
      cursor: {
        y: false, drag: { x: true, y: false },
        sync: { key: "steps", scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      },
      scales: {
        x: { time: false, range: (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: {
          distr: chart.log ? 3 : 1,
          range: (plot) => {
            const [low, high] = visibleEnds(chart, group, plot.scales.x.min ?? -Infinity, plot.scales.x.max ?? Infinity);
            return chart.log ? uPlot.rangeLog(low, high, 10, false) : uPlot.rangeNum(low, high, 0.1, true);
          },
        },
      },
      axes: axesOf(chart.log),
      series: [{}, ...named, ...thin],
      hooks: {
        draw: [(plot) => decorate(plot, chart, group)],
        setCursor: [(plot) => { place.nextSibling.textContent = says(chart, group, plot.cursor.left < 0 ? null : plot.cursor.idx); }],
        setScale: [(plot, key) => key === "x" && zoomAll(plot)],
      },
    }, columns(chart), place);
    u.over.addEventListener("mousedown", (event) => { down = event.clientX; });
    u.over.addEventListener("click", (event) => {
      if (down !== null && Math.abs(event.clientX - down) < 4 && u.cursor.idx !== null) open(chart.x[u.cursor.idx]);
    });
    return u;
  }

  /* Every chart shows the steps that the reader zoomed in to. */
  function zoomAll(from) {
    if (zooming) return;
    zooming = true;
    const { min, max } = from.scales.x;
    for (const { u } of plots) if (u && u !== from) u.setScale("x", { min, max });
    zooming = false;
  }

  function reset() {
    const all = groups.flatMap((group) => group.charts.flatMap((chart) => chart.x));
    zooming = true;
    for (const { u } of plots) if (u) u.setScale("x", { min: Math.min(...all), max: Math.max(...all) });
    zooming = false;
  }

  /* Left and right move from step to step, Enter opens the step's tokens. */
  function onKey(event, plot) {
    const { u, chart } = plot;
    const moves = { ArrowRight: 1, ArrowLeft: -1 };
    if (!u) return;
    const now = u.cursor.idx ?? -1;
    if (moves[event.key]) {
      event.preventDefault();
      const next = Math.max(0, Math.min(chart.x.length - 1, u.cursor.left < 0 && now < 0 ? 0 : now + moves[event.key]));
      u.setCursor({ left: u.valToPos(chart.x[next], "x"), top: 10 });
    } else if (event.key === "Enter" && now >= 0) {
      open(chart.x[now]);
    } else if (event.key === "Escape") {
      reset();
    }
  }

  function legend(group) {
    const row = make("p", "settings");
    group.settings.forEach((setting, k) => {
      const button = make("button", "setting");
      const swatch = make("span", "line");
      swatch.style.setProperty("background", setting.color);
      button.append(swatch, setting.label);
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        if (!group.hidden.delete(k)) group.hidden.add(k);
        button.setAttribute("aria-pressed", String(!group.hidden.has(k)));
        redraw();
      });
      row.append(button);
    });
    return row;
  }

  function build(place) {
    for (const group of groups) {
      group.hidden = new Set();
      if (group.name) place.append(make("h3", "", group.name));
      if (group.settings.length > 1) place.append(legend(group));
      const grid = make("div", "charts");
      const more = make("details", "more");
      const rest = make("div", "charts");
      more.append(make("summary", "", `${group.charts.length - SHOWN} more curves`), rest);
      more.addEventListener("toggle", resize);
      group.charts.forEach((chart, n) => {
        const box = make("div", "chart");
        const host = make("div", "plot");
        host.tabIndex = 0;
        host.setAttribute("role", "group");
        host.setAttribute("aria-label", `${chart.title} by step: arrow keys move, Enter opens the step's tokens`);
        const readout = make("p", "readout");
        readout.setAttribute("aria-live", "polite");
        box.append(make("h3", "", chart.title + (chart.log ? " (log scale)" : "")), host, readout);
        const plot = { chart, group, host, u: null };
        host.addEventListener("keydown", (event) => onKey(event, plot));
        plots.push(plot);
        (n < SHOWN ? grid : rest).append(box);
      });
      place.append(grid);
      if (group.charts.length > SHOWN) place.append(more);
      if (group.still.length) place.append(make("p", "small", `Not drawn, because they do not vary beyond rounding: ${group.still.join(", ")}.`));
    }
  }

  function resize() {
    for (const { u, host } of plots) if (u && host.clientWidth) u.setSize({ width: host.clientWidth, height: HEIGHT });
    if (hero.u) hero.u.setSize({ width: hero.host.clientWidth, height: HERO });
  }

  /* Reward and gradient norm on one axis of steps, with the events named. */
  const hero = { host: null, u: null };
  const KINDS = ["cause", "spike", "training", "machine"];
  const short = (text) => text.split(" · ")[0].replace(/, first of .*$/, "").slice(0, 44);

  /* Names what happened, what says most of the training first, from the top; what the machine did stands at the bottom, without a line. */
  function nameEvents(u, events) {
    const { ctx, bbox } = u;
    const pixel = devicePixelRatio;
    const rows = { top: [[], [], []], bottom: [[]] };
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color("--soft");
    for (const [step, text, kind] of [...events].sort((a, b) => KINDS.indexOf(a[2]) - KINDS.indexOf(b[2]))) {
      const x = u.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const machine = kind === "machine";
      const label = machine ? `machine: ${short(text)}` : short(text);
      ctx.font = `${kind === "cause" ? "bold " : ""}${11 * pixel}px system-ui, sans-serif`;
      ctx.setLineDash(kind === "cause" || machine ? [] : [2 * pixel, 3 * pixel]);
      line(ctx, x, machine ? bbox.top + bbox.height - 8 * pixel : bbox.top, x, bbox.top + bbox.height);
      const width = ctx.measureText(label).width;
      const gap = 4 * pixel;
      const fits = x + gap + width < bbox.left + bbox.width; // else the text ends at the line
      const left = Math.max(bbox.left, fits ? x + gap : x - gap - width);
      const right = left + width + 2 * gap;
      const taken = rows[machine ? "bottom" : "top"];
      const row = taken.findIndex((spans) => spans.every(([from, to]) => right < from || to < left));
      if (row < 0) continue; // no room: the line stays, and pointing at it says what it is
      taken[row].push([left, right]);
      ctx.fillText(label, left, machine ? bbox.top + bbox.height - 6 * pixel : bbox.top + (12 + 13 * row) * pixel);
    }
    ctx.restore();
  }

  function drawHero() {
    const root = document.getElementById("hero");
    if (!root) return;
    const group = groups[0];
    const found = ["reward", "gradient norm before clipping"].map((title) => group.charts.find((chart) => chart.title === title));
    const shown = found.filter(Boolean);
    if (!shown.length) return;
    if (!hero.host) {
      const box = make("div", "chart");
      const title = make("p", "title");
      shown.forEach((chart, n) => {
        const side = shown.length > 1 ? (n ? " (right)" : " (left)") : "";
        title.append(make("b", n ? "second-line" : "first-line", chart.title), `${side}${n < shown.length - 1 ? " and " : ""}`);
      });
      title.append(" by step. Click on a step to see its tokens.");
      hero.host = make("div", "plot");
      hero.host.tabIndex = 0;
      hero.host.setAttribute("role", "group");
      hero.host.setAttribute("aria-label", "reward and gradient norm by step: arrow keys move, Enter opens the step's tokens");
      box.append(title, hero.host, make("p", "readout"));
      root.append(box);
      hero.host.addEventListener("keydown", (event) => onKey(event, { u: hero.u, chart: shown[0], group, host: hero.host }));
    }
    if (hero.u) hero.u.destroy();
    const names = ["y", "g"];
    const x = [...new Set(shown.flatMap((chart) => chart.x))].sort((a, b) => a - b);
    const data = [x];
    const series = [{}];
    shown.forEach((chart, n) => chart.series.forEach((one, k) => {
      const at = new Map(chart.x.map((step, i) => [step, one.y[i]]));
      data.push(x.map((step) => at.get(step) ?? null));
      const single = chart.series.length < 2;
      const stroke = single ? color(n ? "--second" : "--main") : ink(group.settings[k]);
      series.push({ stroke, scale: names[n], width: n ? 1.4 : 2.2, dash: n && !single ? [5, 4] : [], spanGaps: true, points: { show: false } });
    }));
    const scales = { x: { time: false, range: (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) } };
    const axes = [axesOf(false)[0]];
    shown.forEach((chart, n) => {
      scales[names[n]] = {
        distr: chart.log ? 3 : 1,
        range: () => {
          const [low, high] = visibleEnds(chart, { hidden: new Set() }, -Infinity, Infinity);
          return chart.log ? uPlot.rangeLog(low, high, 10, false) : uPlot.rangeNum(low, high + 0.25 * (high - low), 0.1, true);
        },
      };
      const axis = axesOf(chart.log)[1];
      axes.push({ ...axis, scale: names[n], side: n ? 1 : 3, stroke: color(n ? "--second" : "--main"), grid: n ? { show: false } : axis.grid });
    });
    const readout = (u) => (u.cursor.left < 0 || u.cursor.idx === null ? "" : `step ${format(x[u.cursor.idx])}: ${shown.map((chart, n) => {
      const offset = 1 + shown.slice(0, n).reduce((sum, one) => sum + one.series.length, 0);
      return `${chart.title} ${chart.series.map((_, k) => format(u.data[offset + k][u.cursor.idx])).join(", ")}`;
    }).join(" · ")}${group.events.filter(([at]) => at === x[u.cursor.idx]).map(([, text]) => ` · ${text}`).join("")}`);
    hero.u = new uPlot({
      width: hero.host.clientWidth, height: HERO, legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } }, scales, axes, series,
      hooks: {
        draw: [(u) => nameEvents(u, group.events)],
        setCursor: [(u) => { hero.host.nextSibling.textContent = readout(u); }],
      },
    }, data, hero.host);
    hero.u.over.addEventListener("click", () => hero.u.cursor.idx !== null && open(x[hero.u.cursor.idx]));
  }

  function redraw() {
    drawHero();
    const zoomed = plots.find(({ u }) => u)?.u.scales.x;
    for (const plot of plots) {
      if (plot.u) plot.u.destroy();
      plot.u = draw(plot.host, plot.chart, plot.group);
      plot.u.over.setAttribute("data-chart", plot.chart.title);
      plot.group.settings.forEach((_, k) => plot.group.hidden.has(k) && hide(plot, k));
    }
    if (zoomed && Number.isFinite(zoomed.min)) zoomAll({ scales: { x: zoomed } });
    else reset();
  }

  function hide(plot, k) {
    plot.u.setSeries(k + 1, { show: false });
    let at = plot.chart.series.length + 1;
    plot.chart.series.forEach((one, n) => {
      const count = (one.seeds || [1]).length;
      for (let i = 0; n === k && i < count; i += 1) plot.u.setSeries(at + i, { show: false });
      at += count;
    });
  }

  const place = document.getElementById("curves");
  build(place);
  const slider = document.getElementById("smoothing");
  slider.addEventListener("input", () => {
    smoothing = Number(slider.value);
    slider.nextElementSibling.textContent = smoothing > 1 ? `mean of ${smoothing} points` : "none";
    for (const { u, chart } of plots) u.setData(columns(chart), false);
    for (const { u } of plots) u.redraw();
  });
  document.getElementById("unzoom").addEventListener("click", reset);
  dark.addEventListener("change", redraw);
  requestAnimationFrame(() => setTimeout(() => {
    redraw();
    let width = place.clientWidth;
    new ResizeObserver(() => {
      if (Math.abs(place.clientWidth - width) < 2) return;
      width = place.clientWidth;
      resize();
    }).observe(place);
    document.documentElement.dataset.curves = "drawn";
  }));
  /* Numbers of the same charts as of now; false if there are others, which need the page anew. */
  function refresh(newer) {
    const titles = (some) => JSON.stringify(some.map((group) => group.charts.map((chart) => chart.title)));
    if (titles(newer) !== titles(groups)) return false;
    newer.forEach((group, n) => {
      groups[n].events = group.events;
      group.charts.forEach((chart, k) => Object.assign(groups[n].charts[k], chart));
    });
    redraw();
    return true;
  }

  return { plots, groups, refresh };
})();
