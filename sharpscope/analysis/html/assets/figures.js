"use strict";
/* Figures whose values can be read: drawn when they come into view, in the page's colours; printing; tables of values. */
(() => {
  const plots = JSON.parse(document.getElementById("data-plots").textContent);
  const MOST_ROWS = 400;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const LEGEND = 44; // room for the legend under the panels [pixels]

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  /* The plot's layout with the page's colours; on a dark page dark lines are lighter. */
  function dressed(plot, width) {
    const text = colour("--text");
    const grid = colour("--line");
    const layout = structuredClone(plot.layout);
    const below = plot.data.some((trace) => trace.showlegend) ? LEGEND : 4;
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis/.test(key)) Object.assign(layout[key], { gridcolor: grid, linecolor: grid, zerolinecolor: grid });
    }
    Object.assign(layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: plot.height + below, width,
      font: { color: text, size: 12, family: "system-ui, sans-serif" }, margin: { t: 4, r: 12, b: below - 4, l: 66 },
      legend: { orientation: "h", y: 0, yanchor: "top", x: 0 },
      hoverlabel: { bgcolor: colour("--card"), font: { color: text } },
    });
    const traces = structuredClone(plot.data);
    const lighter = dark.matches ? { "#000000": text, "#0072b2": "#3f9bdc", "#777777": "#a0a6ad" } : {};
    for (const trace of traces) {
      for (const part of [trace.line, trace.marker]) if (part && lighter[part.color]) part.color = lighter[part.color];
    }
    return [traces, layout];
  }

  function draw(figure) {
    const plot = plots[figure.dataset.plot];
    const place = figure.querySelector(".plot");
    figure.classList.add("drawn");
    Plotly.react(place, ...dressed(plot, place.clientWidth), { displayModeBar: false, displaylogo: false });
  }

  function values(plot) {
    const table = document.createElement("table");
    const add = (cells, tag) => {
      const row = table.insertRow();
      for (const cell of cells) {
        const place = document.createElement(tag);
        if (tag === "th") place.scope = "col";
        place.textContent = typeof cell === "number" ? String(Number(cell.toPrecision(5))).replace("-", "−") : cell ?? "–";
        row.append(place);
      }
    };
    add(["line", "x", "y", "low", "high"], "th");
    let left = MOST_ROWS;
    const title = (trace) => {
      const axis = plot.layout[`yaxis${trace.yaxis.slice(1)}`].title.text.replace(/<br>/g, " ");
      return `${plain(trace.name) || "line"}: ${plain(axis)}`;
    };
    for (const trace of plot.data) {
      if (trace.fill) continue;
      trace.x.forEach((x, i) => {
        if (left > 0) add([title(trace), x, trace.y[i], ...(trace.customdata ? trace.customdata[i] : ["", ""])], "td");
        left -= 1;
      });
    }
    if (left < 0) add([`${-left} rows more`, "", "", "", ""], "td");
    return table;
  }

  /* plotly's escapes undone: its labels hold &lt; for <. */
  function plain(text) {
    return text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  }

  const figures = [...document.querySelectorAll("figure[data-plot]")];
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !entry.target.classList.contains("drawn")) draw(entry.target);
    }
  }, { rootMargin: "200px" });
  for (const figure of figures) {
    watcher.observe(figure);
    const details = figure.querySelector("details.values");
    details.hidden = false;
    details.addEventListener("toggle", () => {
      const place = details.querySelector(".scroll");
      if (details.open && !place.children.length) place.append(values(plots[figure.dataset.plot]));
    });
  }
  const again = () => figures.filter((figure) => figure.classList.contains("drawn") && figure.offsetParent).forEach(draw);
  dark.addEventListener("change", again);
  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(again, 150);
  });

  /* On paper everything is open but the long tables. */
  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details.verdict:not([open]), details.spike:not([open])")];
    for (const details of closed) details.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const details of closed) details.open = false;
  });
})();
