// The page's own script: takes the parts that the server draws, and puts them where they belong.
"use strict";
(() => {
  const address = document.body.dataset.events;
  const link = document.getElementById("link");
  const pause = document.getElementById("pause");
  if (!address || !link || !pause) return;
  const waiting = new Map(); // name -> what a part says, while somebody reads the old one
  let paused = false;

  const say = (words) => {
    if (link.textContent !== words) link.textContent = words;
  };

  // A part that is pointed at, or typed in, or of which words are chosen, stays as it is until it is left.
  const isRead = (body) => {
    const chosen = document.getSelection();
    return (
      body.matches(":hover:not(#head *)") && body.querySelector("svg, pre, input") !== null ||
      body.contains(document.activeElement) ||
      (chosen && !chosen.isCollapsed && body.contains(chosen.anchorNode))
    );
  };

  const put = (name, html) => {
    const part = document.getElementById(name);
    const body = part && part.querySelector(".body");
    if (!body) return;
    if (paused || isRead(body)) {
      waiting.set(name, html);
      return;
    }
    waiting.delete(name);
    const open = [...body.querySelectorAll("details")].map((each) => each.open);
    const scrolled = [...body.querySelectorAll(".scroll, pre")].map((each) => [each.scrollLeft, each.scrollTop]);
    const chosen = new Set([...body.querySelectorAll("input:checked")].map((each) => each.value));
    const typed = [...body.querySelectorAll("input[type=number]")].map((each) => [each.name, each.value, each.defaultValue]);
    body.innerHTML = html; // escaped by the server; no script in it would run, by the page's policy
    part.hidden = html === "";
    body.querySelectorAll("details").forEach((each, index) => (each.open = open[index] ?? each.open));
    body.querySelectorAll(".scroll, pre").forEach((each, index) => {
      if (scrolled[index]) [each.scrollLeft, each.scrollTop] = scrolled[index];
    });
    body.querySelectorAll("input").forEach((each) => (each.checked = chosen.has(each.value)));
    typed.filter(([, value, first]) => value !== first).forEach(([name, value]) => {
      const field = body.querySelector(`input[name="${name}"]`);
      if (field) field.value = value;
    });
    if (name === "runs") sieve();
  };

  // Of many runs those are shown in whose rows all of the words are that were typed.
  const find = document.getElementById("find");
  const sieve = () => {
    if (!find) return;
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...document.querySelectorAll("#runs tbody tr")];
    rows.forEach((row) => (row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word))));
    const told = `${rows.filter((row) => !row.hidden).length} of ${rows.length} runs`;
    const found = document.getElementById("found");
    if (found.textContent !== told) found.textContent = told;
  };
  if (find) {
    find.hidden = false;
    find.addEventListener("input", sieve);
    find.addEventListener("keydown", (event) => event.key === "Enter" && event.preventDefault());
    sieve();
  }

  const flush = () => [...waiting].forEach(([name, html]) => put(name, html));

  const source = new EventSource(address);
  source.addEventListener("part", (event) => {
    const told = JSON.parse(event.data);
    put(told.name, told.html);
    document.body.dataset.updates = String(Number(document.body.dataset.updates || 0) + 1);
  });
  source.addEventListener("open", () => say(paused ? "paused" : "live"));
  source.addEventListener("error", () =>
    say(source.readyState === EventSource.CLOSED ? "the server is gone" : "connection lost, trying again"));
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "go on" : "pause";
    say(paused ? "paused" : "live");
    if (!paused) flush();
  });
  setInterval(() => paused || flush(), 500);
})();
