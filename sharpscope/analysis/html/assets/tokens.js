"use strict";
/* Completions as cards of tokens: drawing one, its details, and moving in it with the keyboard. */
const Tokens = (() => {
  const SHOWN_TOKENS = 400;
  const SHOWN_TEXT = 4000;
  const SHOWN_PROMPT = 600;
  const SHOWN_PIECE = 200;
  const data = JSON.parse(document.getElementById("data-tokens").textContent);
  const tip = document.getElementById("tip");
  const hint = [...tip.childNodes];
  const home = tip.parentNode;
  const narrow = window.matchMedia("(max-width: 44rem)"); // as in report.css: there the numbers stick to the bottom of the token's completion
  const NAMES = [
    ["share", "share of the gradient", "signed part of ‖∇L‖² of its update; all tokens of the update sum to 1"],
    ["coef", "loss coefficient c", "dL/d ln π; negative makes the token more likely, positive less"],
    ["mismatch", "mismatch [nats]", "ln π − ln μ, trainer minus sampler"],
    ["ratio", "ratio π/π_old", "importance ratio in its first update; 1 where not given"],
    ["clipped", "clipped", "−1 at the lower bound, 1 at the upper one"],
    ["kl", "KL to the reference [nats]", "k3 estimate at this token"],
    ["entropy", "entropy [nats]", "of the distribution that the token was drawn from"],
    ["polarity", "polarity [nats]", "how raising the token's logit changes that entropy; positive lowers it"],
    ["weight", "token weight", "the method's factor; 1 where not given"],
    ["score", "score norm", "‖∇ ln π‖ over all parameters, without terms through other positions"],
    ["exact", "score norm, exact", "‖∇ ln π‖ over all parameters"],
    ["influence", "held-out influence [nats]", "first-order fall of the held-out loss per unit of learning rate"],
  ];

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function position(completion, index) {
    return completion.at ? completion.at[index] : index;
  }

  /* Index of the token at a position, -1 if the file has none. */
  function indexOf(completion, place) {
    return completion.at ? completion.at.indexOf(place) : place < (completion.t || []).length ? place : -1;
  }

  function piece(completion, index) {
    return data.pieces[completion.t[index]];
  }

  function wholeText(completion) {
    return completion.text !== undefined ? completion.text : completion.t.map((id) => data.pieces[id]).join("") + (completion.rest || "");
  }

  function title(completion) {
    const run = data.runs.length > 1 ? `${data.runs[completion.r]} · ` : "";
    return `${run}step ${completion.s} · completion ${completion.n}`;
  }

  function facts(completion) {
    /* What is null was not recorded. */
    const parts = [];
    if (completion.reward !== null) parts.push(`reward ${Colors.format(completion.reward)}`);
    if (completion.ok !== null) parts.push(completion.ok ? "✓ right" : "✗ wrong");
    if (completion.adv !== null) parts.push(`advantage ${Colors.format(completion.adv)}`);
    if (completion.len !== null) parts.push(`${completion.len.toLocaleString("en")} tokens`);
    if (completion.cut) parts.push("cut at the length limit");
    return parts.join(" · ");
  }

  /* Text with a button for what lies beyond `limit` characters. */
  function longText(tag, className, text, limit) {
    const box = make(tag, className, text.length > limit ? `${text.slice(0, limit)} …` : text);
    const all = make("div");
    all.append(box);
    if (text.length > limit) {
      const button = make("button", "", `Show all ${text.length.toLocaleString("en")} characters`);
      button.type = "button";
      button.addEventListener("click", () => {
        box.textContent = text;
        button.remove();
      });
      all.append(button);
    }
    return all;
  }

  function visible(text) {
    if (text === "") return "‸";
    return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥");
  }

  function spoken(text) {
    if (text === "") return "part of a character";
    return text.trim() === "" ? text.replace(/\n/g, "newline ").replace(/\t/g, "tab ").replace(/ /g, "space ").trim() : null;
  }

  function fill(list, completion, scale, upTo) {
    const values = (completion.c && scale.choice.of(completion)) || [];
    const start = list.querySelectorAll(".token").length;
    const fragment = document.createDocumentFragment();
    for (let i = start; i < upTo; i += 1) {
      if (i > 0 && position(completion, i) !== position(completion, i - 1) + 1) {
        const gap = make("span", "gap", " ⋯ ");
        gap.setAttribute("role", "presentation");
        fragment.append(gap);
      }
      const text = piece(completion, i);
      const short = text.length > SHOWN_PIECE ? `${text.slice(0, SHOWN_PIECE)} …` : text;
      const [, before, text_, after] = short.trim() ? /^( *)([^]*?)( *)$/.exec(short) : ["", "", short, ""];
      fragment.append(before); // blanks around a token are not colored
      const token = make("span", `token ${Colors.className(values[i], scale)}`, visible(text_));
      token.setAttribute("role", "option");
      token.setAttribute("aria-selected", "false");
      const name = spoken(text);
      if (name) token.setAttribute("aria-label", name);
      token.tabIndex = i === 0 ? 0 : -1;
      token.dataset.index = String(i);
      fragment.append(token, after);
    }
    list.append(fragment);
  }

  const rewards = data.completions.map((c) => c.reward).filter((r) => typeof r === "number");
  const [worst, best] = [Math.min(...rewards), Math.max(...rewards)];

  /* The prompt of a completion, to be opened. */
  function prompt(completion, open) {
    const details = make("details", "prompt");
    details.open = open;
    details.append(make("summary", "", "Prompt"), longText("pre", "text", data.prompts[completion.p], open ? SHOWN_PROMPT : SHOWN_TEXT));
    return details;
  }

  /* A card of one completion, its edge colored by the reward; `number` is its place in data.completions. */
  function card(number, scale, alone = true) {
    const completion = data.completions[number];
    const box = make("article", "completion");
    box.tabIndex = -1;
    box.dataset.number = String(number);
    if (typeof completion.reward === "number" && best > worst) {
      const part = (200 * (completion.reward - worst)) / (best - worst) - 100; // −100 % lowest, 100 % highest
      const end = part < 0 ? "--down" : "--up";
      box.style.setProperty("border-left-color", `color-mix(in srgb, rgb(var(${end})) ${Math.abs(Math.round(part))}%, var(--line))`);
    }
    box.append(make("h4", "", title(completion)), make("p", "small", facts(completion) + (alone ? ` · here for: ${completion.why}` : "")));
    if (alone) box.append(prompt(completion, false));
    if (!completion.t) {
      box.append(longText("pre", "text", completion.text, SHOWN_TEXT));
      return box;
    }
    const list = make("div", "tokens");
    list.setAttribute("role", "listbox");
    list.setAttribute("aria-orientation", "horizontal");
    list.setAttribute("aria-label", `Tokens of ${title(completion)}`);
    fill(list, completion, scale, Math.min(SHOWN_TOKENS, completion.t.length));
    const held = make("div", "held");
    held.append(list);
    box.append(held);
    const long = completion.t.some((id) => data.pieces[id].length > SHOWN_PIECE);
    if (long || completion.t.length > SHOWN_TOKENS || completion.rest) box.append(moreButton(list, completion, scale));
    if (!scale.choice.of(completion)) {
      box.append(make("p", "small", `${scale.choice.label} was not recorded at this step.`));
    }
    return box;
  }

  function moreButton(list, completion, scale) {
    const total = completion.t.length + (completion.more || 0);
    const button = make("button", "all", `Show all ${total.toLocaleString("en")} tokens in full`);
    button.type = "button";
    button.addEventListener("click", () => {
      fill(list, completion, scale, completion.t.length);
      for (const token of list.querySelectorAll(".token")) {
        const text = piece(completion, Number(token.dataset.index));
        if (text.length > SHOWN_PIECE) token.textContent = visible(text);
      }
      if (completion.rest) {
        list.after(make("p", "small", `The last ${completion.more.toLocaleString("en")} tokens, as text:`),
          make("pre", "text tail", completion.rest));
      }
      button.remove();
    });
    return button;
  }

  /* Make the token with `index` exist (long completions are cut) and focus it. */
  function focus(box, index) {
    const completion = data.completions[Number(box.dataset.number)];
    const list = box.querySelector(".tokens");
    if (!list || index < 0) return;
    if (index >= SHOWN_TOKENS) box.querySelector("button.all")?.click();
    const token = list.querySelector(`.token[data-index="${index}"]`);
    if (token && completion) move(list, token);
  }

  function move(list, token) {
    for (const other of list.querySelectorAll('.token[tabindex="0"]')) {
      other.tabIndex = -1;
      other.setAttribute("aria-selected", "false");
    }
    token.tabIndex = 0;
    token.setAttribute("aria-selected", "true");
    token.focus();
  }

  function show(token) {
    const completion = data.completions[Number(token.closest(".completion").dataset.number)];
    const index = Number(token.dataset.index);
    const rows = [["token", JSON.stringify(piece(completion, index)).slice(1, -1), ""], ["position", position(completion, index), title(completion)]];
    const { logp, coef, adv } = completion.c;
    if (logp) rows.push(["probability π", Colors.format(Math.exp(Colors.number(logp[index]))), "at the start of the step, at the sampling temperature"]);
    if (coef) rows.push(["direction", ["made more likely ↑", "none", "made less likely ↓"][Math.sign(Colors.number(coef[index] ?? 0)) + 1], "of the token's own loss"]);
    const advantage = adv ? adv[index] : completion.adv;
    if (advantage !== null) rows.push(["advantage", Colors.format(advantage), "of the token or of its completion"]);
    for (const [key, label, meaning] of NAMES) {
      const values = completion.c[key];
      if (values && values[index] !== null) rows.push([label, Colors.format(values[index]), meaning]);
    }
    const table = make("dl");
    for (const [label, value, meaning] of rows) {
      const text = String(value);
      const entry = make("div");
      entry.append(make("dt", "", label), make("dd", "", text.length > 200 ? `${text.slice(0, 200)} …` : text));
      if (meaning) entry.append(make("dd", "meaning", meaning));
      table.append(entry);
    }
    const close = make("button", "close", "Close");
    close.type = "button";
    close.addEventListener("click", hide);
    tip.replaceChildren(close, table);
    tip.classList.add("open");
    if (narrow.matches) {
      token.closest(".held").append(tip);
      token.scrollIntoView({ block: "nearest" });
    } else if (tip.parentNode !== home) home.append(tip);
    for (const other of document.querySelectorAll('[aria-describedby="tip"]')) other.removeAttribute("aria-describedby");
    token.setAttribute("aria-describedby", "tip");
  }

  function hide() {
    home.append(tip);
    tip.classList.remove("open");
    tip.replaceChildren(...hint);
  }

  /* The token nearest above or below, by where it stands on the screen. */
  function vertical(tokens, from, down) {
    const here = from.getBoundingClientRect();
    let best = null;
    let cost = Infinity;
    for (const token of tokens) {
      const there = token.getBoundingClientRect();
      const rise = down ? there.top - here.bottom : here.top - there.bottom;
      if (rise < -2) continue;
      const price = rise * 4 + Math.abs(there.left - here.left);
      if (token !== from && price < cost) [best, cost] = [token, price];
    }
    return best;
  }

  function onKey(event) {
    const token = event.target.closest(".token");
    if (!token) return;
    const list = token.closest(".tokens");
    const tokens = [...list.querySelectorAll(".token")];
    const index = tokens.indexOf(token);
    const targets = {
      ArrowRight: () => tokens[index + 1], ArrowLeft: () => tokens[index - 1], Home: () => tokens[0],
      End: () => tokens[tokens.length - 1], ArrowDown: () => vertical(tokens, token, true),
      ArrowUp: () => vertical(tokens, token, false),
    };
    if (event.key === "Escape") {
      hide();
    } else if (targets[event.key]) {
      event.preventDefault();
      const next = targets[event.key]();
      if (next) move(list, next);
    }
  }

  function listen(place) {
    place.addEventListener("keydown", onKey);
    place.addEventListener("focusin", (event) => event.target.classList.contains("token") && show(event.target));
    place.addEventListener("mouseover", (event) => event.target.classList.contains("token") && show(event.target));
    place.addEventListener("click", (event) => {
      const token = event.target.closest(".token");
      if (token) move(token.closest(".tokens"), token);
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  }

  return { data, make, card, facts, prompt, focus, hide, indexOf, listen, longText, piece, position, title, visible, wholeText };
})();
