"use strict";
/* How tokens are colored: what each choice reads, and which of eight shades a value gets. */
const Colors = (() => {
  const SHADES = 8;

  const probability = (v) => (v === null ? null : Math.exp(number(v)));
  const product = (a, b, f) => a && b && a.map((v, i) => (v === null || b[i] === null ? null : f(number(v), number(b[i]))));

  const effect = (name, what, unit) => ({
    label: `effect on ${what}`, signed: true, of: (c) => c.c[name],
    says: `what the token's part of the update does to ${what}, to first order through clip and optimizer; they add up over tokens, and to about 0 where the gradient was clipped${unit}`,
  });

  const CHOICES = {
    effect_kl: effect("effect_kl", "the KL divergence of the step", " [nats]"),
    effect_entropy: effect("effect_entropy", "the entropy", " [nats]"),
    effect_heldout: effect("effect_heldout", "the held-out loss", " [nats]"),
    effect_sharpness: effect("effect_sharpness", "the sharpness", ""),
    direction: {
      label: "direction", signed: true, ends: ["made less likely, underlined", "made more likely"],
      of: (c) => product(c.c.coef, c.c.logp, (coef, logp) => coef * Math.expm1(logp)),
      says: "what the update does to the token: −c·(1 − π), the pull on its own logit",
    },
    share: {
      label: "share of the gradient", signed: true, of: (c) => c.c.share,
      says: "signed share of the squared gradient norm of the token's update; the shares of all tokens of an update sum to 1",
    },
    advantage: {
      label: "advantage", signed: true, of: (c) => c.c.adv || (c.adv === null || !c.t ? undefined : c.t.map(() => c.adv)),
      says: "advantage of the token or of its completion",
    },
    coef: {
      label: "loss coefficient", signed: true, of: (c) => c.c.coef,
      says: "c = dL/d ln π with advantage, weight, clipping and normalizer; negative makes the token more likely",
    },
    mismatch: {
      label: "mismatch", signed: true, of: (c) => c.c.mismatch,
      says: "ln π − ln μ: the trainer's log-probability minus the sampler's [nats]",
    },
    change: {
      label: "entropy change", signed: true, of: (c) => product(c.c.coef, c.c.polarity, (coef, polarity) => coef * polarity),
      says: "c·polarity: first-order change of this token's entropy per unit of learning rate on its logits [nats]",
    },
    ratio: {
      label: "ratio", signed: true, of: (c) => c.c.ratio && c.c.ratio.map((v) => (v === null ? null : Math.log(number(v)))),
      says: "ln (π / π_old) in the token's first update; 0 where nothing has changed",
    },
    kl: { label: "KL to the reference", signed: false, of: (c) => c.c.kl, says: "k3 estimate of KL(π ‖ reference) at the token [nats]" },
    probability: {
      label: "probability", signed: false, unlikely: true, of: (c) => c.c.logp && c.c.logp.map(probability),
      says: "probability π of the token at the start of the step; darker is less likely",
    },
    entropy: { label: "entropy", signed: false, of: (c) => c.c.entropy, says: "entropy of the next-token distribution [nats]" },
    polarity: {
      label: "polarity", signed: true, of: (c) => c.c.polarity,
      says: "p(ln p + H) − Σ p²(ln p + H): raising the token's logit lowers the entropy where it is positive",
    },
    weight: { label: "weight", signed: false, floor: true, of: (c) => c.c.weight, says: "the method's token weight" },
    score: {
      label: "score norm", signed: false, of: (c) => c.c.score || c.c.exact,
      says: "norm of the gradient of ln π over all parameters; by the local method where it was recorded, else the exact one",
    },
    influence: {
      label: "influence", signed: true, of: (c) => c.c.influence,
      says: "first-order fall of the held-out loss per unit of learning rate; positive lowers it",
    },
  };

  function number(value) {
    return value === "∞" ? Infinity : value === "−∞" ? -Infinity : value;
  }

  /* From all completions, the ends of a choice's scale: full shade at the 99 % quantile of the magnitude. */
  function scale(name, completions) {
    const choice = CHOICES[name];
    if (choice.unlikely) return { choice, low: 0, high: 1, some: completions.some((c) => c.c && c.c.logp) };
    const sizes = [];
    let low = Infinity;
    for (const completion of completions) {
      for (const raw of (completion.c && choice.of(completion)) || []) {
        const value = number(raw);
        if (value === null || !Number.isFinite(value)) continue;
        sizes.push(Math.abs(value));
        low = Math.min(low, value);
      }
    }
    sizes.sort((a, b) => a - b);
    const high = sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(0.99 * sizes.length))] : 0;
    return { choice, low: choice.floor && sizes.length ? low : 0, high, some: sizes.length > 0 };
  }

  /* 0 (none) to SHADES; grows with the square root, so that small values can still be told apart. */
  function shade(value, { choice, low, high }) {
    if (value === null || value === undefined) return 0;
    if (choice.unlikely) return Math.round(SHADES * Math.sqrt(Math.max(0, 1 - value)));
    const width = high - low;
    if (!(width > 0)) return 0;
    const part = (Math.abs(number(value)) - low) / width;
    return Math.round(SHADES * Math.sqrt(Math.min(1, Math.max(0, part))));
  }

  /* The class of a token: "up3", "down8", "size5" or "". */
  function className(value, scale_) {
    const depth = shade(value, scale_);
    if (!depth) return "";
    const kind = scale_.choice.signed ? (number(value) < 0 ? "down" : "up") : "size";
    return kind + depth;
  }

  function format(value) {
    if (value === null || value === undefined) return "not recorded";
    if (typeof value === "string") return value;
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2).replaceAll("-", "−");
    return String(Number(value.toPrecision(4))).replace("-", "−");
  }

  /* Swatches from one end of the scale to the other, and what the ends are. */
  function legend(place, name, scale_) {
    const { choice, low, high, some } = scale_;
    place.replaceChildren();
    const says = document.createElement("p");
    says.textContent = `${choice.label}: ${choice.says}.`;
    place.append(says);
    if (!some) return;
    const row = document.createElement("p");
    row.className = "swatches";
    const steps = [];
    if (choice.signed) for (let i = SHADES; i >= 1; i -= 1) steps.push(`down${i}`);
    steps.push("");
    for (let i = 1; i <= SHADES; i += 1) steps.push((choice.signed ? "up" : "size") + i);
    const ends = choice.ends || (choice.unlikely ? ["π = 1", "π = 0"]
      : choice.signed ? [`−${format(high)} and below, underlined`, `+${format(high)} and above`]
      : [format(low), `${format(high)} and above`]);
    row.append(`${ends[0]} `);
    for (const step of steps) {
      const swatch = document.createElement("span");
      swatch.className = `swatch ${step}`;
      swatch.setAttribute("aria-hidden", "true");
      row.append(swatch);
    }
    row.append(` ${ends[1]}`);
    place.append(row);
    const note = document.createElement("p");
    note.className = "small";
    note.textContent = "The shade grows with the square root of the value"
      + (choice.unlikely ? " of 1 − π." : "; full at the 99 % quantile of all tokens in this file.");
    place.append(note);
  }

  return { CHOICES, scale, className, format, legend, number };
})();
