"use strict";
/* Buttons that copy a command; on paper everything that opens is open. */
(() => {
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      const code = button.previousElementSibling;
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch { // where a page may not write to the clipboard, the command is selected
        window.getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }
  /* Within a notebook's frame a link to a place in the page would lead to the notebook. */
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (!link || window.location.protocol !== "about:") return;
    event.preventDefault();
    window.location.hash = link.getAttribute("href");
  });
  /* On a phone the parts after the first are closed, and the first too if it is long; a link to one opens it. */
  const parts = [...document.querySelectorAll("details.part")];
  if (window.matchMedia("(max-width: 44rem)").matches) {
    for (const part of parts.slice(1)) part.open = false;
    if (parts.length && document.documentElement.scrollHeight > 5400) parts[0].open = false; // the chart comes on top
  }
  /* The tables and layers of one step at a time: that of the address, or else the first. */
  const blocks = [...document.querySelectorAll(".of-step")];
  const steps = [...new Set(blocks.map((block) => block.dataset.step))];
  function showStep() {
    const target = document.getElementById(window.location.hash.slice(1));
    if (target?.matches("section")) target.querySelector("details.part").open = true;
    const match = /^#(?:step-|token-\d+-)(\d+)/.exec(window.location.hash);
    if (!steps.length) return;
    const chosen = match ? match[1] : steps[0];
    for (const block of blocks) block.hidden = block.dataset.step !== chosen;
    for (const link of document.querySelectorAll(".steps a")) {
      if (link.hash === `#step-${chosen}`) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    document.getElementById("step-said").textContent = steps.includes(chosen) ? "" : `Step ${chosen} has no table here.`;
    const around = document.getElementById("tokens")?.closest("details.part");
    if (match && around) around.open = true;
  }
  window.addEventListener("hashchange", showStep);
  showStep();
  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("main details:not([open])")];
    for (const details of closed) details.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const details of closed) details.open = false;
  });
})();
