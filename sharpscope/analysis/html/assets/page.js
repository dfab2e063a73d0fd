"use strict";
/* On paper every verdict and spike is open; long tables stay closed. */
(() => {
  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details.verdict:not([open]), details.untestable:not([open]), details.spike:not([open])")];
    for (const details of closed) details.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const details of closed) details.open = false;
  });
})();
