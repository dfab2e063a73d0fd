"use strict";
/* The token view: controls, the completions of a prompt together, one list, two runs side by side, keys, and links. */
(() => {
  const PAGE = 12;
  const SIDE = 16;
  const GROUPS = 6;
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
  let at = 0; // which of the groups

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

  const groupOf = (c) => `${c.r} ${c.s} ${c.g ?? "p"} ${c.g === null ? c.p : ""}`;

  /* The groups that the controls leave, each the numbers of its completions: a group is shown whole. */
  function groups() {
    const keys = [...new Set(chosen().map((i) => groupOf(data.completions[i])))];
    return keys.map((key) => data.completions.map((_, i) => i).filter((i) => groupOf(data.completions[i]) === key)
      .sort((a, b) => data.completions[a].n - data.completions[b].n));
  }

  /* What a group is, above its completions. */
  function headOf(members) {
    const rewards = members.map((c) => c.reward).filter((r) => typeof r === "number");
    const known = members.filter((c) => c.ok !== null);
    const head = make("div", "head");
    const run = data.runs.length > 1 ? `${data.runs[members[0].r]} · ` : "";
    const parts = [`${run}step ${members[0].s} · ${members.length} completions of one prompt`];
    if (known.length) parts.push(`${known.filter((c) => c.ok).length} of ${known.length} right`);
    if (rewards.length) parts.push(`mean reward ${Colors.format(rewards.reduce((a, b) => a + b, 0) / rewards.length)}`);
    parts.push(`here for: ${members[0].why}`);
    head.append(make("p", "facts", parts.join(" · ")), Tokens.prompt(members[0], true));
    return head;
  }

  /* One group; of a chosen step all that the file has, so that no prompt behind a spike is missed. */
  function drawGroup() {
    const all = groups();
    at = Math.max(0, Math.min(at, all.length - 1));
    by("more").hidden = true;
    list.className = "group";
    list.classList.toggle("short", all.length > 0 && all[at].every((i) => Tokens.wholeText(data.completions[i]).length < 160));
    if (!all.length) {
      list.replaceChildren();
      by("count").textContent = "0 prompts";
      return;
    }
    const whole = control.step.value !== "" && all.length > 1;
    const drawn = whole ? [...all.slice(at), ...all.slice(0, at)].slice(0, GROUPS) : [all[at]];
    list.replaceChildren(...drawn.flatMap((members) => [
      headOf(members.map((i) => data.completions[i])), ...members.map((i) => Tokens.card(i, scale(), false)),
    ]));
    by("count").textContent = whole ? `${drawn.length} of the ${all.length} prompts of step ${control.step.value}` : `Prompt ${at + 1} of ${all.length}`;
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
    if (list.contains(by("tip"))) Tokens.hide();
    const layout = control.layout.value;
    for (const element of document.querySelectorAll(".only-list, .only-group, .only-sides")) {
      const single = element.querySelector("select")?.options.length === 2 && element.querySelector("#run, #step"); // "all" and one
      element.hidden = !element.classList.contains(`only-${layout}`) || Boolean(single);
    }
    Colors.legend(by("legend"), control.color.value, scale());
    ({ group: drawGroup, list: drawList, sides: drawSides })[layout]();
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
    for (const [name, choice] of Object.entries(Colors.CHOICES)) {
      if (Colors.scale(name, data.completions).some) option(control.color, name, choice.label);
    }
    if (!control.color.options.length) option(control.color, "probability", "no numbers recorded");
    option(control.run, "", "all");
    data.runs.forEach((name, i) => option(control.run, String(i), name));
    option(control.step, "", "all");
    for (const step of [...new Set(data.completions.map((c) => c.s))].sort((a, b) => a - b)) option(control.step, String(step), String(step));
    for (const [name, [label]] of Object.entries(ORDERS)) option(control.sort, name, label);
    option(control.layout, "group", "a prompt's completions");
    option(control.layout, "list", "one list");
    const prompts = shared();
    if (prompts.length) option(control.layout, "sides", "two runs, same prompt");
    for (const [prompt] of prompts) {
      const text = data.prompts[prompt].replace(/\s+/g, " ").trim();
      option(control.prompt, String(prompt), text.length > 90 ? `${text.slice(0, 40)} … ${text.slice(-46)}` : text);
    }
    fillRuns();
  }

  function clear() {
    control.run.value = control.step.value = control.search.value = "";
    by("said").textContent = "";
  }

  /* Show the completion at run, step, number among those of its prompt, and focus the token at a position in it. */
  function open(run, step, number, place) {
    const found = data.completions.findIndex((c) => c.r === run && c.s === step && c.n === number);
    if (found < 0) return;
    control.layout.value = "group";
    clear();
    pinned = -1;
    at = groups().findIndex((members) => members.includes(found));
    draw();
    const box = list.querySelector(`[data-number="${found}"]`);
    box.scrollIntoView({ block: "center" });
    Tokens.focus(box, Tokens.indexOf(data.completions[found], place));
  }

  /* Show the completions of a step, or of the nearest one that the file has. */
  function openStep(step) {
    const steps = [...new Set(data.completions.map((c) => c.s))];
    const nearest = steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
    if (control.layout.value === "sides") control.layout.value = "group";
    clear();
    control.step.value = String(nearest);
    pinned = -1;
    [at, shown] = [0, PAGE];
    draw();
    if (nearest !== step) {
      by("said").textContent = `Step ${step} has no tokens in this page; shown is step ${nearest}. In a terminal: sharpscope tokens RUN --step ${step}`;
    }
    by("tokens").scrollIntoView();
    list.querySelector(".completion")?.focus({ preventScroll: true });
  }

  function follow() {
    const match = /^#token-(\d+)-(\d+)-(\d+)-(\d+)$/.exec(window.location.hash);
    if (match) open(...match.slice(1).map(Number));
    const step = /^#step-(\d+)$/.exec(window.location.hash);
    if (step) openStep(Number(step[1]));
  }

  function turn(by_) {
    const all = groups().length;
    at = (at + by_ + all) % all;
    draw();
    list.querySelector(".completion")?.focus();
  }

  /* The completion `by_` further than the one with the focus, or the best (1) or the worst (-1) one. */
  function step(by_) {
    const cards = [...list.querySelectorAll(".completion")];
    const now = cards.indexOf(document.activeElement.closest?.(".completion"));
    cards[Math.max(0, Math.min(cards.length - 1, now + by_))]?.focus();
  }

  function extreme(sign) {
    const cards = [...list.querySelectorAll(".completion")];
    const reward = (card) => sign * (data.completions[Number(card.dataset.number)].reward ?? -Infinity * sign);
    cards.sort((a, b) => reward(b) - reward(a))[0]?.focus();
  }

  const KEYS = {
    n: () => turn(1), N: () => turn(-1), j: () => step(1), k: () => step(-1), b: () => extreme(1), w: () => extreme(-1),
  };

  function onKey(event) {
    const inside = by("tokens").contains(event.target);
    if (!inside || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
    if (!KEYS[event.key] || ("nN".includes(event.key) && control.layout.value !== "group")) return;
    event.preventDefault();
    KEYS[event.key]();
  }

  prepare();
  draw();
  Tokens.listen(list);
  for (const name of ["color", "run", "step", "sort", "layout", "first", "second"]) {
    control[name].addEventListener("change", () => {
      if (name !== "color") [pinned, at, shown] = [-1, 0, PAGE];
      draw();
    });
  }
  control.prompt.addEventListener("change", () => {
    fillRuns();
    draw();
  });
  control.search.addEventListener("input", () => {
    [pinned, at, shown] = [-1, 0, PAGE];
    draw();
  });
  by("controls").addEventListener("submit", (event) => event.preventDefault());
  for (const button of document.querySelectorAll("[data-key]")) button.addEventListener("click", () => KEYS[button.dataset.key]());
  document.addEventListener("keydown", onKey);
  by("more").addEventListener("click", () => {
    const first = list.children.length;
    shown += PAGE;
    drawList();
    list.children[first]?.querySelector("summary")?.focus();
  });
  window.addEventListener("hashchange", follow);
  window.addEventListener("openstep", follow); // a second click on the same step changes no hash
  document.addEventListener("click", (event) => {
    if (event.target.closest("a.spot")) setTimeout(follow);
  });
  follow();
})();
