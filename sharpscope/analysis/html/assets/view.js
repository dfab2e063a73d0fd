"use strict";
/* The token view: controls, the list of completions, two runs side by side, and links to a token. */
(() => {
  const PAGE = 12;
  const SIDE = 8;
  const { data, make } = Tokens;
  const by = (id) => document.getElementById(id);
  const list = by("completions");
  if (!list) return;
  const control = Object.fromEntries(
    ["color", "run", "step", "sort", "search", "layout", "prompt", "first", "second"].map((id) => [id, by(id)]));
  const texts = data.completions.map((c) => `${data.prompts[c.p]}\n${Tokens.wholeText(c)}`.toLowerCase());
  const scales = {};
  let shown = PAGE;
  let pinned = -1;

  function option(select, value, text) {
    const element = make("option", "", text);
    element.value = value;
    select.append(element);
  }

  function scale() {
    const name = control.color.value;
    if (!scales[name]) scales[name] = Colors.scale(name, data.completions);
    return scales[name];
  }

  function largest(completion) {
    let top = -1;
    for (const raw of (completion.c && scale().choice.of(completion)) || []) {
      const value = raw === null ? -1 : Math.abs(Colors.number(raw));
      if (value > top) top = value;
    }
    return scale().choice.unlikely && completion.c && completion.c.logp ? 1 - Math.exp(Math.min(...completion.c.logp)) : top;
  }

  const ORDERS = {
    chosen: ["as chosen", () => 0],
    largest: ["largest color value first", (a, b) => largest(b) - largest(a)],
    high: ["highest reward first", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
    low: ["lowest reward first", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity)],
    long: ["longest first", (a, b) => b.len - a.len],
    step: ["by step", (a, b) => a.s - b.s],
  };

  /* Numbers of the completions that the controls leave, in their order; the one a link points to comes first. */
  function chosen() {
    const wanted = control.search.value.trim().toLowerCase();
    const numbers = data.completions.map((_, i) => i).filter((i) => {
      const c = data.completions[i];
      return (control.run.value === "" || c.r === Number(control.run.value))
        && (control.step.value === "" || c.s === Number(control.step.value)) && texts[i].includes(wanted);
    });
    const order = ORDERS[control.sort.value][1];
    numbers.sort((a, b) => order(data.completions[a], data.completions[b]) || a - b);
    return pinned < 0 ? numbers : [pinned, ...numbers.filter((i) => i !== pinned)];
  }

  function drawList() {
    const numbers = chosen();
    list.className = "";
    list.replaceChildren(...numbers.slice(0, shown).map((i) => Tokens.card(i, scale())));
    by("count").textContent = `${numbers.length} of ${data.completions.length} completions`
      + (numbers.length > shown ? `, the first ${shown} shown` : "");
    by("more").hidden = numbers.length <= shown;
  }

  function drawSides() {
    const prompt = Number(control.prompt.value);
    list.className = "sides";
    const sides = [control.first, control.second].map((select) => {
      const column = make("div", "side");
      column.append(make("p", "side-name", `${data.runs[Number(select.value)]} (${data.methods[Number(select.value)]})`));
      const own = data.completions.map((_, i) => i)
        .filter((i) => data.completions[i].p === prompt && data.completions[i].r === Number(select.value));
      column.append(...own.slice(0, SIDE).map((i) => Tokens.card(i, scale())));
      if (!own.length) column.append(make("p", "small", "No completion of this prompt is in the file."));
      return [column, own.length];
    });
    list.replaceChildren(...sides.map(([column]) => column));
    by("count").textContent = `${sides[0][1]} and ${sides[1][1]} completions of this prompt`;
    by("more").hidden = true;
  }

  function draw() {
    const sides = control.layout.value === "sides";
    for (const element of document.querySelectorAll(".only-list")) element.hidden = sides;
    for (const element of document.querySelectorAll(".only-sides")) element.hidden = !sides;
    Colors.legend(by("legend"), control.color.value, scale());
    if (sides) drawSides();
    else drawList();
  }

  /* Prompts that completions of at least two runs answer, and the runs that do. */
  function shared() {
    const runs = new Map();
    for (const c of data.completions) {
      if (!runs.has(c.p)) runs.set(c.p, new Set());
      runs.get(c.p).add(c.r);
    }
    return [...runs].filter(([, who]) => who.size > 1);
  }

  function fillRuns() {
    const found = shared().find(([prompt]) => prompt === Number(control.prompt.value));
    const keep = [control.first.value, control.second.value];
    for (const select of [control.first, control.second]) select.replaceChildren();
    for (const run of found ? found[1] : []) {
      option(control.first, String(run), data.runs[run]);
      option(control.second, String(run), data.runs[run]);
    }
    const values = [...control.first.options].map((o) => o.value);
    control.first.value = values.includes(keep[0]) ? keep[0] : values[0] ?? "";
    control.second.value = values.includes(keep[1]) && keep[1] !== control.first.value
      ? keep[1] : values.find((value) => value !== control.first.value) ?? "";
  }

  function prepare() {
    for (const [name, choice] of Object.entries(Colors.CHOICES)) option(control.color, name, choice.label);
    const first = Object.keys(Colors.CHOICES).find((name) => Colors.scale(name, data.completions).some);
    control.color.value = first || "attribution";
    option(control.run, "", "all");
    data.runs.forEach((name, i) => option(control.run, String(i), name));
    option(control.step, "", "all");
    for (const step of [...new Set(data.completions.map((c) => c.s))].sort((a, b) => a - b)) option(control.step, String(step), String(step));
    for (const [name, [label]] of Object.entries(ORDERS)) option(control.sort, name, label);
    option(control.layout, "list", "one list");
    const prompts = shared();
    if (prompts.length) option(control.layout, "sides", "two runs, same prompt");
    for (const [prompt] of prompts) {
      const text = data.prompts[prompt].replace(/\s+/g, " ").trim();
      option(control.prompt, String(prompt), text.length > 90 ? `${text.slice(0, 40)} … ${text.slice(-46)}` : text);
    }
    fillRuns();
  }

  /* Show the completion at run, step, number, and focus the token at a position in it. */
  function open(run, step, number, place) {
    const at = data.completions.findIndex((c) => c.r === run && c.s === step && c.n === number);
    if (at < 0) return;
    control.layout.value = "list";
    control.run.value = control.step.value = control.search.value = "";
    pinned = at;
    draw();
    const box = list.querySelector(`[data-number="${at}"]`);
    box.scrollIntoView({ block: "center" });
    Tokens.focus(box, Tokens.indexOf(data.completions[at], place));
  }

  function follow() {
    const match = /^#token-(\d+)-(\d+)-(\d+)-(\d+)$/.exec(window.location.hash);
    if (match) open(...match.slice(1).map(Number));
  }

  prepare();
  draw();
  Tokens.listen(list);
  for (const name of ["color", "run", "step", "sort", "layout", "first", "second"]) {
    control[name].addEventListener("change", () => {
      if (name !== "color") pinned = -1;
      shown = PAGE;
      draw();
    });
  }
  control.prompt.addEventListener("change", () => {
    fillRuns();
    draw();
  });
  control.search.addEventListener("input", () => {
    pinned = -1;
    shown = PAGE;
    draw();
  });
  by("controls").addEventListener("submit", (event) => event.preventDefault());
  by("more").addEventListener("click", () => {
    const first = list.children.length;
    shown += PAGE;
    drawList();
    list.children[first]?.querySelector("summary")?.focus();
  });
  window.addEventListener("hashchange", follow);
  /* A second click on the same link changes no hash. */
  document.addEventListener("click", (event) => {
    if (event.target.closest("a.spot")) setTimeout(follow);
  });
  follow();
})();
