"use strict";
/* While a run is written: ask for the page's version, and take over the parts that have changed. */
(() => {
  const WAIT = 2500; // [ms]
  let version = null;
  const note = document.createElement("p");
  note.className = "small live";
  note.setAttribute("role", "status");
  document.querySelector(".band").append(note);

  function keeps(section) {
    return section.querySelector("#curves, #tokens, #hero");
  }

  function takeOver(fresh) {
    for (const part of document.querySelectorAll("main > section")) {
      const other = fresh.getElementById(part.id);
      if (!other || keeps(part) || part.innerHTML === other.innerHTML) continue;
      const open = part.querySelector("details.part")?.open;
      part.replaceChildren(...[...other.childNodes].map((node) => document.adoptNode(node)));
      if (open !== undefined) part.querySelector("details.part").open = open;
    }
    for (const name of [".verdict", ".details", ".numbers", ".band .small"]) {
      const [here, there] = [document.querySelector(name), fresh.querySelector(name)];
      if (here && there) here.replaceWith(document.adoptNode(there));
    }
    const data = fresh.getElementById("data-curves");
    return Boolean(data && typeof Curves !== "undefined" && Curves.refresh?.(JSON.parse(data.textContent)));
  }

  async function ask() {
    try {
      const now = await (await fetch("version", { cache: "no-store" })).text();
      if (version !== null && now !== version) {
        const text = await (await fetch("./", { cache: "no-store" })).text();
        const whole = takeOver(new DOMParser().parseFromString(text, "text/html"));
        note.textContent = whole ? `live · refreshed at ${new Date().toLocaleTimeString()} · ` : "live · there are new curves · ";
        const again = document.createElement("a");
        again.href = window.location.pathname;
        again.textContent = "load the newest tokens";
        note.append(again);
      } else if (version === null) {
        note.textContent = "live";
      }
      version = now;
    } catch {
      note.textContent = "no longer live: the command has ended";
      return;
    }
    setTimeout(ask, WAIT);
  }
  ask();
})();
